/* The functions that count calls and support faults.
 *
 * library.py reads the names from this file; their order is the order of the counters.
 */
#ifndef SLICEWISE_FUNCTIONS_H
#define SLICEWISE_FUNCTIONS_H

#define FUNCTIONS(X) \
    X(nvmlInitWithFlags) \
    X(nvmlInit_v2) \
    X(nvmlShutdown) \
    X(nvmlSystemGetDriverVersion) \
    X(nvmlSystemGetNVMLVersion) \
    X(nvmlSystemGetCudaDriverVersion) \
    X(nvmlSystemGetCudaDriverVersion_v2) \
    X(nvmlDeviceGetCount_v2) \
    X(nvmlDeviceGetHandleByIndex_v2) \
    X(nvmlDeviceGetHandleByUUID) \
    X(nvmlDeviceGetHandleByPciBusId_v2) \
    X(nvmlDeviceGetUUID) \
    X(nvmlDeviceGetName) \
    X(nvmlDeviceGetSerial) \
    X(nvmlDeviceGetIndex) \
    X(nvmlDeviceGetMinorNumber) \
    X(nvmlDeviceGetPciInfo_v3) \
    X(nvmlDeviceGetArchitecture) \
    X(nvmlDeviceGetBrand) \
    X(nvmlDeviceGetVirtualizationMode) \
    X(nvmlDeviceGetCudaComputeCapability) \
    X(nvmlDeviceGetMemoryInfo) \
    X(nvmlDeviceGetMemoryInfo_v2) \
    X(nvmlDeviceGetTemperature) \
    X(nvmlDeviceGetTemperatureV) \
    X(nvmlDeviceGetEccMode) \
    X(nvmlDeviceGetTotalEccErrors) \
    X(nvmlDeviceGetComputeRunningProcesses_v2) \
    X(nvmlDeviceGetComputeRunningProcesses_v3) \
    X(nvmlDeviceGetMigMode) \
    X(nvmlDeviceSetMigMode) \
    X(nvmlDeviceGetGpuInstanceProfileInfo) \
    X(nvmlDeviceGetGpuInstanceProfileInfoV) \
    X(nvmlDeviceGetGpuInstanceProfileInfoByIdV) \
    X(nvmlDeviceGetGpuInstancePossiblePlacements_v2) \
    X(nvmlDeviceGetGpuInstanceRemainingCapacity) \
    X(nvmlDeviceCreateGpuInstance) \
    X(nvmlDeviceCreateGpuInstanceWithPlacement) \
    X(nvmlGpuInstanceDestroy) \
    X(nvmlDeviceGetGpuInstances) \
    X(nvmlDeviceGetGpuInstanceById) \
    X(nvmlGpuInstanceGetInfo) \
    X(nvmlGpuInstanceGetComputeInstanceProfileInfo) \
    X(nvmlGpuInstanceGetComputeInstanceProfileInfoV) \
    X(nvmlGpuInstanceGetComputeInstanceRemainingCapacity) \
    X(nvmlGpuInstanceGetComputeInstancePossiblePlacements) \
    X(nvmlGpuInstanceCreateComputeInstance) \
    X(nvmlGpuInstanceCreateComputeInstanceWithPlacement) \
    X(nvmlComputeInstanceDestroy) \
    X(nvmlGpuInstanceGetComputeInstances) \
    X(nvmlGpuInstanceGetComputeInstanceById) \
    X(nvmlComputeInstanceGetInfo_v2) \
    X(nvmlDeviceIsMigDeviceHandle) \
    X(nvmlDeviceGetGpuInstanceId) \
    X(nvmlDeviceGetComputeInstanceId) \
    X(nvmlDeviceGetMaxMigDeviceCount) \
    X(nvmlDeviceGetMigDeviceHandleByIndex) \
    X(nvmlDeviceGetDeviceHandleFromMigDeviceHandle) \
    X(nvmlDeviceGetAttributes_v2) \
    X(nvmlDeviceGetSupportedEventTypes) \
    X(nvmlEventSetCreate) \
    X(nvmlDeviceRegisterEvents) \
    X(nvmlEventSetWait_v2) \
    X(nvmlEventSetFree)

#define AS_NUMBER(name) F_##name,
typedef enum { FUNCTIONS(AS_NUMBER) FUNCTION_COUNT } Function;
#undef AS_NUMBER

#endif
