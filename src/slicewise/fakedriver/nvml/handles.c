/* Finding what a handle stands for. */
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

static uint64_t bits_of(const void *handle) { return (uint64_t)(uintptr_t)handle; }

uint32_t handle_gpu(const void *handle)
{
    return handle == NULL ? ANY : (uint32_t)(bits_of(handle) >> SERIAL_BITS & 0xFF);
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

static nvmlReturn_t find(const void *handle, Place *place)
{
    Kind kind = (Kind)(bits_of(handle) >> KIND_SHIFT);
    uint64_t serial = bits_of(handle) & SERIAL_MASK;
    *place = (Place){.number = handle_gpu(handle)};
    if (place->number >= machine->gpu_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    place->gpu = &now()->gpus[place->number];
    place->facts = &machine->facts[place->number];
    if (kind == GI_HANDLE)
        place->instance = instance_of(place->gpu, serial);
    if (kind == MIG_HANDLE || kind == CI_HANDLE) {
        place->compute = compute_of(place->gpu, serial);
        if (place->compute != NULL)
            place->instance = instance_of(place->gpu, place->compute->parent);
    }
    if (place->gpu->lost || place->gpu->removed)
        return NVML_ERROR_GPU_IS_LOST;
    if (kind == GPU_HANDLE)
        return NVML_SUCCESS;
    if (place->instance == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    place->profile = &machine->profiles[place->instance->profile];
    if (place->compute != NULL)
        place->compute_profile = &place->profile->compute_profiles[place->compute->profile];
    return NVML_SUCCESS;
}

static bool is(const void *handle, Kind kind) { return bits_of(handle) >> KIND_SHIFT == kind; }

static nvmlReturn_t begin_with(Call *call, Function function, const void *handle, bool fitting,
                               Place *place)
{
    nvmlReturn_t code = begin(call, function, handle_gpu(handle));
    if (code != NVML_SUCCESS)
        return code;
    code = fitting ? find(handle, place) : NVML_ERROR_INVALID_ARGUMENT;
    return code == NVML_SUCCESS ? NVML_SUCCESS : end(call, code);
}

nvmlReturn_t begin_device(Call *call, Function function, nvmlDevice_t device, Place *place)
{
    bool fitting = is(device, GPU_HANDLE) || is(device, MIG_HANDLE);
    return begin_with(call, function, device, fitting, place);
}

nvmlReturn_t begin_gpu(Call *call, Function function, nvmlDevice_t device, Place *place)
{
    nvmlReturn_t code = begin_device(call, function, device, place);
    if (code == NVML_SUCCESS && place->compute != NULL)
        return end(call, NVML_ERROR_INVALID_ARGUMENT);
    return code;
}

nvmlReturn_t begin_mig(Call *call, Function function, nvmlDevice_t device, Place *place)
{
    nvmlReturn_t code = begin_device(call, function, device, place);
    if (code == NVML_SUCCESS && place->compute == NULL)
        return end(call, NVML_ERROR_INVALID_ARGUMENT);
    return code;
}

nvmlReturn_t begin_instance(Call *call, Function function, nvmlGpuInstance_t handle, Place *place)
{
    return begin_with(call, function, handle, is(handle, GI_HANDLE), place);
}

nvmlReturn_t begin_compute(Call *call, Function function, nvmlComputeInstance_t handle,
                           Place *place)
{
    return begin_with(call, function, handle, is(handle, CI_HANDLE), place);
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

/* Mixes a number so that neighbours look unlike each other (the finalizer of splitmix64). */
static uint64_t mixed(uint64_t number)
{
    number += 0x9E3779B97F4A7C15ull;
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9ull;
    number = (number ^ number >> 27) * 0x94D049BB133111EBull;
    return number ^ number >> 31;
}

void new_uuid(uint32_t gpu, uint64_t serial, char text[UUID_SIZE])
{
    uint64_t low = mixed(mixed(machine->seed ^ mixed(gpu)) ^ serial);
    uint64_t high = mixed(low ^ machine->seed);
    snprintf(text, UUID_SIZE, "MIG-%08x-%04x-5%03x-%04x-%012llx", (unsigned int)(high >> 32),
             (unsigned int)(high >> 16 & 0xFFFF), (unsigned int)(high & 0xFFF),
             (unsigned int)(low >> 48 & 0x3FFF) | 0x8000,
             (unsigned long long)(low & 0xFFFFFFFFFFFFull));
}

nvmlReturn_t give_text(const char *text, char *buffer, unsigned int length)
{
    if (buffer == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(text) + 1 > length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(buffer, text);
    return NVML_SUCCESS;
}
