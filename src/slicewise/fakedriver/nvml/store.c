/* The state file: attaching, locking, faults and commits. */
#define _GNU_SOURCE
#include "store.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifndef SOURCE_DIGEST
#error "SOURCE_DIGEST is not defined: build the driver with slicewise.fakedriver.build"
#endif

static_assert((int)FUNCTION_COUNT <= (int)MAX_FUNCTIONS, "more functions than counters");

File *machine = NULL;

static int descriptor = -1;
static char *opened_path = NULL;
static pid_t opened_by = 0;
static unsigned int attachments = 0;
static uint32_t present[MAX_GPUS];
static uint32_t present_count = 0;

/* Threads of a process share its descriptor and so the file lock; this mutex separates them. */
static pthread_mutex_t threads = PTHREAD_MUTEX_INITIALIZER;

/* A child inherits the mutex as it was at the fork, so no other thread may hold it then. */
static void before_fork(void) { pthread_mutex_lock(&threads); }
static void after_fork(void) { pthread_mutex_unlock(&threads); }

__attribute__((constructor)) static void prepare(void)
{
    pthread_atfork(before_fork, after_fork, after_fork);
}

/* A child must not share its parent's descriptor: both would hold the lock at once. */
static bool own_descriptor(void)
{
    if (opened_by == getpid())
        return true;
    int fresh = open(opened_path, O_RDWR | O_CLOEXEC);
    if (fresh < 0)
        return false;
    close(descriptor);
    descriptor = fresh;
    opened_by = getpid();
    return true;
}

static bool lock_file(void)
{
    if (!own_descriptor())
        return false;
    while (flock(descriptor, LOCK_EX) != 0)
        if (errno != EINTR)
            return false;
    return true;
}

static void unlock_file(void) { flock(descriptor, LOCK_UN); }

static nvmlReturn_t report_open_error(const char *path, const char *problem)
{
    /* The caller only gets "driver not loaded"; users need the path and the cause. */
    fprintf(stderr, "slicewise fake driver: %s: %s\n", path, problem);
    return NVML_ERROR_DRIVER_NOT_LOADED;
}

static nvmlReturn_t open_machine(void)
{
    const char *path = getenv("SLICEWISE_FAKE_NVML");
    if (path == NULL || *path == '\0')
        return report_open_error("SLICEWISE_FAKE_NVML", "does not name a state file");
    int fresh = open(path, O_RDWR | O_CLOEXEC);
    if (fresh < 0)
        return report_open_error(path, strerror(errno));
    struct stat about;
    if (fstat(fresh, &about) != 0 || about.st_size != (off_t)sizeof(File)) {
        close(fresh);
        return report_open_error(path, "is not a state file of the fake driver");
    }
    File *mapped = mmap(NULL, sizeof(File), PROT_READ | PROT_WRITE, MAP_SHARED, fresh, 0);
    if (mapped == MAP_FAILED) {
        close(fresh);
        return report_open_error(path, strerror(errno));
    }
    if (mapped->magic != MAGIC || mapped->size != sizeof(File) || mapped->digest != SOURCE_DIGEST) {
        munmap(mapped, sizeof(File));
        close(fresh);
        return report_open_error(path, "was created by another version of the fake driver");
    }
    char *copy = strdup(path);
    if (copy == NULL) {
        munmap(mapped, sizeof(File));
        close(fresh);
        return NVML_ERROR_MEMORY;
    }
    machine = mapped;
    descriptor = fresh;
    opened_path = copy;
    opened_by = getpid();
    return NVML_SUCCESS;
}

/* Unmap the machine when the last attachment of this process ends. */
static void release(void)
{
    pthread_mutex_lock(&threads);
    if (attachments == 0 && machine != NULL) {
        munmap(machine, sizeof(File));
        close(descriptor);
        free(opened_path);
        machine = NULL;
        descriptor = -1;
        opened_path = NULL;
    }
    pthread_mutex_unlock(&threads);
}

static void list_present_gpus(void)
{
    present_count = 0;
    for (uint32_t gpu = 0; gpu < machine->gpu_count; gpu++)
        if (!current_state()->gpus[gpu].removed)
            present[present_count++] = gpu;
}

nvmlReturn_t attach(unsigned int flags, Function function)
{
    (void)flags;
    pthread_mutex_lock(&threads);
    nvmlReturn_t code = machine == NULL ? open_machine() : NVML_SUCCESS;
    pthread_mutex_unlock(&threads);
    if (code != NVML_SUCCESS)
        return code;
    Call call;
    code = begin(&call, function, ANY);
    if (code == NVML_SUCCESS) {
        /* As with the real library, a process sees the GPUs that were present at its start. */
        if (attachments == 0)
            list_present_gpus();
        attachments++;
        code = end(&call, NVML_SUCCESS);
        if (code == NVML_SUCCESS)
            return NVML_SUCCESS;
        pthread_mutex_lock(&threads);
        attachments--;
        pthread_mutex_unlock(&threads);
    }
    release();
    return code;
}

