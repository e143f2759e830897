/* Memory, temperature, memory errors and processes. */
#include "handles.h"

#include <string.h>

#define MIB (1ull << 20)

/* Memory in bytes. */
typedef struct {
    unsigned long long total, reserved, used;
} Memory;

static Memory memory_of(const Target *target)
{
    Memory memory;
    if (target->compute != NULL) {
        memory.total = target->profile->memory_mib * MIB;
        memory.reserved = memory.total / 256; /* a small part */
        memory.used = target->compute->memory_used;
    } else {
        memory.total = machine->memory_mib * MIB;
        memory.reserved = machine->memory_reserved;
        memory.used = target->gpu->memory_used;
        for (int slot = 0; slot < MAX_SLICES; slot++)
            if (target->gpu->computes[slot].serial != 0)
                memory.used += target->gpu->computes[slot].memory_used;
    }
    if (memory.used > memory.total - memory.reserved)
        memory.used = memory.total - memory.reserved;
    return memory;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *info)
{
    Call call;
    Target target;
    nvmlReturn_t code = begin_device(&call, F_nvmlDeviceGetMemoryInfo, device, &target);
    if (code != NVML_SUCCESS)
        return code;
    if (info == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    Memory memory = memory_of(&target);
    /* In this older variant, reserved memory counts as used. */
    info->total = memory.total;
    info->used = memory.used + memory.reserved;
    info->free = memory.total - info->used;
    return end(&call, NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *info)
{
    Call call;
    Target target;
    nvmlReturn_t code = begin_device(&call, F_nvmlDeviceGetMemoryInfo_v2, device, &target);
    if (code != NVML_SUCCESS)
        return code;
    if (info == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    if (info->version != VERSIONED(nvmlMemory_v2_t, 2))
        return end(&call, NVML_ERROR_FUNCTION_NOT_FOUND);
    Memory memory = memory_of(&target);
    info->total = memory.total;
    info->reserved = memory.reserved;
    info->used = memory.used;
    info->free = memory.total - memory.reserved - memory.used;
    return end(&call, NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned int sensor,
                                             unsigned int *temperature)
{
    Call call;
    Target target;
    nvmlReturn_t code = begin_gpu(&call, F_nvmlDeviceGetTemperature, device, &target);
    if (code != NVML_SUCCESS)
        return code;
    if (sensor != 0 || temperature == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    *temperature = target.gpu->temperature;
    return end(&call, NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_v1_t *reading)
{
    Call call;
    Target target;
    nvmlReturn_t code = begin_gpu(&call, F_nvmlDeviceGetTemperatureV, device, &target);
    if (code != NVML_SUCCESS)
        return code;
    if (reading == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    if (reading->version != VERSIONED(nvmlTemperature_v1_t, 1))
        return end(&call, NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    if (reading->sensorType != 0)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    reading->temperature = (int)target.gpu->temperature;
    return end(&call, NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, unsigned int *current,
                                         unsigned int *pending)
{
    Call call;
    Target target;
    nvmlReturn_t code = begin_gpu(&call, F_nvmlDeviceGetEccMode, device, &target);
    if (code != NVML_SUCCESS)
        return code;
    if (current == NULL || pending == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    *current = *pending = 1;
    return end(&call, NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, unsigned int type,
                                                unsigned int counter, unsigned long long *count)
{
    Call call;
    Target target;
    nvmlReturn_t code = begin_gpu(&call, F_nvmlDeviceGetTotalEccErrors, device, &target);
    if (code != NVML_SUCCESS)
        return code;
    if (type > 1 || counter > 1 || count == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    *count = target.gpu->ecc[type][counter];
    return end(&call, NVML_SUCCESS);
}

/* The processes that use the instances of a GPU, or one MIG device. */
static nvmlReturn_t get_processes(Function function, nvmlDevice_t device, unsigned int *count,
                                   nvmlProcessInfo_t *processes)
{
    Call call;
    Target target;
    nvmlReturn_t code = begin_device(&call, function, device, &target);
    if (code != NVML_SUCCESS)
        return code;
    if (count == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    unsigned int room = processes != NULL ? *count : 0;
    unsigned int found = 0;
    for (int slot = 0; slot < MAX_SLICES; slot++) {
        const ComputeInstance *compute = &target.gpu->computes[slot];
        if (compute->serial == 0 || (target.compute != NULL && target.compute != compute))
            continue;
        const GpuInstance *instance = instance_of(target.gpu, compute->parent);
        if (instance->busy == 0)
            continue;
        if (found < room)
            processes[found] = (nvmlProcessInfo_t){
                .pid = instance->busy,
                .usedGpuMemory = compute->memory_used,
                .gpuInstanceId = instance->id,
                .computeInstanceId = compute->id,
            };
        found++;
    }
    *count = found;
    return end(&call, found > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device,
                                                            unsigned int *count,
                                                            nvmlProcessInfo_t *processes)
{
    return get_processes(F_nvmlDeviceGetComputeRunningProcesses_v2, device, count, processes);
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device,
                                                            unsigned int *count,
                                                            nvmlProcessInfo_t *processes)
{
    return get_processes(F_nvmlDeviceGetComputeRunningProcesses_v3, device, count, processes);
}
