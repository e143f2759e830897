/* Handles and properties of GPUs and MIG devices. */
#include "handles.h"

#include <stdio.h>
#include <string.h>

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    Call call;
    nvmlReturn_t code = begin(&call, F_nvmlDeviceGetCount_v2, ANY);
    if (code != NVML_SUCCESS)
        return code;
    if (count == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    *count = gpu_count();
    return end(&call, NVML_SUCCESS);
}

/* Return the handle of a GPU that was found, unless the GPU is lost. */
static nvmlReturn_t return_gpu_handle(Call *call, uint32_t gpu, nvmlDevice_t *device)
{
    const Gpu *found = &current_state()->gpus[gpu];
    if (found->lost || found->removed)
        return end(call, NVML_ERROR_GPU_IS_LOST);
    *device = make_handle(GPU_HANDLE, gpu, 0);
    return end(call, NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    Call call;
    nvmlReturn_t code = enter(&call, F_nvmlDeviceGetHandleByIndex_v2);
    if (code != NVML_SUCCESS)
        return code;
    uint32_t gpu = gpu_at(index);
    code = apply_faults(&call, gpu);
    if (code != NVML_SUCCESS)
        return code;
    if (device == NULL || gpu == ANY)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    return return_gpu_handle(&call, gpu, device);
}

/* Find a MIG device by UUID: its GPU and serial, or ANY. */
static uint32_t find_mig(const char *uuid, uint64_t *serial)
{
    for (uint32_t gpu = 0; gpu < machine->gpu_count; gpu++)
        for (int slot = 0; slot < MAX_SLICES; slot++) {
            const ComputeInstance *compute = &current_state()->gpus[gpu].computes[slot];
            if (compute->serial != 0 && strcmp(compute->uuid, uuid) == 0) {
                *serial = compute->serial;
                return gpu;
            }
        }
    return ANY;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    Call call;
    nvmlReturn_t code = enter(&call, F_nvmlDeviceGetHandleByUUID);
    if (code != NVML_SUCCESS)
        return code;
    uint32_t gpu = ANY;
    uint64_t serial = 0;
    if (uuid != NULL) {
        for (uint32_t index = 0; index < gpu_count(); index++)
            if (strcmp(machine->facts[gpu_at(index)].uuid, uuid) == 0)
                gpu = gpu_at(index);
        if (gpu == ANY)
            gpu = find_mig(uuid, &serial);
    }
    code = apply_faults(&call, gpu);
    if (code != NVML_SUCCESS)
        return code;
    if (uuid == NULL || device == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    if (gpu == ANY)
        return end(&call, NVML_ERROR_NOT_FOUND);
    if (serial == 0)
        return return_gpu_handle(&call, gpu, device);
    *device = make_handle(MIG_HANDLE, gpu, serial);
    return end(&call, NVML_SUCCESS);
}

static void format_bus_id(const GpuFacts *facts, char text[BUS_ID_SIZE])
{
    snprintf(text, BUS_ID_SIZE, "%08X:%02X:%02X.0", facts->domain, facts->bus, facts->device);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus, nvmlDevice_t *device)
{
    Call call;
    nvmlReturn_t code = enter(&call, F_nvmlDeviceGetHandleByPciBusId_v2);
    if (code != NVML_SUCCESS)
        return code;
    uint32_t gpu = ANY;
    unsigned int domain, number, slot;
    bool readable = bus != NULL && sscanf(bus, "%x:%x:%x", &domain, &number, &slot) == 3;
    for (uint32_t index = 0; readable && index < gpu_count(); index++) {
        const GpuFacts *facts = &machine->facts[gpu_at(index)];
        if (facts->domain == domain && facts->bus == number && facts->device == slot)
            gpu = gpu_at(index);
    }
    code = apply_faults(&call, gpu);
    if (code != NVML_SUCCESS)
        return code;
    if (!readable || device == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    if (gpu == ANY)
        return end(&call, NVML_ERROR_NOT_FOUND);
    return return_gpu_handle(&call, gpu, device);
}

EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
    Call call;
    Target target;
    nvmlReturn_t code = begin_device(&call, F_nvmlDeviceGetUUID, device, &target);
    if (code != NVML_SUCCESS)
        return code;
    const char *text = target.compute != NULL ? target.compute->uuid : target.facts->uuid;
    return end(&call, copy_text(text, uuid, length));
}

EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
    Call call;
    Target target;
    nvmlReturn_t code = begin_device(&call, F_nvmlDeviceGetName, device, &target);
    if (code != NVML_SUCCESS)
        return code;
    if (target.compute == NULL)
        return end(&call, copy_text(machine->name, name, length));
    char text[2 * NAME_SIZE];
    snprintf(text, sizeof text, "%s %s", machine->name, target.compute_profile->name);
    return end(&call, copy_text(text, name, length));
}

EXPORT nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned int length)
{
    Call call;
    Target target;
    nvmlReturn_t code = begin_gpu(&call, F_nvmlDeviceGetSerial, device, &target);
    if (code != NVML_SUCCESS)
        return code;
    return end(&call, copy_text(target.facts->serial, serial, length));
}

