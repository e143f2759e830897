/* The frame of every call: lock the machine, apply faults, read or change the state, unlock. */
#ifndef SLICEWISE_STORE_H
#define SLICEWISE_STORE_H

#include <stdbool.h>
#include <stddef.h>

#include "functions.h"
#include "state.h"

typedef struct {
    Function function;
    nvmlReturn_t late; /* error to return after the call took effect */
    bool kill_during;
    bool kill_after;
} Call;

/* The machine this process is attached to; NULL before nvmlInit. Valid during calls only. */
extern File *machine;

/* Begin a call for one GPU, or ANY. On failure, the call has ended already. */
nvmlReturn_t begin(Call *call, Function function, uint32_t gpu);

/* The two halves of `begin`, for calls that must read the state to find their GPU. */
nvmlReturn_t enter(Call *call, Function function);
nvmlReturn_t apply_faults(Call *call, uint32_t gpu);

/* Sleep without the lock, so a slow call does not block others. */
nvmlReturn_t sleep_unlocked(uint32_t milliseconds);

/* End a call; returns the code for the caller. */
nvmlReturn_t end(Call *call, nvmlReturn_t code);

/* The active state. */
const Image *current_state(void);

/* A copy of the active state for changes, and its commit. */
Image *draft(void);
void commit(const Call *call);

/* Attach to the machine named in the environment, and detach from it. */
nvmlReturn_t attach(unsigned int flags, Function function);
nvmlReturn_t detach(void);

/* The GPUs that were present when this process attached, by index. */
uint32_t gpu_count(void);
uint32_t gpu_at(uint32_t index);
uint32_t index_of(uint32_t gpu);

#endif
