/* Calls: each takes the machine's lock, meets its faults, reads or changes the state, and ends. */
#ifndef SLICEWISE_STORE_H
#define SLICEWISE_STORE_H

#include <stdbool.h>
#include <stddef.h>

#include "functions.h"
#include "state.h"

typedef struct {
    Function function;
    nvmlReturn_t late; /* what to answer although the work was done */
    bool kill_during;
    bool kill_after;
} Call;

/* The machine this process is attached to; NULL before nvmlInit. Read under a call only. */
extern File *machine;

/* Begin a call about one GPU, or ANY. Unless it succeeds, the call has ended already. */
nvmlReturn_t begin(Call *call, Function function, uint32_t gpu);

/* The two halves of `begin`, for calls that must look before they know which GPU they are about. */
nvmlReturn_t enter(Call *call, Function function);
nvmlReturn_t meet_faults(Call *call, uint32_t gpu);

/* Sleep without the lock, so that one slow call does not hold up everybody. */
nvmlReturn_t dawdle(uint32_t milliseconds);

/* End a call; returns what the caller is to be told. */
nvmlReturn_t end(Call *call, nvmlReturn_t code);

/* The state as it is. */
const Image *now(void);

/* A copy of the state to be changed, which counts for nothing until it is committed. */
Image *draft(void);
void commit(const Call *call);

/* Attach to the machine named in the environment, and let go of it. */
nvmlReturn_t attach(unsigned int flags, Function function);
nvmlReturn_t detach(void);

/* The GPUs that were there when this process attached, by index. */
uint32_t gpu_count(void);
uint32_t gpu_at(uint32_t index);
uint32_t index_of(uint32_t gpu);

#endif