/* Query a property of a GPU that is one number. */
static nvmlReturn_t get_number(Function function, nvmlDevice_t device, unsigned int *number)
{
    Call call;
    Target target;
    nvmlReturn_t code = begin_gpu(&call, function, device, &target);
    if (code != NVML_SUCCESS)
        return code;
    if (number == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    switch (function) {
    case F_nvmlDeviceGetIndex:
        *number = index_of(target.number);
        break;
    case F_nvmlDeviceGetMinorNumber:
        *number = target.facts->minor;
        break;
    case F_nvmlDeviceGetArchitecture:
        *number = machine->architecture;
        break;
    case F_nvmlDeviceGetBrand:
        *number = BRAND_NVIDIA;
        break;
    case F_nvmlDeviceGetVirtualizationMode:
        *number = VIRTUALIZATION_NONE;
        break;
    default: /* nvmlDeviceGetMaxMigDeviceCount */
        *number = target.gpu->mig ? machine->mig_devices : 0;
        break;
    }
    return end(&call, NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
    return get_number(F_nvmlDeviceGetIndex, device, index);
}

EXPORT nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor)
{
    return get_number(F_nvmlDeviceGetMinorNumber, device, minor);
}

EXPORT nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device, unsigned int *architecture)
{
    return get_number(F_nvmlDeviceGetArchitecture, device, architecture);
}

EXPORT nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t device, unsigned int *brand)
{
    return get_number(F_nvmlDeviceGetBrand, device, brand);
}

EXPORT nvmlReturn_t nvmlDeviceGetVirtualizationMode(nvmlDevice_t device, unsigned int *mode)
{
    return get_number(F_nvmlDeviceGetVirtualizationMode, device, mode);
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
    return get_number(F_nvmlDeviceGetMaxMigDeviceCount, device, count);
}

EXPORT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    Call call;
    Target target;
    nvmlReturn_t code = begin_device(&call, F_nvmlDeviceGetCudaComputeCapability, device, &target);
    if (code != NVML_SUCCESS)
        return code;
    if (major == NULL || minor == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    *major = (int)machine->capability_major;
    *minor = (int)machine->capability_minor;
    return end(&call, NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    Call call;
    Target target;
    nvmlReturn_t code = begin_gpu(&call, F_nvmlDeviceGetPciInfo_v3, device, &target);
    if (code != NVML_SUCCESS)
        return code;
    if (pci == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    const GpuFacts *facts = target.facts;
    *pci = (nvmlPciInfo_t){
        .domain = facts->domain,
        .bus = facts->bus,
        .device = facts->device,
        .pciDeviceId = facts->pci_device_id,
        .pciSubSystemId = facts->pci_subsystem_id,
    };
    format_bus_id(facts, pci->busId);
    snprintf(pci->busIdLegacy, BUS_ID_LEGACY_SIZE, "%04X:%02X:%02X.0", facts->domain & 0xFFFF,
             facts->bus & 0xFF, facts->device & 0xFF);
    return end(&call, NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is_mig)
{
    Call call;
    Target target;
    nvmlReturn_t code = begin_device(&call, F_nvmlDeviceIsMigDeviceHandle, device, &target);
    if (code != NVML_SUCCESS)
        return code;
    if (is_mig == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    *is_mig = target.compute != NULL;
    return end(&call, NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index,
                                                        nvmlDevice_t *mig)
{
    Call call;
    Target target;
    nvmlReturn_t code = begin_gpu(&call, F_nvmlDeviceGetMigDeviceHandleByIndex, device, &target);
    if (code != NVML_SUCCESS)
        return code;
    /* With MIG off, every index is "not found", however large. */
    if (mig == NULL || (target.gpu->mig && index >= machine->mig_devices))
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    const ComputeInstance *sorted[MAX_SLICES];
    if (index >= mig_devices(target.gpu, sorted))
        return end(&call, NVML_ERROR_NOT_FOUND);
    *mig = make_handle(MIG_HANDLE, target.number, sorted[index]->serial);
    return end(&call, NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig,
                                                                 nvmlDevice_t *device)
{
    Call call;
    Target target;
    nvmlReturn_t code =
        begin_mig(&call, F_nvmlDeviceGetDeviceHandleFromMigDeviceHandle, mig, &target);
    if (code != NVML_SUCCESS)
        return code;
    if (device == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    *device = make_handle(GPU_HANDLE, target.number, 0);
    return end(&call, NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t mig, unsigned int *id)
{
    Call call;
    Target target;
    nvmlReturn_t code = begin_mig(&call, F_nvmlDeviceGetGpuInstanceId, mig, &target);
    if (code != NVML_SUCCESS)
        return code;
    if (id == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    *id = target.instance->id;
    return end(&call, NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t mig, unsigned int *id)
{
    Call call;
    Target target;
    nvmlReturn_t code = begin_mig(&call, F_nvmlDeviceGetComputeInstanceId, mig, &target);
    if (code != NVML_SUCCESS)
        return code;
    if (id == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    *id = target.compute->id;
    return end(&call, NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t mig, nvmlDeviceAttributes_t *attributes)
{
    Call call;
    Target target;
    nvmlReturn_t code = begin_device(&call, F_nvmlDeviceGetAttributes_v2, mig, &target);
    if (code != NVML_SUCCESS)
        return code;
    if (attributes == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    if (target.compute == NULL) /* for a GPU, other functions return an invalid argument */
        return end(&call, NVML_ERROR_NOT_SUPPORTED);
    const GpuProfile *profile = target.profile;
    *attributes = (nvmlDeviceAttributes_t){
        .multiprocessorCount = target.compute_profile->multiprocessors,
        .sharedCopyEngineCount = profile->copy_engines,
        .sharedDecoderCount = profile->decoders,
        .sharedEncoderCount = profile->encoders,
        .sharedJpegCount = profile->jpeg_engines,
        .sharedOfaCount = profile->ofa_engines,
        .gpuInstanceSliceCount = profile->compute,
        .computeInstanceSliceCount = target.compute_profile->slices,
        .memorySizeMB = profile->memory_mib,
    };
    return end(&call, NVML_SUCCESS);
}
