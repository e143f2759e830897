/* Placement rules. Slices, starts and budgets come from the state file, not from the code. */
#include "legality.h"

const GpuProfile *profile_with_number(uint32_t number)
{
    for (uint32_t index = 0; index < machine->profile_count; index++)
        if (machine->profiles[index].number == number)
            return &machine->profiles[index];
    return NULL;
}

const GpuProfile *profile_with_id(uint32_t id)
{
    for (uint32_t index = 0; index < machine->profile_count; index++)
        if (machine->profiles[index].id == id)
            return &machine->profiles[index];
    return NULL;
}

/* Ids that an H200 with driver 580 distinguishes. Its own ids are refused on other GPUs. */
Absence absence_of(uint32_t id)
{
    static const uint32_t refused[] = {0, 5, 6, 9, 10, 14, 15, 19, 20, 21};
    static const uint32_t empty[] = {32, 35, 38, 47, 48, 64, 65, 66, 67};
    for (size_t at = 0; at < sizeof refused / sizeof *refused; at++)
        if (refused[at] == id)
            return REFUSED_ID;
    for (size_t at = 0; at < sizeof empty / sizeof *empty; at++)
        if (empty[at] == id)
            return EMPTY_ID;
    return UNKNOWN_ID;
}

const ComputeProfile *compute_profile_with_id(const GpuProfile *profile, uint32_t id)
{
    for (uint32_t index = 0; index < profile->compute_profile_count; index++)
        if (profile->compute_profiles[index].id == id)
            return &profile->compute_profiles[index];
    return NULL;
}

uint32_t used_slices(const Gpu *gpu)
{
    uint32_t taken = 0;
    for (int slot = 0; slot < MAX_SLICES; slot++) {
        const GpuInstance *instance = &gpu->instances[slot];
        if (instance->serial != 0)
            taken |= window(instance->start, machine->profiles[instance->profile].size);
    }
    return taken;
}

static bool within_budgets(const Gpu *gpu, const GpuProfile *profile)
{
    for (uint32_t budget = 0; budget < machine->budget_count; budget++) {
        uint32_t used = profile->uses[budget];
        for (int slot = 0; slot < MAX_SLICES; slot++)
            if (gpu->instances[slot].serial != 0)
                used += machine->profiles[gpu->instances[slot].profile].uses[budget];
        if (used > machine->budgets[budget])
            return false;
    }
    return true;
}

bool offered(const GpuProfile *profile, uint32_t start)
{
    for (uint32_t number = 0; number < profile->start_count; number++)
        if (profile->starts[number] == start)
            return true;
    return false;
}

bool fits(const Gpu *gpu, const GpuProfile *profile, uint32_t start)
{
    return !(used_slices(gpu) & window(start, profile->size)) && within_budgets(gpu, profile);
}

uint32_t default_start(const Gpu *gpu, const GpuProfile *profile)
{
    for (uint32_t number = 0; number < profile->start_count; number++)
        if (fits(gpu, profile, profile->preferred[number]))
            return profile->preferred[number];
    return ANY;
}

uint32_t remaining_capacity(const Gpu *gpu, const GpuProfile *profile)
{
    Gpu filled = *gpu;
    uint32_t count = 0;
    for (int slot = 0; slot < MAX_SLICES; slot++) {
        if (filled.instances[slot].serial != 0)
            continue;
        /* Filling starts from below is optimal for instances of one profile. */
        uint32_t number = 0;
        while (number < profile->start_count && !fits(&filled, profile, profile->starts[number]))
            number++;
        if (number == profile->start_count)
            break;
        filled.instances[slot] = (GpuInstance){
            .serial = 1,
            .profile = (uint32_t)(profile - machine->profiles),
            .start = profile->starts[number],
        };
        count++;
    }
    return count;
}

uint32_t used_compute_slices(const Gpu *gpu, const GpuInstance *instance)
{
    const GpuProfile *profile = &machine->profiles[instance->profile];
    uint32_t taken = 0;
    for (int slot = 0; slot < MAX_SLICES; slot++) {
        const ComputeInstance *compute = &gpu->computes[slot];
        if (compute->serial != 0 && compute->parent == instance->serial)
            taken |= window(compute->start, profile->compute_profiles[compute->profile].slices);
    }
    return taken;
}

bool compute_offered(const ComputeProfile *profile, uint32_t start)
{
    for (uint32_t number = 0; number < profile->start_count; number++)
        if (profile->starts[number] == start)
            return true;
    return false;
}

uint32_t default_compute_start(uint32_t taken, const ComputeProfile *profile)
{
    for (uint32_t number = 0; number < profile->start_count; number++)
        if (!(taken & window(profile->starts[number], profile->slices)))
            return profile->starts[number];
    return ANY;
}
