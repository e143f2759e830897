/* The state of a machine that does not exist, as it lies in its file.
 *
 * The Python side (layout.py) describes the same bytes. What never changes stands in File itself;
 * what calls change is an Image, of which the file holds two: one counts, the other is the paper
 * on which the next state is drawn. Only the store to `active` makes a change, so that a process
 * killed anywhere leaves either the state before its call or the state after it.
 */
#ifndef SLICEWISE_STATE_H
#define SLICEWISE_STATE_H

#include <stdint.h>

#include "abi.h"

enum {
    MAX_GPUS = 16,
    MAX_SLICES = 16, /* also the most instances a GPU can have, of either kind */
    MAX_PROFILES = 24,
    MAX_BUDGETS = 8,
    MAX_COMPUTE_PROFILES = 8,
    MAX_FAULTS = 64,
    MAX_FUNCTIONS = 128,
    MAX_EVENTS = 64,
    UUID_SIZE = 48
};

/* "fakeNVML", read as a number. */
#define MAGIC 0x4c4d564e656b6166ull
#define ANY 0xFFFFFFFFu

typedef struct {
    char name[NAME_SIZE];
    uint32_t number; /* NVML's constant: the profile that is asked about */
    uint32_t id;
    uint32_t slices;
    uint32_t instances;
    uint32_t multiprocessors;
    uint32_t start_count;
    uint32_t starts[MAX_SLICES];
} ComputeProfile;

typedef struct {
    char name[NAME_SIZE];
    uint64_t memory_mib;
    uint32_t number; /* NVML's constant, which is not the id */
    uint32_t id;
    uint32_t size;
    uint32_t compute;
    uint32_t instances;
    uint32_t multiprocessors;
    uint32_t copy_engines;
    uint32_t decoders;
    uint32_t encoders;
    uint32_t jpeg_engines;
    uint32_t ofa_engines;
    uint32_t capabilities;
    uint32_t uses[MAX_BUDGETS];
    uint32_t start_count;
    uint32_t starts[MAX_SLICES];
    uint32_t preferred[MAX_SLICES];
    uint32_t instance_ids[2][MAX_SLICES]; /* by start; the second row on mirrored GPUs */
    uint32_t compute_profile_count;
    ComputeProfile compute_profiles[MAX_COMPUTE_PROFILES];
} GpuProfile;

typedef struct {
    char uuid[UUID_SIZE];
    char serial[32];
    uint32_t minor;
    uint32_t domain;
    uint32_t bus;
    uint32_t device;
    uint32_t pci_device_id;
    uint32_t pci_subsystem_id;
    uint32_t mirrored;
    uint32_t unused;
} GpuFacts;

typedef struct {
    uint64_t serial; /* 0 where there is none; never given twice, so that old handles are seen */
    uint32_t profile; /* its place in File.profiles */
    uint32_t start;
    uint32_t id;
    uint32_t busy; /* the process that uses it, or 0 */
} GpuInstance;

typedef struct {
    char uuid[UUID_SIZE]; /* of its MIG device; new for every instance */
    uint64_t serial;
    uint64_t parent; /* the serial of its GPU instance */
    uint64_t memory_used;
    uint32_t profile; /* its place in GpuProfile.compute_profiles */
    uint32_t start;
    uint32_t id;
    uint32_t unused;
} ComputeInstance;

typedef struct {
    uint32_t lost; /* fallen off the bus: still counted, answers nothing */
    uint32_t removed; /* gone for processes that start after this */
    uint32_t mig;
    uint32_t mig_pending;
    uint32_t temperature;
    uint32_t unused;
    uint64_t memory_used;
    uint64_t ecc[2][2]; /* corrected and uncorrected; since boot and ever */
    GpuInstance instances[MAX_SLICES];
    ComputeInstance computes[MAX_SLICES];
} Gpu;

typedef struct {
    uint64_t type;
    uint64_t data;
    uint32_t gpu;
    uint32_t gpu_instance;
    uint32_t compute_instance;
    uint32_t unused;
} Event;

typedef struct {
    uint64_t next_serial;
    uint64_t event_count; /* since the machine was made; the latest lie in `events`, in a ring */
    char boot_id[UUID_SIZE];
    Gpu gpus[MAX_GPUS];
    Event events[MAX_EVENTS];
} Image;

/* What a fault does to a call. */
enum { FAIL = 0, FAIL_LATE = 1, DELAY = 2, KILL_BEFORE = 3, KILL_DURING = 4, KILL_AFTER = 5 };

typedef struct {
    uint32_t armed;
    uint32_t kind;
    uint32_t function; /* or ANY */
    uint32_t gpu; /* or ANY */
    uint32_t value; /* the code to answer, or milliseconds */
    uint32_t unused;
    uint64_t after; /* calls that pass before it strikes */
    uint64_t times; /* calls it strikes; the largest number is for ever */
    uint64_t seen; /* calls that matched so far */
} Fault;

typedef struct {
    uint64_t magic;
    uint64_t digest; /* of the source: a library and a state of different make do not mix */
    uint64_t size;
    uint32_t active;
    uint32_t gpu_count;
    char driver_version[NAME_SIZE];
    char nvml_version[NAME_SIZE];
    char name[NAME_SIZE];
    uint64_t seed;
    uint64_t memory_mib;
    uint64_t memory_reserved; /* bytes that the driver keeps for itself */
    uint32_t cuda_version;
    uint32_t architecture;
    uint32_t capability_major;
    uint32_t capability_minor;
    uint32_t mode_needs_reset;
    uint32_t mig_devices;
    uint32_t budget_count;
    uint32_t profile_count;
    uint32_t budgets[MAX_BUDGETS];
    GpuProfile profiles[MAX_PROFILES];
    GpuFacts facts[MAX_GPUS];
    uint64_t calls[MAX_FUNCTIONS];
    Fault faults[MAX_FAULTS];
    Image images[2];
} File;

#endif
