/* The operator of PyTorch's that a copy to the host is made in: the code of each, `at::_ops::NAME::call`, is a function of
 * libtorch_cpu with a symbol, and so has a range of addresses, in which a stack of C's frames can be looked up. */
#define _GNU_SOURCE
#include "runtime/runtime.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#ifdef __GLIBC__
#include <execinfo.h>
#endif

enum { MOST_FRAMES = 128 };

#define PREFIX "_ZN2at4_ops"

typedef struct {
    uintptr_t start, end;
    bool sized;
} operator_code;

static operator_code *operators; /* in the order of their addresses */
static size_t operator_count;
static uintptr_t python_start, python_end; /* of the code that runs Python's frames */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* These bring a tensor's own bytes to the host, or ask whether something holds: Python's code decides by the answer, or
 * not. Any other operator that reads chooses a size by it. */
static bool is_sized(const char *name, size_t length) {
    static const char *const readers[] = {
        "item",     "_local_scalar_dense", "is_nonzero", "equal",           "allclose",
        "copy_",    "_to_copy",            "to_device",  "to_dtype_layout", "to_dtype",
        "to_other", "_copy_from",          "_copy_from_and_resize",
    };
    for (size_t i = 0; i < sizeof readers / sizeof *readers; i++)
        if (strlen(readers[i]) == length && !memcmp(readers[i], name, length)) return false;
    return memmem(name, length, "linalg", 6) == NULL;
}

static size_t symbol_count(const uint32_t *hash) {
    uint32_t buckets = hash[0], first = hash[1], words = hash[2], last = 0;
    const uint32_t *bucket = hash + 4 + words * (sizeof(void *) / 4), *chain = bucket + buckets;
    for (uint32_t i = 0; i < buckets; i++)
        if (bucket[i] > last) last = bucket[i];
    if (last < first) return first;
    while (!(chain[last - first] & 1)) last++;
    return last + 1;
}

static void add(const ElfW(Sym) * symbol, const char *name, uintptr_t base) {
    if (strncmp(name, PREFIX, sizeof PREFIX - 1) != 0 || !symbol->st_size) return;
    char *start;
    size_t length = strtoul(name + sizeof PREFIX - 1, &start, 10);
    if (strlen(start) < length) return;
    uintptr_t address = base + symbol->st_value;
    operators[operator_count++] = (operator_code){address, address + symbol->st_size, is_sized(start, length)};
}

static void add_operators(const struct dl_phdr_info *object) {
    const ElfW(Dyn) *entry = NULL;
    for (int i = 0; i < object->dlpi_phnum; i++)
        if (object->dlpi_phdr[i].p_type == PT_DYNAMIC)
            entry = (const void *)(object->dlpi_addr + object->dlpi_phdr[i].p_vaddr);
    const ElfW(Sym) *symbols = NULL;
    const char *names = NULL;
    const uint32_t *hash = NULL;
    for (; entry && entry->d_tag != DT_NULL; entry++) {
        uintptr_t address = entry->d_un.d_ptr;
        if (address < object->dlpi_addr) address += object->dlpi_addr; /* where the loader leaves it as it was */
        if (entry->d_tag == DT_SYMTAB) symbols = (const void *)address;
        else if (entry->d_tag == DT_STRTAB) names = (const void *)address;
        else if (entry->d_tag == DT_GNU_HASH) hash = (const void *)address;
    }
    if (!symbols || !names || !hash) return;
    size_t count = symbol_count(hash);
    operators = malloc(count * sizeof *operators);
    for (size_t i = 0; operators && i < count; i++) add(symbols + i, names + symbols[i].st_name, object->dlpi_addr);
}

static int look_at(struct dl_phdr_info *object, size_t size, void *python) {
    (void)size;
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *segment = object->dlpi_phdr + i;
        uintptr_t start = object->dlpi_addr + segment->p_vaddr, end = start + segment->p_memsz;
        if (segment->p_type == PT_LOAD && start <= (uintptr_t)python && (uintptr_t)python < end) {
            python_start = start;
            python_end = end;
        }
    }
    if (!operators && strstr(object->dlpi_name, "libtorch_cpu.so")) add_operators(object);
    return 0;
}

static int by_address(const void *left, const void *right) {
    uintptr_t a = ((const operator_code *)left)->start, b = ((const operator_code *)right)->start;
    return (a > b) - (a < b);
}

static void learn(void) {
    pthread_mutex_lock(&lock);
    if (!operators) {
        dl_iterate_phdr(look_at, dlsym(RTLD_DEFAULT, "PyEval_EvalCode"));
        if (operators) qsort(operators, operator_count, sizeof *operators, by_address);
    }
    pthread_mutex_unlock(&lock);
}

static const operator_code *operator_at(uintptr_t address) {
    size_t low = 0, high = operator_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (operators[middle].end <= address) low = middle + 1;
        else high = middle;
    }
    return low < operator_count && operators[low].start <= address ? operators + low : NULL;
}

bool gm_in_sized_operator(void) {
    bool sized = false;
#ifdef __GLIBC__
    void *frames[MOST_FRAMES];
    learn();
    int count = operators ? backtrace(frames, MOST_FRAMES) : 0;
    for (int i = 0; i < count; i++) {
        uintptr_t address = (uintptr_t)frames[i] - 1; /* within the call, not behind it */
        if (python_start <= address && address < python_end) break; /* what is behind called Python */
        const operator_code *code = operator_at(address);
        if (code) sized = code->sized; /* the outermost one's */
    }
#endif
    return sized;
}
