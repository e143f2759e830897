/* Placement rules: free slices, budgets, and the driver's choice of a start. */
#ifndef SLICEWISE_LEGALITY_H
#define SLICEWISE_LEGALITY_H

#include "store.h"

const GpuProfile *profile_with_number(uint32_t number);
const GpuProfile *profile_with_id(uint32_t id);
/* How drivers treat an id that no profile of this GPU has. */
typedef enum {
    UNKNOWN_ID, /* unknown to all GPUs: invalid argument */
    REFUSED_ID, /* known from other GPUs: not supported */
    EMPTY_ID /* known from other GPUs: no placements */
} Absence;
Absence absence_of(uint32_t id);

const ComputeProfile *compute_profile_with_id(const GpuProfile *profile, uint32_t id);

/* The slices that the instances of a GPU occupy, as a mask. */
uint32_t used_slices(const Gpu *gpu);

/* Whether a profile is offered at a start, and whether it fits there now. */
bool offered(const GpuProfile *profile, uint32_t start);
bool fits(const Gpu *gpu, const GpuProfile *profile, uint32_t start);

/* The driver's choice: the first free start in its preferred order, or ANY. */
uint32_t default_start(const Gpu *gpu, const GpuProfile *profile);

/* How many more instances of a profile fit on the GPU. */
uint32_t remaining_capacity(const Gpu *gpu, const GpuProfile *profile);

/* The same for compute instances in a GPU instance. */
uint32_t used_compute_slices(const Gpu *gpu, const GpuInstance *instance);
bool compute_offered(const ComputeProfile *profile, uint32_t start);
uint32_t default_compute_start(uint32_t taken, const ComputeProfile *profile);

/* The mask of `size` slices from `start`. */
static inline uint32_t window(uint32_t start, uint32_t size) { return ((1u << size) - 1) << start; }

#endif
