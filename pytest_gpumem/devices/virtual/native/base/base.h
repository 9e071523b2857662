/* The virtual GPU: declarations that all of its folders share.
 *
 * The library implements the CUDA runtime, the driver and NVIDIA's libraries, so that PyTorch's own CUDA code and caching
 * allocator run on a machine without a GPU. No kernel is executed. Device memory is address space, which uses host memory
 * only where something small is written; sizes are charged to the byte. All declarations here follow the public
 * documentation of CUDA's API (CUDA Runtime API and Driver API reference manuals).
 *
 * Folders include only what is above them in this list, and no two files need each other's functions:
 *   base       the card, the accounts, addresses, values: no function of NVIDIA
 *   runtime    the CUDA runtime (cudaMalloc ...)
 *   driver     the CUDA driver (cuMemMap ...)
 *   cudnn      cuDNN
 *   libraries  NVIDIA's other libraries, and functions that are refused by name */
#ifndef GPUMEM_BASE_H
#define GPUMEM_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GM_API __attribute__((visibility("default")))
/* Defines an alias of a function of this file. */
#define GM_SAME(name, function) extern GM_API __typeof__(function) name __attribute__((alias(#function)))

enum {
    GM_MAX_DEVICES = 16,
    GM_MAX_DEFERRED = 64, /* ranges of deferred.c: each write checks all of them; if there are more, the oldest is dropped */
    /* Status codes: CUDA Runtime API (cudaError_t) and Driver API (CUresult) share these numbers. */
    GM_SUCCESS = 0,
    GM_INVALID_VALUE = 1,
    GM_OUT_OF_MEMORY = 2,
    GM_INVALID_CONFIGURATION = 9, /* of a launch, in the runtime; the driver returns GM_INVALID_VALUE */
    GM_NO_DEVICE = 100,
    GM_DEVICE_UNINITIALIZED = 201,
    GM_INVALID_DEVICE = 101,
    GM_CONTEXT_IS_CURRENT = 704, /* peer access already enabled */
    GM_PEER_NOT_ENABLED = 705,
    GM_HOST_ALREADY_REGISTERED = 712,
    GM_HOST_NOT_REGISTERED = 713,
    GM_SYMBOL_NOT_FOUND = 500,
    GM_NOT_READY = 600,
    GM_NOT_SUPPORTED = 801,
    GM_STREAM_CAPTURE_UNSUPPORTED = 900,
    GM_LAUNCH_TIMEOUT = 702,
    GM_CAPTURE_INVALIDATED = 901,
    GM_CAPTURE_UNMATCHED = 903,
    GM_CAPTURED_EVENT = 907,
    GM_CAPTURE_WRONG_THREAD = 908,
    GM_ILLEGAL_STATE = 401,
    GM_NOT_INITIALIZED = 3, /* of the driver, before cuInit */
    GM_INVALID_HANDLE = 400,
};

/* A card's profile. Python's _CardStruct has the same layout; gpumem_capacities lets Python compare. */
typedef struct {
    char name[256];
    uint64_t total_memory;   /* bytes, as cudaDeviceProp.totalGlobalMem */
    uint64_t context_memory; /* bytes of it that the CUDA context uses */
    uint64_t l2_cache_size;
    uint64_t shared_memory_per_block;
    uint64_t shared_memory_per_block_optin;
    uint64_t shared_memory_per_sm;
    uint64_t reserved_shared_memory_per_block;
    int32_t major, minor;
    int32_t sm_count;
    int32_t memory_bus_width;
    int32_t max_threads_per_sm;
    int32_t max_blocks_per_sm;
    int32_t registers_per_sm;
    int32_t clock_rate_khz;
} gm_card;

/* A device's account: bytes and numbers of calls. Python's Account has the same fields, in this order. */
typedef struct {
    uint64_t charged;      /* allocated on the device now, in units of 2 MiB */
    uint64_t peak_charged; /* peak since the last reset */
    uint64_t mallocs;      /* successful allocations from the device */
    uint64_t frees;
    uint64_t failures;     /* allocations refused because memory was exhausted */
} gm_account;

/* Managed memory, in bytes: the devices' accounts do not include it. */
typedef struct {
    uint64_t bytes, peak_bytes;
} gm_managed;

/* ---- state.c: the card, the devices, the thread's device and errors ---- */

extern gm_card gm_profile;
bool gm_visible(void);
int gm_device_total(void);
int gm_visible_devices(void);

