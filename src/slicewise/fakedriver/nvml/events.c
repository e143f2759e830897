/* Event sets: waiting for errors of GPUs. */
#define _GNU_SOURCE
#include "handles.h"

#include <stdlib.h>
#include <time.h>

enum { FIRST_NAP_MS = 1, LONGEST_NAP_MS = 100 };

/* An event set, private to its process. */
typedef struct EventSet {
    struct EventSet *next;
    uint64_t types[MAX_GPUS];
    uint64_t since[MAX_GPUS]; /* events before registration are skipped */
    uint64_t processed; /* number of the machine's events already processed */
} EventSet;

/* All event sets; accessed during calls only, which are serialized. */
static EventSet *sets = NULL;

static EventSet *find_set(nvmlEventSet_t handle)
{
    for (EventSet *set = sets; set != NULL; set = set->next)
        if ((void *)set == (void *)handle)
            return set;
    return NULL;
}

EXPORT nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
    Call call;
    Target target;
    nvmlReturn_t code = begin_gpu(&call, F_nvmlDeviceGetSupportedEventTypes, device, &target);
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
    set->processed = current_state()->event_count;
    set->next = sets;
    sets = set;
    *handle = (nvmlEventSet_t)(void *)set;
    return end(&call, NVML_SUCCESS);
}

EXPORT nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types,
                                             nvmlEventSet_t handle)
{
    Call call;
    Target target;
    nvmlReturn_t code = begin_device(&call, F_nvmlDeviceRegisterEvents, device, &target);
    if (code != NVML_SUCCESS)
        return code;
    EventSet *set = find_set(handle);
    if (set == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    if (target.compute != NULL || types & ~EVENTS_SUPPORTED)
        return end(&call, NVML_ERROR_NOT_SUPPORTED);
    if (set->types[target.number] == 0)
        set->since[target.number] = current_state()->event_count;
    set->types[target.number] |= types;
    return end(&call, NVML_SUCCESS);
}

/* Take the next event of a set; false if there is none. */
static bool next_event(EventSet *set, nvmlEventData_t *data)
{
    const Image *image = current_state();
    /* Older events were overwritten in the ring. */
    if (image->event_count > MAX_EVENTS && set->processed < image->event_count - MAX_EVENTS)
        set->processed = image->event_count - MAX_EVENTS;
    while (set->processed < image->event_count) {
        uint64_t number = set->processed++;
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

static bool has_lost_gpu(const EventSet *set)
{
    const Gpu *gpus = current_state()->gpus;
    for (uint32_t gpu = 0; gpu < machine->gpu_count; gpu++)
        if (set->types[gpu] && (gpus[gpu].lost || gpus[gpu].removed))
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
        EventSet *set = find_set(handle);
        if (set == NULL || data == NULL)
            return end(&call, NVML_ERROR_INVALID_ARGUMENT);
        if (next_event(set, data))
            return end(&call, NVML_SUCCESS);
        if (has_lost_gpu(set))
            return end(&call, NVML_ERROR_GPU_IS_LOST);
        uint64_t time = milliseconds();
        if (time >= until)
            return end(&call, NVML_ERROR_TIMEOUT);
        /* Release the lock while waiting. Sleeps grow, so long waits cost little. */
        code = sleep_unlocked(nap < until - time ? nap : (uint32_t)(until - time));
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
    EventSet *set = find_set(handle);
    if (set == NULL)
        return end(&call, NVML_ERROR_INVALID_ARGUMENT);
    EventSet **link = &sets;
    while (*link != set)
        link = &(*link)->next;
    *link = set->next;
    free(set);
    return end(&call, NVML_SUCCESS);
}
