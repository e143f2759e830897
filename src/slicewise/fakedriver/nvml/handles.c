/* Resolving handles. */
#include "handles.h"

#include <stdio.h>
#include <string.h>

#define SERIAL_BITS 40
#define KIND_SHIFT 48
#define SERIAL_MASK ((1ull << SERIAL_BITS) - 1)

void *make_handle(Kind kind, uint32_t gpu, uint64_t serial)
{
    uint64_t bits = (uint64_t)kind << KIND_SHIFT | (uint64_t)gpu << SERIAL_BITS | serial;
    return (void *)(uintptr_t)bits;
}

static uint64_t handle_bits(const void *handle) { return (uint64_t)(uintptr_t)handle; }

uint32_t handle_gpu(const void *handle)
{
    return handle == NULL ? ANY : (uint32_t)(handle_bits(handle) >> SERIAL_BITS & 0xFF);
}

const GpuInstance *instance_of(const Gpu *gpu, uint64_t serial)
{
    for (int slot = 0; slot < MAX_SLICES && serial != 0; slot++)
        if (gpu->instances[slot].serial == serial)
            return &gpu->instances[slot];
    return NULL;
}

const ComputeInstance *compute_of(const Gpu *gpu, uint64_t serial)
{
    for (int slot = 0; slot < MAX_SLICES && serial != 0; slot++)
        if (gpu->computes[slot].serial == serial)
            return &gpu->computes[slot];
    return NULL;
}

static nvmlReturn_t resolve(const void *handle, Target *target)
{
    Kind kind = (Kind)(handle_bits(handle) >> KIND_SHIFT);
    uint64_t serial = handle_bits(handle) & SERIAL_MASK;
    *target = (Target){.number = handle_gpu(handle)};
    if (target->number >= machine->gpu_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    target->gpu = &current_state()->gpus[target->number];
    target->facts = &machine->facts[target->number];
    if (kind == GI_HANDLE)
        target->instance = instance_of(target->gpu, serial);
    if (kind == MIG_HANDLE || kind == CI_HANDLE) {
        target->compute = compute_of(target->gpu, serial);
        if (target->compute != NULL)
            target->instance = instance_of(target->gpu, target->compute->parent);
    }
    if (target->gpu->lost || target->gpu->removed)
        return NVML_ERROR_GPU_IS_LOST;
    if (kind == GPU_HANDLE)
        return NVML_SUCCESS;
    if (target->instance == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    target->profile = &machine->profiles[target->instance->profile];
    if (target->compute != NULL)
        target->compute_profile = &target->profile->compute_profiles[target->compute->profile];
    return NVML_SUCCESS;
}

static bool has_kind(const void *handle, Kind kind)
{
    return handle_bits(handle) >> KIND_SHIFT == kind;
}

static nvmlReturn_t begin_with(Call *call, Function function, const void *handle, bool valid_kind,
                               Target *target)
{
    nvmlReturn_t code = begin(call, function, handle_gpu(handle));
    if (code != NVML_SUCCESS)
        return code;
    code = valid_kind ? resolve(handle, target) : NVML_ERROR_INVALID_ARGUMENT;
    return code == NVML_SUCCESS ? NVML_SUCCESS : end(call, code);
}

nvmlReturn_t begin_device(Call *call, Function function, nvmlDevice_t device, Target *target)
{
    bool valid_kind = has_kind(device, GPU_HANDLE) || has_kind(device, MIG_HANDLE);
    return begin_with(call, function, device, valid_kind, target);
}

nvmlReturn_t begin_gpu(Call *call, Function function, nvmlDevice_t device, Target *target)
{
    nvmlReturn_t code = begin_device(call, function, device, target);
    if (code == NVML_SUCCESS && target->compute != NULL)
        return end(call, NVML_ERROR_INVALID_ARGUMENT);
    return code;
}

nvmlReturn_t begin_mig(Call *call, Function function, nvmlDevice_t device, Target *target)
{
    nvmlReturn_t code = begin_device(call, function, device, target);
    if (code == NVML_SUCCESS && target->compute == NULL)
        return end(call, NVML_ERROR_INVALID_ARGUMENT);
    return code;
}

nvmlReturn_t begin_instance(Call *call, Function function, nvmlGpuInstance_t handle, Target *target)
{
    return begin_with(call, function, handle, has_kind(handle, GI_HANDLE), target);
}

nvmlReturn_t begin_compute(Call *call, Function function, nvmlComputeInstance_t handle,
                           Target *target)
{
    return begin_with(call, function, handle, has_kind(handle, CI_HANDLE), target);
}

uint32_t mig_devices(const Gpu *gpu, const ComputeInstance *sorted[MAX_SLICES])
{
    uint32_t count = 0;
    for (int slot = 0; slot < MAX_SLICES; slot++) {
        const ComputeInstance *next = &gpu->computes[slot];
        if (next->serial == 0)
            continue;
        uint32_t at = count++;
        for (; at > 0; at--) {
            const ComputeInstance *other = sorted[at - 1];
            uint32_t mine = instance_of(gpu, next->parent)->id;
            uint32_t theirs = instance_of(gpu, other->parent)->id;
            if (theirs < mine || (theirs == mine && other->id < next->id))
                break;
            sorted[at] = other;
        }
        sorted[at] = next;
    }
    return count;
}

/* The finalizer of splitmix64: consecutive numbers give unrelated results. */
static uint64_t mix(uint64_t number)
{
    number += 0x9E3779B97F4A7C15ull;
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9ull;
    number = (number ^ number >> 27) * 0x94D049BB133111EBull;
    return number ^ number >> 31;
}

void new_uuid(uint32_t gpu, uint64_t serial, char text[UUID_SIZE])
{
    uint64_t low = mix(mix(machine->seed ^ mix(gpu)) ^ serial);
    uint64_t high = mix(low ^ machine->seed);
    snprintf(text, UUID_SIZE, "MIG-%08x-%04x-5%03x-%04x-%012llx", (unsigned int)(high >> 32),
             (unsigned int)(high >> 16 & 0xFFFF), (unsigned int)(high & 0xFFF),
             (unsigned int)(low >> 48 & 0x3FFF) | 0x8000,
             (unsigned long long)(low & 0xFFFFFFFFFFFFull));
}

nvmlReturn_t copy_text(const char *text, char *buffer, unsigned int length)
{
    if (buffer == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(text) + 1 > length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(buffer, text);
    return NVML_SUCCESS;
}
