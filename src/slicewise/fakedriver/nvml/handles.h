/* Handles, and the objects they refer to.
 *
 * A handle encodes its kind, its GPU and the serial of an instance. Serials are never reused, so
 * the handle of a destroyed instance is detected even if another instance took its placement.
 */
#ifndef SLICEWISE_HANDLES_H
#define SLICEWISE_HANDLES_H

#include "store.h"

typedef enum {
    GPU_HANDLE = 0x5347,
    MIG_HANDLE = 0x534D,
    GI_HANDLE = 0x5349,
    CI_HANDLE = 0x5343
} Kind;

void *make_handle(Kind kind, uint32_t gpu, uint64_t serial);
uint32_t handle_gpu(const void *handle);

/* The GPU instance or compute instance with a serial, or NULL. */
const GpuInstance *instance_of(const Gpu *gpu, uint64_t serial);
const ComputeInstance *compute_of(const Gpu *gpu, uint64_t serial);

/* The objects that a handle refers to. */
typedef struct {
    uint32_t number; /* index of the GPU in the machine */
    const Gpu *gpu;
    const GpuFacts *facts;
    const GpuInstance *instance; /* NULL for a GPU */
    const GpuProfile *profile;
    const ComputeInstance *compute; /* NULL for a GPU and for a GPU instance */
    const ComputeProfile *compute_profile;
} Target;

/* Begin a call with a handle. On failure, the call has ended already. */
nvmlReturn_t begin_device(Call *call, Function function, nvmlDevice_t device, Target *target);
nvmlReturn_t begin_gpu(Call *call, Function function, nvmlDevice_t device, Target *target);
nvmlReturn_t begin_mig(Call *call, Function function, nvmlDevice_t device, Target *target);
nvmlReturn_t begin_instance(Call *call, Function function, nvmlGpuInstance_t handle,
                            Target *target);
nvmlReturn_t begin_compute(Call *call, Function function, nvmlComputeInstance_t handle,
                           Target *target);

/* The compute instances of a GPU as MIG devices, in index order. */
uint32_t mig_devices(const Gpu *gpu, const ComputeInstance *sorted[MAX_SLICES]);

/* A UUID for the MIG device of a new compute instance. */
void new_uuid(uint32_t gpu, uint64_t serial, char text[UUID_SIZE]);

/* Copy text into a caller's buffer of `length` bytes. */
nvmlReturn_t copy_text(const char *text, char *buffer, unsigned int length);

#endif
