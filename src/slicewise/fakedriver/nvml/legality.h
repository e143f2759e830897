/* What fits: slices, budgets, and where the driver itself would put an instance. */
#ifndef SLICEWISE_LEGALITY_H
#define SLICEWISE_LEGALITY_H

#include "store.h"

const GpuProfile *profile_with_number(uint32_t number);
const GpuProfile *profile_with_id(uint32_t id);
/* What drivers know of an id that no profile of this GPU has. */
typedef enum {
    UNKNOWN_ID, /* nothing: it is an invalid argument */
    REFUSED_ID, /* other GPUs have it: not supported here */
    EMPTY_ID /* other GPUs have it: here it may be placed nowhere */
} Absence;
Absence absence_of(uint32_t id);

const ComputeProfile *compute_profile_with_id(const GpuProfile *profile, uint32_t id);

/* The slices that the instances of a GPU take, as a mask. */
uint32_t taken_slices(const Gpu *gpu);

/* Whether a profile is offered at a start, and whether it could go there now. */
bool offered(const GpuProfile *profile, uint32_t start);
bool fits(const Gpu *gpu, const GpuProfile *profile, uint32_t start);

/* Where the driver would put it: the first start in its own order that is free, or ANY. */
uint32_t chosen_start(const Gpu *gpu, const GpuProfile *profile);

/* How many more instances of a profile the GPU could take. */
uint32_t room_for(const Gpu *gpu, const GpuProfile *profile);

/* The same of compute instances in a GPU instance. */
uint32_t taken_compute(const Gpu *gpu, const GpuInstance *instance);
bool compute_offered(const ComputeProfile *profile, uint32_t start);
uint32_t chosen_compute_start(uint32_t taken, const ComputeProfile *profile);

/* The mask of a window. */
static inline uint32_t window(uint32_t start, uint32_t size) { return ((1u << size) - 1) << start; }

#endif
