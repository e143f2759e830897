/* MIG mode, GPU instance profiles and their placements. */
#include "handles.h"
#include "legality.h"

#include <string.h>

EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current,
                                         unsigned int *pending)
{
    Call call;
    Target target;
    nvmlReturn_t code = begin_gpu(&call, F_nvmlDeviceGetMigMode, device, &target);
    if (code != NVML_SUCCESS)
        return code;
    if (current == NULL || pending == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    *current = target.gpu->mig;
    *pending = target.gpu->mig_pending;
    return end(&call, NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceSetMigMode(nvmlDevice_t device, unsigned int mode,
                                         nvmlReturn_t *activation)
{
    Call call;
    Target target;
    nvmlReturn_t code = begin_gpu(&call, F_nvmlDeviceSetMigMode, device, &target);
    if (code != NVML_SUCCESS)
        return code;
    if (mode > 1 || activation == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    *activation = NVML_SUCCESS;
    bool occupied = false;
    for (int slot = 0; slot < MAX_SLICES; slot++)
        occupied |= target.gpu->instances[slot].serial != 0;
    /* The reference has no such error, but a real driver refuses at once and changes nothing. The
     * activation status is for a GPU that cannot be reset to change its mode. */
    if (target.gpu->mig != mode && occupied)
        return end(&call, NVML_ERROR_IN_USE);
    Gpu *gpu = &draft()->gpus[target.number];
    gpu->mig_pending = mode;
    if (gpu->mig != mode && machine->mode_needs_reset)
        *activation = NVML_ERROR_RESET_REQUIRED;
    else
        gpu->mig = mode;
    commit(&call);
    return end(&call, NVML_SUCCESS);
}

/* Fill the structure in the version that the caller uses.
 *
 * As on a real driver, the version is returned as 0, and version 3 has no name. */
static nvmlReturn_t describe(const GpuProfile *profile, void *info)
{
    unsigned int version;
    memcpy(&version, info, sizeof version);
    if (version == VERSIONED(nvmlGpuInstanceProfileInfo_v2_t, 2)) {
        nvmlGpuInstanceProfileInfo_v2_t result = {
            .id = profile->id,
            .sliceCount = profile->compute,
            .instanceCount = profile->instances,
            .multiprocessorCount = profile->multiprocessors,
            .copyEngineCount = profile->copy_engines,
            .decoderCount = profile->decoders,
            .encoderCount = profile->encoders,
            .jpegCount = profile->jpeg_engines,
            .ofaCount = profile->ofa_engines,
            .memorySizeMB = profile->memory_mib,
        };
        memcpy(result.name, profile->name, NAME_SIZE);
        memcpy(info, &result, sizeof result);
        return NVML_SUCCESS;
    }
    if (version == VERSIONED(nvmlGpuInstanceProfileInfo_v3_t, 3)) {
        nvmlGpuInstanceProfileInfo_v3_t result = {
            .id = profile->id,
            .sliceCount = profile->compute,
            .instanceCount = profile->instances,
            .multiprocessorCount = profile->multiprocessors,
            .copyEngineCount = profile->copy_engines,
            .decoderCount = profile->decoders,
            .encoderCount = profile->encoders,
            .jpegCount = profile->jpeg_engines,
            .ofaCount = profile->ofa_engines,
            .memorySizeMB = profile->memory_mib,
            .capabilities = profile->capabilities,
        };
        memcpy(info, &result, sizeof result);
        return NVML_SUCCESS;
    }
    return NVML_ERROR_INVALID_ARGUMENT;
}

/* Find a profile by NVML's constant; a GPU may have one that driver 580 does not know. */
static nvmlReturn_t by_number(unsigned int number, const GpuProfile **profile)
{
    *profile = profile_with_number(number);
    if (*profile != NULL)
        return NVML_SUCCESS;
    return number < GPU_INSTANCE_PROFILE_COUNT ? NVML_ERROR_NOT_SUPPORTED
                                               : NVML_ERROR_INVALID_ARGUMENT;
}

/* The remaining capacity for an id that no profile of the GPU has: an error or 0. */
static nvmlReturn_t absent_profile(unsigned int id, unsigned int *count)
{
    switch (absence_of(id)) {
    case UNKNOWN_ID:
        return NVML_ERROR_INVALID_ARGUMENT;
    case REFUSED_ID:
        return NVML_ERROR_NOT_SUPPORTED;
    default:
        *count = 0;
        return NVML_SUCCESS;
    }
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t device, unsigned int number,
                                                        nvmlGpuInstanceProfileInfo_t *info)
{
    Call call;
    Target target;
    const GpuProfile *profile;
    nvmlReturn_t code = begin_gpu(&call, F_nvmlDeviceGetGpuInstanceProfileInfo, device, &target);
    if (code != NVML_SUCCESS)
        return code;
    code = info == NULL ? NVML_ERROR_INVALID_ARGUMENT : by_number(number, &profile);
    if (code == NVML_SUCCESS)
        *info = (nvmlGpuInstanceProfileInfo_t){
            .id = profile->id,
            .sliceCount = profile->compute,
            .instanceCount = profile->instances,
            .multiprocessorCount = profile->multiprocessors,
            .copyEngineCount = profile->copy_engines,
            .decoderCount = profile->decoders,
            .encoderCount = profile->encoders,
            .jpegCount = profile->jpeg_engines,
            .ofaCount = profile->ofa_engines,
            .memorySizeMB = profile->memory_mib,
        };
    return end(&call, code);
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoV(nvmlDevice_t device, unsigned int number,
                                                         void *info)
{
    Call call;
    Target target;
    const GpuProfile *profile;
    nvmlReturn_t code = begin_gpu(&call, F_nvmlDeviceGetGpuInstanceProfileInfoV, device, &target);
    if (code != NVML_SUCCESS)
        return code;
    code = info == NULL ? NVML_ERROR_INVALID_ARGUMENT : by_number(number, &profile);
    return end(&call, code == NVML_SUCCESS ? describe(profile, info) : code);
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoByIdV(nvmlDevice_t device, unsigned int id,
                                                             void *info)
{
    Call call;
    Target target;
    nvmlReturn_t code =
        begin_gpu(&call, F_nvmlDeviceGetGpuInstanceProfileInfoByIdV, device, &target);
    if (code != NVML_SUCCESS)
        return code;
    const GpuProfile *profile = profile_with_id(id);
    if (info == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    if (profile != NULL)
        return end(&call, describe(profile, info));
    bool unknown = absence_of(id) == UNKNOWN_ID;
    return end(&call, unknown ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_NOT_FOUND);
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements_v2(nvmlDevice_t device,
                                                                  unsigned int id,
                                                                  nvmlPlacement_t *placements,
                                                                  unsigned int *count)
{
    Call call;
    Target target;
    nvmlReturn_t code =
        begin_gpu(&call, F_nvmlDeviceGetGpuInstancePossiblePlacements_v2, device, &target);
    if (code != NVML_SUCCESS)
        return code;
    if (count == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    const GpuProfile *profile = profile_with_id(id);
    if (profile == NULL)
        return end(&call, absent_profile(id, count));
    /* Works with MIG off as well, and ignores the caller's count. */
    for (uint32_t number = 0; placements != NULL && number < profile->start_count; number++)
        placements[number] = (nvmlPlacement_t){profile->starts[number], profile->size};
    *count = profile->start_count;
    return end(&call, NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceRemainingCapacity(nvmlDevice_t device, unsigned int id,
                                                              unsigned int *count)
{
    Call call;
    Target target;
    nvmlReturn_t code =
        begin_gpu(&call, F_nvmlDeviceGetGpuInstanceRemainingCapacity, device, &target);
    if (code != NVML_SUCCESS)
        return code;
    if (count == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    const GpuProfile *profile = profile_with_id(id);
    if (profile == NULL)
        return end(&call, absent_profile(id, count));
    /* Works with MIG off as well. */
    *count = remaining_capacity(target.gpu, profile);
    return end(&call, NVML_SUCCESS);
}
