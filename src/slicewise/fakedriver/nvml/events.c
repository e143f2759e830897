/* Events: what went wrong on a GPU, told to whoever waits for it. */
#define _GNU_SOURCE
#include "handles.h"

#include <stdlib.h>
#include <time.h>

enum { FIRST_NAP_MS = 1, LONGEST_NAP_MS = 100 };

/* What a set of events waits for; it belongs to its process alone. */
typedef struct EventSet {
    struct EventSet *next;
    uint64_t types[MAX_GPUS];
    uint64_t since[MAX_GPUS]; /* events before this one are not told */
    uint64_t told; /* so many events of the machine were looked at */
} EventSet;

/* The sets in being; touched under a call only, whose lock keeps threads apart. */
static EventSet *sets = NULL;

static EventSet *known(nvmlEventSet_t handle)
{
    for (EventSet *set = sets; set != NULL; set = set->next)
        if ((void *)set == (void *)handle)
            return set;
    return NULL;
}

EXPORT nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
    Call call;
    Place place;
    nvmlReturn_t code = begin_gpu(&call, F_nvmlDeviceGetSupportedEventTypes, device, &place);
    if (code != NVML_SUCCESS)
        return code;
    if (types == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    *types = EVENTS_SUPPORTED;
    return end(&call, NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *handle)
{
    Call call;
    nvmlReturn_t code = begin(&call, F_nvmlEventSetCreate, ANY);
    if (code != NVML_SUCCESS)
        return code;
    if (handle == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    EventSet *set = calloc(1, sizeof *set);
    if (set == NULL)
        return end(&call, NVML_ERROR_MEMORY);
    set->told = now()->event_count;
    set->next = sets;
    sets = set;
    *handle = (nvmlEventSet_t)(void *)set;
    return end(&call, NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types,
                                             nvmlEventSet_t handle)
{
    Call call;
    Place place;
    nvmlReturn_t code = begin_device(&call, F_nvmlDeviceRegisterEvents, device, &place);
    if (code != NVML_SUCCESS)
        return code;
    EventSet *set = known(handle);
    if (set == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    if (place.compute != NULL || types & ~EVENTS_SUPPORTED)
        return end(&call, NVML_ERROR_NOT_SUPPORTED);
    if (set->types[place.number] == 0)
        set->since[place.number] = now()->event_count;
    set->types[place.number] |= types;
    return end(&call, NVML_SUCCESS);
}

/* The next event the set has not told; false when there is none. */
static bool take(EventSet *set, nvmlEventData_t *data)
{
    const Image *image = now();
    if (image->event_count > MAX_EVENTS && set->told < image->event_count - MAX_EVENTS)
        set->told = image->event_count - MAX_EVENTS; /* the ring has come round: those are lost */
    while (set->told < image->event_count) {
        uint64_t number = set->told++;
        const Event *event = &image->events[number % MAX_EVENTS];
        if (event->gpu >= MAX_GPUS || !(set->types[event->gpu] & event->type) ||
            number < set->since[event->gpu])
            continue;
        *data = (nvmlEventData_t){
            .device = make_handle(GPU_HANDLE, event->gpu, 0),
            .eventType = event->type,
            .eventData = event->data,
            .gpuInstanceId = event->gpu_instance,
            .computeInstanceId = event->compute_instance,
        };
        return true;
    }
    return false;
}

static bool lost_one(const EventSet *set)
{
    for (uint32_t gpu = 0; gpu < machine->gpu_count; gpu++)
        if (set->types[gpu] && (now()->gpus[gpu].lost || now()->gpus[gpu].removed))
            return true;
    return false;
}

static uint64_t milliseconds(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000 + (uint64_t)time.tv_nsec / 1000000;
}

EXPORT nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t handle, nvmlEventData_t *data,
                                        unsigned int timeout)
{
    uint64_t until = milliseconds() + timeout;
    uint32_t nap = FIRST_NAP_MS;
    Call call;
    nvmlReturn_t code = begin(&call, F_nvmlEventSetWait_v2, ANY);
    if (code != NVML_SUCCESS)
        return code;
    for (;;) {
        EventSet *set = known(handle);
        if (set == NULL || data == NULL)
            return end(&call, NVML_ERROR_INVALID_ARGUMENT);
        if (take(set, data))
            return end(&call, NVML_SUCCESS);
        if (lost_one(set))
            return end(&call, NVML_ERROR_GPU_IS_LOST);
        uint64_t time = milliseconds();
        if (time >= until)
            return end(&call, NVML_ERROR_TIMEOUT);
        /* Others wait for the lock meanwhile. Naps grow, so that long waits cost next to nothing. */
        code = dawdle(nap < until - time ? nap : (uint32_t)(until - time));
        if (code != NVML_SUCCESS)
            return code;
        nap = nap * 2 < LONGEST_NAP_MS ? nap * 2 : LONGEST_NAP_MS;
    }
}

EXPORT nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t handle)
{
    Call call;
    nvmlReturn_t code = begin(&call, F_nvmlEventSetFree, ANY);
    if (code != NVML_SUCCESS)
        return code;
    EventSet *set = known(handle);
    if (set == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    EventSet **link = &sets;
    while (*link != set)
        link = &(*link)->next;
    *link = set->next;
    free(set);
    return end(&call, NVML_SUCCESS);
}
