/* Functions that Python calls around each operator of a step. ctypes takes 0.25 us for a call with two numbers, and these
 * 0.05: they are methods as CPython's own modules have them (METH_FASTCALL, of its stable ABI). Python gives the addresses
 * of the functions of its own that they need, as this library is loaded into programs without Python too. */
#include "base/base.h"

typedef void *object;

static object none, no, yes;
static void (*keep)(object);
static uint64_t (*number_of)(object);
static void (*exclude)(uint16_t key, bool on); /* a dispatch key of PyTorch's, of this thread */
static uint16_t key;

GM_API void gpumem_prepare_operators(const object none_false_true[3], void (*inc_ref)(object), uint64_t (*as_uint64)(object),
                                     void (*exclude_key)(uint16_t, bool), uint64_t excluded_key) {
    none = none_false_true[0];
    no = none_false_true[1];
    yes = none_false_true[2];
    keep = inc_ref;
    number_of = as_uint64;
    exclude = exclude_key;
    key = (uint16_t)excluded_key;
}

GM_API object gpumem_operator_begins(object module, object no_argument) {
    (void)module, (void)no_argument;
    exclude(key, true);
    gm_count_operators(1);
    keep(none);
    return none;
}

/* Addresses and their sizes: unknown bytes are written there. */
GM_API object gpumem_forget_ranges(object module, const object *arguments, intptr_t count) {
    (void)module;
    for (intptr_t i = 0; i + 1 < count; i += 2)
        gm_forget((const void *)(uintptr_t)number_of(arguments[i]), number_of(arguments[i + 1]));
    keep(none);
    return none;
}

/* With addresses and their sizes: the operator has written there, and nowhere else. Returns whether that, with what others
 * wrote since the limits were set, is so much that the test is a large one. */
GM_API object gpumem_operator_ended(object module, const object *arguments, intptr_t count) {
    (void)module;
    uint64_t size = 0;
    gm_count_operators(-1);
    exclude(key, false);
    for (intptr_t i = 0; i + 1 < count; i += 2) {
        uint64_t length = number_of(arguments[i + 1]);
        gm_forget((const void *)(uintptr_t)number_of(arguments[i]), length);
        size += length;
    }
    object answer = size && gm_note_lost(size) ? yes : no;
    keep(answer);
    return answer;
}

/* Whether the byte at an address is known, or could be computed. */
GM_API object gpumem_could_know(object module, object address) {
    (void)module;
    object answer = gm_could_know((const void *)(uintptr_t)number_of(address)) ? yes : no;
    keep(answer);
    return answer;
}
