/* Memory, temperature, memory errors and processes. */
#include "handles.h"

#include <string.h>

#define MIB (1ull << 20)

/* Memory in bytes. */
typedef struct {
    unsigned long long total, reserved, used;
} Memory;

static Memory memory_of(const Place *place)
{
    Memory memory;
    if (place->compute != NULL) {
        memory.total = place->profile->memory_mib * MIB;
        memory.reserved = memory.total / 256; /* some small part */
        memory.used = place->compute->memory_used;
    } else {
        memory.total = machine->memory_mib * MIB;
        memory.reserved = machine->memory_reserved;
        memory.used = place->gpu->memory_used;
        for (int slot = 0; slot < MAX_SLICES; slot++)
            if (place->gpu->computes[slot].serial != 0)
                memory.used += place->gpu->computes[slot].memory_used;
    }
    if (memory.used > memory.total - memory.reserved)
        memory.used = memory.total - memory.reserved;
    return memory;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *info)
{
    Call call;
    Place place;
    nvmlReturn_t code = begin_device(&call, F_nvmlDeviceGetMemoryInfo, device, &place);
    if (code != NVML_SUCCESS)
        return code;
    if (info == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    Memory memory = memory_of(&place);
    /* In this older form, what is reserved counts as used. */
    info->total = memory.total;
    info->used = memory.used + memory.reserved;
    info->free = memory.total - info->used;
    return end(&call, NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *info)
{
    Call call;
    Place place;
    nvmlReturn_t code = begin_device(&call, F_nvmlDeviceGetMemoryInfo_v2, device, &place);
    if (code != NVML_SUCCESS)
        return code;
    if (info == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    if (info->version != VERSIONED(nvmlMemory_v2_t, 2))
        return end(&call, NVML_ERROR_FUNCTION_NOT_FOUND);
    Memory memory = memory_of(&place);
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
    Place place;
    nvmlReturn_t code = begin_gpu(&call, F_nvmlDeviceGetTemperature, device, &place);
    if (code != NVML_SUCCESS)
        return code;
    if (sensor != 0 || temperature == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    *temperature = place.gpu->temperature;
    return end(&call, NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_v1_t *reading)
{
    Call call;
    Place place;
    nvmlReturn_t code = begin_gpu(&call, F_nvmlDeviceGetTemperatureV, device, &place);
    if (code != NVML_SUCCESS)
        return code;
    if (reading == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    if (reading->version != VERSIONED(nvmlTemperature_v1_t, 1))
        return end(&call, NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    if (reading->sensorType != 0)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    reading->temperature = (int)place.gpu->temperature;
    return end(&call, NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, unsigned int *current,
                                         unsigned int *pending)
{
    Call call;
    Place place;
    nvmlReturn_t code = begin_gpu(&call, F_nvmlDeviceGetEccMode, device, &place);
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
    Place place;
    nvmlReturn_t code = begin_gpu(&call, F_nvmlDeviceGetTotalEccErrors, device, &place);
    if (code != NVML_SUCCESS)
        return code;
    if (type > 1 || counter > 1 || count == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    *count = place.gpu->ecc[type][counter];
    return end(&call, NVML_SUCCESS);
}

/* The processes that keep instances busy, of a GPU or of one MIG device. */
static nvmlReturn_t give_processes(Function function, nvmlDevice_t device, unsigned int *count,
                                   nvmlProcessInfo_t *processes)
{
    Call call;
    Place place;
    nvmlReturn_t code = begin_device(&call, function, device, &place);
    if (code != NVML_SUCCESS)
        return code;
    if (count == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    unsigned int room = processes != NULL ? *count : 0;
    unsigned int found = 0;
    for (int slot = 0; slot < MAX_SLICES; slot++) {
        const ComputeInstance *compute = &place.gpu->computes[slot];
        if (compute->serial == 0 || (place.compute != NULL && place.compute != compute))
            continue;
        const GpuInstance *instance = instance_of(place.gpu, compute->parent);
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
    return give_processes(F_nvmlDeviceGetComputeRunningProcesses_v2, device, count, processes);
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device,
                                                            unsigned int *count,
                                                            nvmlProcessInfo_t *processes)
{
    return give_processes(F_nvmlDeviceGetComputeRunningProcesses_v3, device, count, processes);
}