nvmlReturn_t detach(void)
{
    Call call;
    nvmlReturn_t code = begin(&call, F_nvmlShutdown, ANY);
    if (code != NVML_SUCCESS)
        return code;
    attachments--;
    code = end(&call, NVML_SUCCESS);
    release();
    return code;
}

uint32_t gpu_count(void) { return present_count; }

uint32_t gpu_at(uint32_t index) { return index < present_count ? present[index] : ANY; }

uint32_t index_of(uint32_t gpu)
{
    for (uint32_t index = 0; index < present_count; index++)
        if (present[index] == gpu)
            return index;
    return ANY;
}

nvmlReturn_t enter(Call *call, Function function)
{
    *call = (Call){.function = function, .late = NVML_SUCCESS};
    bool initializes = function == F_nvmlInitWithFlags || function == F_nvmlInit_v2;
    pthread_mutex_lock(&threads);
    if (machine == NULL || (attachments == 0 && !initializes)) {
        pthread_mutex_unlock(&threads);
        return NVML_ERROR_UNINITIALIZED;
    }
    if (!lock_file()) {
        pthread_mutex_unlock(&threads);
        return NVML_ERROR_UNKNOWN;
    }
    machine->calls[function]++;
    return NVML_SUCCESS;
}

static void unlock(void)
{
    unlock_file();
    pthread_mutex_unlock(&threads);
}

nvmlReturn_t sleep_unlocked(uint32_t milliseconds)
{
    unlock();
    struct timespec left = {milliseconds / 1000, (long)(milliseconds % 1000) * 1000000};
    while (nanosleep(&left, &left) != 0 && errno == EINTR)
        continue;
    pthread_mutex_lock(&threads);
    if (machine == NULL) {
        pthread_mutex_unlock(&threads);
        return NVML_ERROR_UNINITIALIZED;
    }
    if (!lock_file()) {
        pthread_mutex_unlock(&threads);
        return NVML_ERROR_UNKNOWN;
    }
    return NVML_SUCCESS;
}

static bool triggers(Fault *fault, Function function, uint32_t gpu)
{
    if (!fault->armed || (fault->function != ANY && fault->function != (uint32_t)function))
        return false;
    if (fault->gpu != ANY && fault->gpu != gpu)
        return false;
    uint64_t before = fault->matched++;
    return before >= fault->after && before - fault->after < fault->times;
}

nvmlReturn_t apply_faults(Call *call, uint32_t gpu)
{
    nvmlReturn_t code = NVML_SUCCESS;
    uint32_t delay = 0;
    for (int number = 0; number < MAX_FAULTS; number++) {
        Fault *fault = &machine->faults[number];
        if (!triggers(fault, call->function, gpu))
            continue;
        switch (fault->kind) {
        case FAIL:
            code = (nvmlReturn_t)fault->value;
            break;
        case FAIL_LATE:
            call->late = (nvmlReturn_t)fault->value;
            break;
        case DELAY:
            delay += fault->value;
            break;
        case KILL_BEFORE:
            raise(SIGKILL);
            break;
        case KILL_DURING:
            call->kill_during = true;
            break;
        case KILL_AFTER:
            call->kill_after = true;
            break;
        }
    }
    if (delay != 0) {
        nvmlReturn_t slept = sleep_unlocked(delay);
        if (slept != NVML_SUCCESS)
            return slept;
    }
    return code == NVML_SUCCESS ? NVML_SUCCESS : end(call, code);
}

nvmlReturn_t begin(Call *call, Function function, uint32_t gpu)
{
    nvmlReturn_t code = enter(call, function);
    return code == NVML_SUCCESS ? apply_faults(call, gpu) : code;
}

nvmlReturn_t end(Call *call, nvmlReturn_t code)
{
    if (call->kill_after)
        raise(SIGKILL);
    unlock();
    return code == NVML_SUCCESS ? call->late : code;
}

const Image *current_state(void) { return &machine->images[machine->active]; }

Image *draft(void)
{
    Image *copy = &machine->images[1 - machine->active];
    memcpy(copy, current_state(), sizeof(Image));
    return copy;
}

void commit(const Call *call)
{
    if (call->kill_during)
        raise(SIGKILL);
    atomic_thread_fence(memory_order_seq_cst);
    *(volatile uint32_t *)&machine->active = 1 - machine->active;
}