/* machine.c */
uint64_t gm_now(void); /* nanoseconds since 1970 */
enum { GM_UUID_SIZE = 16, GM_UUID_TEXT = 48 };
int gm_machine_devices(void); /* as NVML reports them, whatever CUDA shows */
void gm_set_machine_devices(int count);
int gm_shown_to_this_process(void); /* for a process that begins: how many devices CUDA shows */
int gm_machine_device(int ordinal); /* the machine's index of a device that CUDA shows */
int gm_ordinal_of(int device);      /* CUDA's index of a device of the machine; -1: not visible */
void gm_uuid(unsigned char *out, int device);
void gm_uuid_text(char *out, int device); /* has room for GM_UUID_TEXT */
int gm_current_device(void);
void gm_set_current_device(int device);
void gm_initialize(void); /* the driver, by cuInit or through the runtime */
bool gm_initialized(void);
void gm_count_wait(void); /* the host waits for the device */
int gm_error(int status); /* stores it for cudaGetLastError and returns it */
int gm_last_error(bool clear);
int gm_cuda_version(void);  /* 13020 for CUDA 13.2 */
int gm_cudnn_version(void); /* 92000 for cuDNN 9.20.0 */

/* This thread runs a function of the installed cuDNN: its CUDA calls come from cuDNN, not from a step. */
void gm_enter_cudnn(void);
void gm_leave_cudnn(void);
bool gm_inside_cudnn(void);

/* Libraries that do not document their sizes (estimated_libraries.h): a report lists those that a step used. */
enum {
#define ESTIMATED(library, name, note, range) library,
#include "base/estimated_libraries.h"
#undef ESTIMATED
    GM_ESTIMATED
};
void gm_note_sizes(int library);

/* ---- sizes.c: workspaces whose size lies in a range ---- */

/* How long PyTorch keeps a workspace: until its call has ended (GM_PASSING); as long as the block allocated just before it
 * (GM_KEPT); until an operation's descriptors are destroyed (GM_HELD, ended by GM_HELD_END). Those of GM_IN_USE
 * and GM_PLANNED are recorded when a call receives them (gm_workspace_in_use): without a plan, and from a plan. */
typedef enum { GM_PASSING, GM_KEPT, GM_HELD, GM_HELD_END, GM_IN_USE, GM_PLANNED } gm_use;
uint64_t gm_size_between(gm_use use, uint64_t least, uint64_t usual, uint64_t most); /* the size that this run uses */
uint64_t gm_size_up_to(gm_use use, uint64_t most); /* zero, or the upper bound: limits are checked against that */
/* A library received a workspace for one call, with a size in this range. If a plan's workspace (GM_PLANNED) does not
 * fit, PyTorch uses another plan; `graph`: if it timed the plan. */
void gm_workspace_in_use(gm_use use, const void *address, uint64_t least, uint64_t usual, uint64_t most, uint64_t graph);
void gm_workspaces_end(void); /* all GM_HELD workspaces until now are freed */
float gm_plan_milliseconds(uint64_t graph, uint64_t workspace); /* time of a cuDNN plan, as reported to PyTorch */
bool gm_admits_plan(uint64_t graph, uint64_t workspace);        /* false: a timed plan that was not selected */

/* ---- refusals.c ---- */

/* Reports a function's name once, counts it for the report (by a copy), and returns its library's own "not supported". */
int gm_unsupported(const char *function, int status);

/* ---- descriptors.c: shared by NVIDIA's libraries ---- */

enum { GM_DESCRIPTOR = 256 }; /* bytes of a descriptor, and of a handle */
int gm_new_descriptor(void **out, int failed); /* filled with zeros; `failed`: the status if the host has no memory */
int gm_delete_descriptor(void *descriptor);
int gm_computed(int not_initialized); /* for results in device memory; returns `not_initialized` if no GPU is shown */

/* ---- accounts.c: bytes charged against the capacity of each device ---- */

int gm_charge(int device, uint64_t size);
void gm_discharge(int device, uint64_t size);
uint64_t gm_free_memory(int device);
uint64_t gm_total_memory(int device);
uint64_t gm_total_for(int device, const void *caller); /* the total that PyTorch sees until its allocator has read it */

/* ---- ranges.c: sorted sets of address ranges; looking one up takes O(log n) ---- */

bool gm_grow(void *items, size_t *room, size_t count, size_t size); /* makes room for one more; false: no memory */

typedef struct {
    uintptr_t start, end;
} gm_interval;
typedef struct {
    gm_interval *items; /* sorted; no interval touches another */
    size_t count, room;
    uint64_t total; /* sum of their lengths */
} gm_intervals;
size_t gm_intervals_first(const gm_intervals *set, uintptr_t address); /* index of the first that ends past it */
bool gm_intervals_add(gm_intervals *set, uintptr_t start, uintptr_t end);
void gm_intervals_cut(gm_intervals *set, uintptr_t start, uintptr_t end);
bool gm_intervals_cover(const gm_intervals *set, uintptr_t start, uintptr_t end);
bool gm_intervals_next(const gm_intervals *set, gm_interval *part, uintptr_t end); /* the next part behind `part`, up to the end */

typedef struct {
    uintptr_t start, end;
    intptr_t tag;
    uint64_t extra;
} gm_range;
typedef struct {
    gm_range *items;
    size_t count, room;
} gm_ranges;
bool gm_ranges_add(gm_ranges *set, gm_range item);
gm_range *gm_ranges_find(const gm_ranges *set, uintptr_t address);
gm_range *gm_ranges_overlap(const gm_ranges *set, uintptr_t start, uintptr_t end); /* the lowest; NULL: none */
void gm_ranges_remove(gm_ranges *set, gm_range *item);

