/* The layout of a machine's state file.
 *
 * layout.py describes the same bytes in Python. Constant data is in File itself. Variable state is
 * in an Image, of which the file holds two: the active one and a draft of the next state. A store
 * to `active` commits the draft, so a process killed at any point leaves either the state before
 * its call or the state after it.
 */
#ifndef SLICEWISE_STATE_H
#define SLICEWISE_STATE_H

#include <stdint.h>

#include "abi.h"

enum {
    MAX_GPUS = 16,
    MAX_SLICES = 16, /* also the maximum number of instances of either kind on a GPU */
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
    uint32_t number; /* NVML's constant, by which callers ask for the profile */
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
    uint32_t number; /* NVML's constant, which differs from the id */
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
    uint32_t instance_ids[2][MAX_SLICES]; /* by start; second row for mirrored GPUs */
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
    uint64_t serial; /* 0 if the slot is empty; never reused, so stale handles are detected */
    uint32_t profile; /* index in File.profiles */
    uint32_t start;
    uint32_t id;
    uint32_t busy; /* the process that uses it, or 0 */
} GpuInstance;

typedef struct {
    char uuid[UUID_SIZE]; /* of the MIG device; new for every instance */
    uint64_t serial;
    uint64_t parent; /* serial of its GPU instance */
    uint64_t memory_used;
    uint32_t profile; /* index in GpuProfile.compute_profiles */
    uint32_t start;
    uint32_t id;
    uint32_t unused;
} ComputeInstance;

typedef struct {
    uint32_t lost; /* fallen off the bus: still counted, but all calls fail */
    uint32_t removed; /* missing for processes that start later */
    uint32_t mig;
    uint32_t mig_pending;
    uint32_t temperature;
    uint32_t unused;
    uint64_t memory_used;
    uint64_t ecc[2][2]; /* [corrected, uncorrected][since boot, lifetime] */
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
    uint64_t event_count; /* since the machine was created; `events` is a ring of the latest */
    char boot_id[UUID_SIZE];
    Gpu gpus[MAX_GPUS];
    Event events[MAX_EVENTS];
} Image;

/* The kinds of faults. */
enum { FAIL = 0, FAIL_LATE = 1, DELAY = 2, KILL_BEFORE = 3, KILL_DURING = 4, KILL_AFTER = 5 };

typedef struct {
    uint32_t armed;
    uint32_t kind;
    uint32_t function; /* or ANY */
    uint32_t gpu; /* or ANY */
    uint32_t value; /* error code or milliseconds */
    uint32_t unused;
    uint64_t after; /* matching calls to skip first */
    uint64_t times; /* matching calls to affect; the largest number means forever */
    uint64_t matched; /* matching calls so far */
} Fault;

typedef struct {
    uint64_t magic;
    uint64_t digest; /* of the source: a library rejects state files of other versions */
    uint64_t size;
    uint32_t active;
    uint32_t gpu_count;
    char driver_version[NAME_SIZE];
    char nvml_version[NAME_SIZE];
    char name[NAME_SIZE];
    uint64_t seed;
    uint64_t memory_mib;
    uint64_t memory_reserved; /* bytes that the driver reserves */
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
