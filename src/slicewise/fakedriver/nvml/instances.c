/* GPU instances: create, find, describe, destroy. */
#include "handles.h"
#include "legality.h"

/* A free slot for a new instance; there are as many slots as slices, so one is always free. */
static GpuInstance *free_slot(Gpu *gpu)
{
    for (int slot = 0; slot < MAX_SLICES; slot++)
        if (gpu->instances[slot].serial == 0)
            return &gpu->instances[slot];
    return NULL;
}

static uint32_t instance_id(uint32_t gpu, const GpuProfile *profile, uint32_t start)
{
    uint32_t number = 0;
    while (profile->starts[number] != start)
        number++;
    return profile->instance_ids[machine->facts[gpu].mirrored ? 1 : 0][number];
}

static nvmlReturn_t create(Function function, nvmlDevice_t device, unsigned int id, bool anywhere,
                           const nvmlPlacement_t *placement, nvmlGpuInstance_t *handle)
{
    Call call;
    Target target;
    nvmlReturn_t code = begin_gpu(&call, function, device, &target);
    if (code != NVML_SUCCESS)
        return code;
    if (handle == NULL || (!anywhere && placement == NULL))
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    if (!target.gpu->mig)
        return end(&call, NVML_ERROR_NOT_SUPPORTED);
    const GpuProfile *profile = profile_with_id(id);
    if (profile == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    uint32_t start;
    if (anywhere) {
        start = default_start(target.gpu, profile);
        if (start == ANY)
            return end(&call, NVML_ERROR_INSUFFICIENT_RESOURCES);
    } else {
        start = placement->start;
        if (placement->size != profile->size || !offered(profile, start))
            return end(&call, NVML_ERROR_INVALID_ARGUMENT);
        if (!fits(target.gpu, profile, start))
            return end(&call, NVML_ERROR_INSUFFICIENT_RESOURCES);
    }
    Image *next = draft();
    uint64_t serial = next->next_serial++;
    *free_slot(&next->gpus[target.number]) = (GpuInstance){
        .serial = serial,
        .profile = (uint32_t)(profile - machine->profiles),
        .start = start,
        .id = instance_id(target.number, profile, start),
    };
    commit(&call);
    *handle = make_handle(GI_HANDLE, target.number, serial);
    return end(&call, NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceCreateGpuInstance(nvmlDevice_t device, unsigned int id,
                                                nvmlGpuInstance_t *handle)
{
    return create(F_nvmlDeviceCreateGpuInstance, device, id, true, NULL, handle);
}

EXPORT nvmlReturn_t nvmlDeviceCreateGpuInstanceWithPlacement(nvmlDevice_t device, unsigned int id,
                                                             const nvmlPlacement_t *placement,
                                                             nvmlGpuInstance_t *handle)
{
    Function function = F_nvmlDeviceCreateGpuInstanceWithPlacement;
    return create(function, device, id, false, placement, handle);
}

EXPORT nvmlReturn_t nvmlGpuInstanceDestroy(nvmlGpuInstance_t handle)
{
    Call call;
    Target target;
    nvmlReturn_t code = begin_instance(&call, F_nvmlGpuInstanceDestroy, handle, &target);
    if (code != NVML_SUCCESS)
        return code;
    if (target.instance->busy || used_compute_slices(target.gpu, target.instance) != 0)
        return end(&call, NVML_ERROR_IN_USE);
    Image *next = draft();
    next->gpus[target.number].instances[target.instance - target.gpu->instances] = (GpuInstance){0};
    commit(&call);
    return end(&call, NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t device, unsigned int id,
                                              nvmlGpuInstance_t *handles, unsigned int *count)
{
    Call call;
    Target target;
    nvmlReturn_t code = begin_gpu(&call, F_nvmlDeviceGetGpuInstances, device, &target);
    if (code != NVML_SUCCESS)
        return code;
    const GpuProfile *profile = profile_with_id(id);
    if (handles == NULL || count == NULL || (profile == NULL && absence_of(id) == UNKNOWN_ID))
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    /* The list is empty with MIG off, and for profiles of other GPUs. */
    unsigned int found = 0;
    for (int slot = 0; slot < MAX_SLICES; slot++) {
        const GpuInstance *instance = &target.gpu->instances[slot];
        if (instance->serial != 0 && &machine->profiles[instance->profile] == profile)
            handles[found++] = make_handle(GI_HANDLE, target.number, instance->serial);
    }
    *count = found;
    return end(&call, NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned int id,
                                                 nvmlGpuInstance_t *handle)
{
    Call call;
    Target target;
    nvmlReturn_t code = begin_gpu(&call, F_nvmlDeviceGetGpuInstanceById, device, &target);
    if (code != NVML_SUCCESS)
        return code;
    if (handle == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    for (int slot = 0; slot < MAX_SLICES; slot++) {
        const GpuInstance *instance = &target.gpu->instances[slot];
        if (instance->serial != 0 && instance->id == id) {
            *handle = make_handle(GI_HANDLE, target.number, instance->serial);
            return end(&call, NVML_SUCCESS);
        }
    }
    return end(&call, NVML_ERROR_NOT_FOUND);
}

EXPORT nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t handle, nvmlGpuInstanceInfo_t *info)
{
    Call call;
    Target target;
    nvmlReturn_t code = begin_instance(&call, F_nvmlGpuInstanceGetInfo, handle, &target);
    if (code != NVML_SUCCESS)
        return code;
    if (info == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    *info = (nvmlGpuInstanceInfo_t){
        .device = make_handle(GPU_HANDLE, target.number, 0),
        .id = target.instance->id,
        .profileId = target.profile->id,
        .placement = {target.instance->start, target.profile->size},
    };
    return end(&call, NVML_SUCCESS);
}