/* ---- pages.c: which pages of a region of address space are in use ---- */

typedef struct {
    gm_intervals free;
    gm_ranges taken;  /* one per allocation */
    gm_interval home; /* the pages to use first; empty: no preference */
} gm_pages;
bool gm_pages_open(gm_pages *set, uint64_t pages); /* all free */
int64_t gm_pages_take(gm_pages *set, uint64_t pages); /* the first page, or -1 */
gm_interval gm_pages_of(const gm_pages *set, uint64_t page); /* the pages of its allocation, if it is taken */
void gm_pages_give(gm_pages *set, uint64_t first);
void gm_pages_begin_apart(gm_pages *set); /* take pages of a part of the region that is empty now */

/* ---- addresses.c: all ranges of addresses that CUDA functions returned or registered ---- */

/* What an address belongs to: a device, from 0 on, or one of these. */
enum { GM_PAGEABLE = -1 /* host memory that CUDA does not know */, GM_PINNED = -2 /* pinned host memory */,
       GM_MANAGED = -3 /* host memory that kernels can use */ };
/* Which function created a range: the matching one frees it. */
typedef enum { GM_FROM_MALLOC, GM_FROM_POOL, GM_FROM_RESERVE, GM_FROM_IPC, GM_FROM_HOST_ALLOC,
               GM_FROM_HOST_REGISTER, GM_FROM_MANAGED } gm_source;
bool gm_addresses_add(uintptr_t start, uint64_t size, int owner, gm_source source);
uint64_t gm_addresses_remove(uintptr_t start, gm_source source); /* bytes; 0: no range starts there */
uintptr_t gm_addresses_end(uintptr_t address, gm_source source); /* of the range that it lies in; 0: in none */
void gm_addresses_set_owner(uintptr_t address, int owner);
int gm_owner(const void *address);

/* ---- deferred.c: ranges whose values Python computes once they are read; the lock of values.c is held ---- */

size_t gm_deferred_count(void);
void gm_deferred_cut(uintptr_t start, uintptr_t end);        /* called when something is written there */
uint64_t gm_deferred_add(uintptr_t start, uintptr_t end);    /* the range's number */
uint64_t gm_deferred_at(uintptr_t start, uintptr_t end);     /* the number of the range that contains all of it; 0: none */

/* ---- values.c: the bytes in device memory, and which of them are known ---- */

void *gm_space_open(uint64_t size); /* addresses for a device; NULL: none left */
void gm_space_close(void *start, uint64_t size);
void gm_space_release(const void *address, uint64_t size); /* it was freed: its pages are returned to the host */
void gm_space_share(const void *address, uint64_t size); /* others may write there (another process, the program itself to
                                                            pinned memory): nothing is known until it is freed */
void gm_write(void *address, const void *bytes, uint64_t size);
void gm_fill(void *address, int value, uint64_t size);
void gm_copy(void *to, const void *from, uint64_t size);        /* from device to device: its known parts */
bool gm_read(const void *address, void *out, uint64_t size);    /* false: not all are known */
bool gm_is_known(const void *address, uint64_t size);
uint64_t gm_small_piece(void); /* bytes up to which a piece is always stored */
uint64_t gm_largest_piece(void); /* bytes of the largest piece that is stored now */
uint64_t gm_value_budget(void); /* bytes of larger than small pieces that may still be written */
bool gm_note_lost(uint64_t size); /* unknown bytes written by an operator; returns whether they are now too many */
bool gm_could_know(const void *address); /* or deferred */
bool gm_open_for_writing(void *address, uint64_t size);         /* false: too many; the bytes become unknown */
void gm_forget(const void *address, uint64_t size);             /* unknown bytes are written there */
void gm_count_operators(int change);                            /* PyTorch operators that are running: Python declares what
                                                                   they write */
int gm_operators_here(void);                                    /* those on this thread */
bool gm_reads_argument(void);                                   /* this thread's operator copies its argument to the host */
void gm_count_captures(int change);                             /* captures of streams into graphs that are running */
bool gm_any_capture(void);
bool gm_between_operators(void); /* this thread runs no operator now, and all its operators are counted */
void gm_forget_all(void);  /* kernels ran: unknown bytes were written somewhere */
void gm_on_work(void (*function)(void *stream)); /* sets the function to call when kernels run, with their stream */
void gm_work_next_on(void *stream);              /* this thread's next kernels run on this stream */
void gm_note_work(void);                         /* a kernel runs that writes nothing */
void gm_values_trim(void); /* returns the pages of unknown bytes to the host */

/* ---- copy_queue.c: the results of this thread's next copies to the host, as computed by Python ---- */

bool gm_queue_take(void *to, uint64_t size); /* false: nothing is queued, or a copy of another size */

#endif
