/* Initialization, shutdown, versions and error strings. */
#include "handles.h"

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    return attach(flags, F_nvmlInitWithFlags);
}

EXPORT nvmlReturn_t nvmlInit_v2(void) { return attach(0, F_nvmlInit_v2); }

EXPORT nvmlReturn_t nvmlShutdown(void) { return detach(); }

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    Call call;
    nvmlReturn_t code = begin(&call, F_nvmlSystemGetDriverVersion, ANY);
    if (code != NVML_SUCCESS)
        return code;
    return end(&call, copy_text(machine->driver_version, version, length));
}

EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
    Call call;
    nvmlReturn_t code = begin(&call, F_nvmlSystemGetNVMLVersion, ANY);
    if (code != NVML_SUCCESS)
        return code;
    return end(&call, copy_text(machine->nvml_version, version, length));
}

static nvmlReturn_t get_cuda_version(Function function, int *version)
{
    Call call;
    nvmlReturn_t code = begin(&call, function, ANY);
    if (code != NVML_SUCCESS)
        return code;
    if (version == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    *version = (int)machine->cuda_version;
    return end(&call, NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
    return get_cuda_version(F_nvmlSystemGetCudaDriverVersion, version);
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    return get_cuda_version(F_nvmlSystemGetCudaDriverVersion_v2, version);
}

EXPORT const char *nvmlErrorString(nvmlReturn_t code)
{
    static const char *const words[] = {
        "Success",
        "Uninitialized",
        "Invalid Argument",
        "Not Supported",
        "Insufficient Permissions",
        "Already Initialized",
        "Not Found",
        "Insufficient Size",
        "Insufficient External Power",
        "Driver Not Loaded",
        "Timeout",
        "Interrupt Request Issue",
        "NVML Shared Library Not Found",
        "Function Not Found",
        "Corrupted infoROM",
        "GPU is lost",
        "GPU requires reset",
        "GPU access blocked by the operating system",
        "Driver/library version mismatch",
        "In use by another client",
        "Insufficient Memory",
        "No data",
        "vGPU ECC not supported",
        "Insufficient Resources",
        "Invalid Frequency",
        "Argument version mismatch",
        "Requested functionality has been deprecated",
        "System is not in ready state",
        "No supported GPUs were found",
        "Resource not in correct state to perform requested operation",
        "Reset type is not supported for given device",
    };
    if ((unsigned int)code < sizeof words / sizeof *words)
        return words[code];
    return "Unknown Error";
}
