/* Compute instances, each of which is a MIG device. */
#include "handles.h"
#include "legality.h"

#include <string.h>

/* Find the compute profile of a GPU instance by NVML's constant. */
static nvmlReturn_t by_number(const Target *target, unsigned int number, unsigned int engines,
                              const ComputeProfile **profile)
{
    if (number >= COMPUTE_INSTANCE_PROFILE_COUNT || engines >= COMPUTE_INSTANCE_ENGINE_PROFILE_COUNT)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (uint32_t at = 0; at < target->profile->compute_profile_count; at++)
        if (target->profile->compute_profiles[at].number == number) {
            *profile = &target->profile->compute_profiles[at];
            return NVML_SUCCESS;
        }
    return NVML_ERROR_NOT_SUPPORTED;
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfo(
    nvmlGpuInstance_t handle, unsigned int number, unsigned int engines,
    nvmlComputeInstanceProfileInfo_t *info)
{
    Call call;
    Target target;
    const ComputeProfile *profile;
    nvmlReturn_t code =
        begin_instance(&call, F_nvmlGpuInstanceGetComputeInstanceProfileInfo, handle, &target);
    if (code != NVML_SUCCESS)
        return code;
    code = info == NULL ? NVML_ERROR_INVALID_ARGUMENT
                        : by_number(&target, number, engines, &profile);
    if (code == NVML_SUCCESS)
        *info = (nvmlComputeInstanceProfileInfo_t){
            .id = profile->id,
            .sliceCount = profile->slices,
            .instanceCount = profile->instances,
            .multiprocessorCount = profile->multiprocessors,
            .sharedCopyEngineCount = target.profile->copy_engines,
            .sharedDecoderCount = target.profile->decoders,
            .sharedEncoderCount = target.profile->encoders,
            .sharedJpegCount = target.profile->jpeg_engines,
            .sharedOfaCount = target.profile->ofa_engines,
        };
    return end(&call, code);
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfoV(nvmlGpuInstance_t handle,
                                                                  unsigned int number,
                                                                  unsigned int engines, void *info)
{
    Call call;
    Target target;
    const ComputeProfile *profile;
    nvmlReturn_t code =
        begin_instance(&call, F_nvmlGpuInstanceGetComputeInstanceProfileInfoV, handle, &target);
    if (code != NVML_SUCCESS)
        return code;
    code = info == NULL ? NVML_ERROR_INVALID_ARGUMENT
                        : by_number(&target, number, engines, &profile);
    if (code != NVML_SUCCESS)
        return end(&call, code);
    unsigned int version;
    memcpy(&version, info, sizeof version);
    bool second = version == VERSIONED(nvmlComputeInstanceProfileInfo_v2_t, 2);
    if (!second && version != VERSIONED(nvmlComputeInstanceProfileInfo_v3_t, 3))
        return end(&call, NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    nvmlComputeInstanceProfileInfo_v3_t result = {
        .version = version,
        .id = profile->id,
        .sliceCount = profile->slices,
        .instanceCount = profile->instances,
        .multiprocessorCount = profile->multiprocessors,
        .sharedCopyEngineCount = target.profile->copy_engines,
        .sharedDecoderCount = target.profile->decoders,
        .sharedEncoderCount = target.profile->encoders,
        .sharedJpegCount = target.profile->jpeg_engines,
        .sharedOfaCount = target.profile->ofa_engines,
        .capabilities = target.profile->capabilities & CAPABLE_OF_GRAPHICS ? 1 : 0,
    };
    memcpy(result.name, profile->name, NAME_SIZE);
    /* Version 3 adds one field at the end of version 2. */
    memcpy(info, &result, second ? sizeof(nvmlComputeInstanceProfileInfo_v2_t) : sizeof result);
    return end(&call, NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstanceRemainingCapacity(nvmlGpuInstance_t handle,
                                                                       unsigned int id,
                                                                       unsigned int *count)
{
    Call call;
    Target target;
    nvmlReturn_t code = begin_instance(
        &call, F_nvmlGpuInstanceGetComputeInstanceRemainingCapacity, handle, &target);
    if (code != NVML_SUCCESS)
        return code;
    if (count == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    const ComputeProfile *profile = compute_profile_with_id(target.profile, id);
    if (profile == NULL)
        return end(&call, NVML_ERROR_NOT_SUPPORTED);
    uint32_t taken = used_compute_slices(target.gpu, target.instance);
    uint32_t start;
    for (*count = 0; (start = default_compute_start(taken, profile)) != ANY; ++*count)
        taken |= window(start, profile->slices);
    return end(&call, NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstancePossiblePlacements(nvmlGpuInstance_t handle,
                                                                        unsigned int id,
                                                                        nvmlPlacement_t *placements,
                                                                        unsigned int *count)
{
    Call call;
    Target target;
    nvmlReturn_t code = begin_instance(
        &call, F_nvmlGpuInstanceGetComputeInstancePossiblePlacements, handle, &target);
    if (code != NVML_SUCCESS)
        return code;
    if (count == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    const ComputeProfile *profile = compute_profile_with_id(target.profile, id);
    if (profile == NULL)
        return end(&call, NVML_ERROR_NOT_SUPPORTED);
    for (uint32_t number = 0; placements != NULL && number < profile->start_count; number++)
        placements[number] = (nvmlPlacement_t){profile->starts[number], profile->slices};
    *count = profile->start_count;
    return end(&call, NVML_SUCCESS);
}

/* The lowest unused compute instance id in a GPU instance. */
static uint32_t free_id(const Gpu *gpu, uint64_t parent)
{
    for (uint32_t id = 0;; id++) {
        bool taken = false;
        for (int slot = 0; slot < MAX_SLICES; slot++) {
            const ComputeInstance *compute = &gpu->computes[slot];
            taken |= compute->serial != 0 && compute->parent == parent && compute->id == id;
        }
        if (!taken)
            return id;
    }
}

static nvmlReturn_t create(Function function, nvmlGpuInstance_t handle, unsigned int id,
                           bool anywhere, const nvmlPlacement_t *placement,
                           nvmlComputeInstance_t *compute)
{
    Call call;
    Target target;
    nvmlReturn_t code = begin_instance(&call, function, handle, &target);
    if (code != NVML_SUCCESS)
        return code;
    if (compute == NULL || (!anywhere && placement == NULL))
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    const ComputeProfile *profile = compute_profile_with_id(target.profile, id);
    if (profile == NULL)
        return end(&call, NVML_ERROR_NOT_SUPPORTED);
    uint32_t taken = used_compute_slices(target.gpu, target.instance);
    uint32_t start = anywhere ? default_compute_start(taken, profile) : placement->start;
    if (!anywhere && (placement->size != profile->slices || !compute_offered(profile, start)))
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    if (start == ANY || taken & window(start, profile->slices))
        return end(&call, NVML_ERROR_INSUFFICIENT_RESOURCES);
    int slot = 0;
    while (slot < MAX_SLICES && target.gpu->computes[slot].serial != 0)
        slot++;
    if (slot == MAX_SLICES)
        return end(&call, NVML_ERROR_INSUFFICIENT_RESOURCES);
    Image *next = draft();
    ComputeInstance *made = &next->gpus[target.number].computes[slot];
    *made = (ComputeInstance){
        .serial = next->next_serial++,
        .parent = target.instance->serial,
        .profile = (uint32_t)(profile - target.profile->compute_profiles),
        .start = start,
        .id = free_id(target.gpu, target.instance->serial),
    };
    new_uuid(target.number, made->serial, made->uuid);
    *compute = make_handle(CI_HANDLE, target.number, made->serial);
    commit(&call);
    return end(&call, NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlGpuInstanceCreateComputeInstance(nvmlGpuInstance_t handle, unsigned int id,
                                                         nvmlComputeInstance_t *compute)
{
    return create(F_nvmlGpuInstanceCreateComputeInstance, handle, id, true, NULL, compute);
}

EXPORT nvmlReturn_t nvmlGpuInstanceCreateComputeInstanceWithPlacement(
    nvmlGpuInstance_t handle, unsigned int id, const nvmlPlacement_t *placement,
    nvmlComputeInstance_t *compute)
{
    Function function = F_nvmlGpuInstanceCreateComputeInstanceWithPlacement;
    return create(function, handle, id, false, placement, compute);
}

EXPORT nvmlReturn_t nvmlComputeInstanceDestroy(nvmlComputeInstance_t handle)
{
    Call call;
    Target target;
    nvmlReturn_t code = begin_compute(&call, F_nvmlComputeInstanceDestroy, handle, &target);
    if (code != NVML_SUCCESS)
        return code;
    if (target.instance->busy)
        return end(&call, NVML_ERROR_IN_USE);
    Image *next = draft();
    size_t slot = (size_t)(target.compute - target.gpu->computes);
    next->gpus[target.number].computes[slot] = (ComputeInstance){0};
    commit(&call);
    return end(&call, NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstances(nvmlGpuInstance_t handle, unsigned int id,
                                                       nvmlComputeInstance_t *handles,
                                                       unsigned int *count)
{
    Call call;
    Target target;
    nvmlReturn_t code =
        begin_instance(&call, F_nvmlGpuInstanceGetComputeInstances, handle, &target);
    if (code != NVML_SUCCESS)
        return code;
    if (handles == NULL || count == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    const ComputeProfile *profile = compute_profile_with_id(target.profile, id);
    if (profile == NULL)
        return end(&call, NVML_ERROR_NOT_SUPPORTED);
    uint32_t wanted = (uint32_t)(profile - target.profile->compute_profiles);
    unsigned int found = 0;
    for (int slot = 0; slot < MAX_SLICES; slot++) {
        const ComputeInstance *compute = &target.gpu->computes[slot];
        if (compute->serial != 0 && compute->parent == target.instance->serial &&
            compute->profile == wanted)
            handles[found++] = make_handle(CI_HANDLE, target.number, compute->serial);
    }
    *count = found;
    return end(&call, NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetComputeInstanceById(nvmlGpuInstance_t handle, unsigned int id,
                                                          nvmlComputeInstance_t *found)
{
    Call call;
    Target target;
    nvmlReturn_t code =
        begin_instance(&call, F_nvmlGpuInstanceGetComputeInstanceById, handle, &target);
    if (code != NVML_SUCCESS)
        return code;
    if (found == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    for (int slot = 0; slot < MAX_SLICES; slot++) {
        const ComputeInstance *compute = &target.gpu->computes[slot];
        if (compute->serial != 0 && compute->parent == target.instance->serial &&
            compute->id == id) {
            *found = make_handle(CI_HANDLE, target.number, compute->serial);
            return end(&call, NVML_SUCCESS);
        }
    }
    return end(&call, NVML_ERROR_NOT_FOUND);
}

EXPORT nvmlReturn_t nvmlComputeInstanceGetInfo_v2(nvmlComputeInstance_t handle,
                                                  nvmlComputeInstanceInfo_t *info)
{
    Call call;
    Target target;
    nvmlReturn_t code = begin_compute(&call, F_nvmlComputeInstanceGetInfo_v2, handle, &target);
    if (code != NVML_SUCCESS)
        return code;
    if (info == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    /* The reference says "parent device", but the driver returns the MIG device: NVIDIA's own
     * Kubernetes driver reads the new device's UUID through this handle. */
    *info = (nvmlComputeInstanceInfo_t){
        .device = make_handle(MIG_HANDLE, target.number, target.compute->serial),
        .gpuInstance = make_handle(GI_HANDLE, target.number, target.instance->serial),
        .id = target.compute->id,
        .profileId = target.compute_profile->id,
        .placement = {target.compute->start, target.compute_profile->slices},
    };
    return end(&call, NVML_SUCCESS);
}
