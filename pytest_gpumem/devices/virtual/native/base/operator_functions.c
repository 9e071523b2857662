/* The kernel of PyTorch's operators that Python has registered for a dispatch key of its own: C, for it runs with each
 * operator of a step, and Python's code would take several times as long.
 *
 * After most operators of a step what they wrote is unknown, and nothing else is to be done: they read something unknown, or
 * write more than is kept. Such a call takes the short way here. Any other is handed to Python (its "slow" function), before
 * or after the operator has run.
 *
 * These are methods as CPython's own modules have them, of its stable ABI. Python gives the addresses of the functions of
 * its own that they need, as this library is loaded into programs without Python too. Where a tensor lies is asked by
 * DLPack's exchange API (dlpack.h), or else by a function of Python's. All run with Python's global lock. */
#include "base/base.h"

#include <stdlib.h>
#include <string.h>

typedef void *object;

/* Objects and functions of Python's; operator_functions.py gives them in this order. */
static struct {
    object none, no, yes;
    object tensor, parameter, buffer, list, tuple, integer, boolean, real; /* types */
    object text_device, text_type, text_cpu;
    object describe; /* takes a tensor, returns a tuple of numbers: the fields of gm_extent */
    object finish;   /* takes an operator, its arguments and its result: writes its values */
    object large;    /* the test is a large one from now on */
    object (*call)(object function, object arguments, object keywords);
    object (*call_with)(object function, ...);
    object (*type_of)(object);
    object (*attribute)(object, object name);
    object (*list_item)(object, intptr_t);
    intptr_t (*list_size)(object);
    object (*tuple_item)(object, intptr_t);
    intptr_t (*tuple_size)(object);
    object (*pack)(intptr_t count, ...);
    object (*entry)(object dictionary, object key); /* borrowed; NULL: it has none */
    int (*next_entry)(object dictionary, intptr_t *place, object *key, object *value);
    int (*compare)(object, object);
    void (*keep)(object);
    void (*drop)(object);
    void (*clear_error)(void);
    uint64_t (*number_of)(object);
    object (*of_number)(uint64_t);
    int (*is_subtype)(object, object);
    int (*stop_collector)(void); /* whether it was on */
    int (*start_collector)(void);
    void (*exclude)(uint16_t key, bool on); /* a dispatch key of PyTorch's, of this thread */
    int (*export)(object tensor, void *dltensor); /* DLPack's; NULL: it has none */
} python;
static uint16_t key;

/* What Python tells of an operator. */
enum {
    SHORT = 1,     /* some of its calls take the short way */
    LIKE = 2,      /* the values of its arguments do not matter */
    CONSTANT = 4,  /* its large results may be computed later */
    COPIES = 8,    /* it copies bytes */
    ASSUMED = 16,  /* several results may be assumed where nothing is known */
    READS = 32,    /* it returns a number to the host */
    ALLOCATES = 64 /* its result has no values in it */
};

typedef struct {
    object slow, op, function;
    uint64_t flags, written, unread, tensors; /* the last three: a bit for the place of each argument */
} operator_note;

static operator_note *notes;
static size_t note_count, note_room;
static bool is_on;
static _Thread_local int opened;                     /* operators that run here of which those inside are seen */
static _Thread_local object running_args, running_kwargs; /* of the operator that runs here on the short way */

GM_API void gpumem_prepare_operators(const void *const *functions, uint64_t excluded_key) {
    memcpy(&python, functions, sizeof python);
    key = (uint16_t)excluded_key;
}

/* ---- where tensors lie ---- */

/* DLTensor of dlpack.h, version 1. */
typedef struct {
    void *data;
    int32_t device_type, device;
    int32_t dimensions;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t offset;
} dltensor;
enum { DL_CPU = 1, DL_CUDA = 2, DL_CUDA_HOST = 3, DL_FLOAT = 2, DL_BFLOAT = 4 };

typedef enum { NO_TENSOR, ON_HOST, ON_DEVICE, ODD /* sparse, nested, without memory */ } place;

typedef struct {
    uint64_t kind, address, bytes, span, real; /* span: from the first element to the end of the last */
    uint64_t type;                             /* equal for equal types */
} extent;

static place described(object tensor, extent *out) {
    object told = python.call_with(python.describe, tensor, NULL);
    if (!told) {
        python.clear_error();
        return ODD;
    }
    uint64_t *fields[] = {&out->kind, &out->address, &out->bytes, &out->span, &out->real, &out->type};
    for (intptr_t i = 0; i < 6; i++) *fields[i] = python.number_of(python.tuple_item(told, i));
    python.drop(told);
    return (place)out->kind;
}

/* Of a tensor that is PyTorch's own, and no wrapper. */
static place look(object value, extent *out) {
    object type = python.type_of(value);
    python.drop(type); /* the value keeps it */
    if (type != python.tensor && type != python.parameter && type != python.buffer) return NO_TENSOR;
    if (!python.export) return described(value, out);
    dltensor tensor;
    if (python.export(value, &tensor)) {
        python.clear_error();
        return ODD;
    }
    uint64_t elements = 1, last = 0, size = (uint64_t)tensor.bits * tensor.lanes / 8;
    for (int i = 0; i < tensor.dimensions; i++) {
        elements *= (uint64_t)tensor.shape[i];
        if (tensor.shape[i]) last += (uint64_t)((tensor.shape[i] - 1) * tensor.strides[i]);
    }
    if (elements && !tensor.data) return ODD;
    out->address = (uintptr_t)tensor.data + tensor.offset;
    out->bytes = elements * size;
    out->span = elements ? (last + 1) * size : 0;
    out->real = (tensor.code == DL_FLOAT && tensor.bits >= 16) || tensor.code == DL_BFLOAT;
    out->type = (uint64_t)tensor.code << 8 | tensor.bits;
    if (tensor.device_type == DL_CUDA) return ON_DEVICE;
    return tensor.device_type == DL_CPU || tensor.device_type == DL_CUDA_HOST ? ON_HOST : ODD;
}

/* Calls a function with a value, or with each one of a list or tuple. */
static void each(object value, void (*function)(object, void *), void *data) {
    object type = python.type_of(value);
    python.drop(type);
    if (type == python.list)
        for (intptr_t i = 0; i < python.list_size(value); i++) function(python.list_item(value, i), data);
    else if (type == python.tuple)
        for (intptr_t i = 0; i < python.tuple_size(value); i++) function(python.tuple_item(value, i), data);
    else
        function(value, data);
}

/* ---- before an operator runs ---- */

typedef struct {
    bool is_written, is_unread, is_tensor;   /* the arguments that are looked at */
    bool odd, unknown;                       /* some tensor is, or is a number; of some that is read, nothing is known */
    bool host_written, too_large, all_real;  /* of those that are written */
    uint64_t written_count, largest_written; /* tensors; bytes */
    uint64_t first_type;                     /* of the first tensor's elements */
    bool first_real, first_on_device, any;
} arguments;

static bool is_number(object value) {
    object type = python.type_of(value);
    python.drop(type);
    return type == python.integer || type == python.boolean || type == python.real;
}

static void note_argument(object value, void *data) {
    arguments *seen = data;
    extent it;
    place where = look(value, &it);
    if (where == NO_TENSOR) {
        seen->odd |= seen->is_tensor && is_number(value);
        return;
    }
    if (where == ODD) {
        seen->odd = true;
        return;
    }
    if (!seen->any) {
        seen->any = true;
        seen->first_type = it.type;
        seen->first_real = it.real;
        seen->first_on_device = where == ON_DEVICE;
    }
    if (where == ON_DEVICE && !seen->unknown && !seen->is_unread && it.bytes)
        seen->unknown = !gm_could_know((const void *)(uintptr_t)it.address);
    if (!seen->is_written) return;
    seen->host_written |= where == ON_HOST;
    seen->all_real &= it.real;
    seen->written_count++;
    if (it.bytes > seen->largest_written) seen->largest_written = it.bytes;
}

static arguments look_at(const operator_note *note, object args, object kwargs) {
    arguments seen = {.all_real = true};
    intptr_t count = python.tuple_size(args);
    for (intptr_t i = 0; i < count; i++) {
        uint64_t bit = i < 64 ? (uint64_t)1 << i : 0;
        seen.is_written = note->written & bit;
        seen.is_unread = (note->unread & bit) || (note->flags & LIKE);
        seen.is_tensor = note->tensors & bit;
        each(python.tuple_item(args, i), note_argument, &seen);
    }
    seen.is_written = seen.is_tensor = false;
    seen.is_unread = note->flags & LIKE;
    object name, value;
    for (intptr_t at = 0; kwargs && python.next_entry(kwargs, &at, &name, &value);) each(value, note_argument, &seen);
    return seen;
}

static bool goes_to_host(object kwargs) {
    object device = kwargs ? python.entry(kwargs, python.text_device) : NULL;
    if (!device || device == python.none) return false;
    object type = python.attribute(device, python.text_type);
    if (!type) {
        python.clear_error();
        return true;
    }
    bool is_cpu = !python.compare(type, python.text_cpu);
    python.drop(type);
    return is_cpu;
}

static bool is_short(const operator_note *note, const arguments *seen, object kwargs) {
    if (seen->odd) return false;
    if (note->flags & READS) return seen->any && !seen->first_on_device;
    if (note->written) {
        if (seen->host_written || !seen->written_count) return false;
        if (note->flags & COPIES && (seen->largest_written <= gm_small_piece() || !seen->all_real)) return false;
        bool too_large = seen->largest_written > gm_largest_piece();
        return seen->unknown || (too_large && (seen->written_count > 1 || seen->all_real));
    }
    return !(note->flags & COPIES) || (seen->first_real && !goes_to_host(kwargs));
}

/* ---- after it has run ---- */

typedef struct {
    bool is_other, all_real; /* some result is no tensor, number or None; each tensor is of floating-point numbers */
    uint64_t largest, sum;   /* bytes */
    uint64_t type;           /* of the last one's elements */
    intptr_t on_device;
} results;

static void note_result(object value, void *data) {
    results *seen = data;
    extent it;
    place where = look(value, &it);
    if (where == ON_DEVICE) {
        seen->on_device++;
        seen->all_real &= it.real;
        seen->type = it.type;
        seen->sum += it.span;
        if (it.bytes > seen->largest) seen->largest = it.bytes;
    } else if (where != ON_HOST && value != python.none) {
        seen->is_other |= !is_number(value);
    }
}

static void forget_tensor(object value, void *data) {
    (void)data;
    extent it;
    if (look(value, &it) == ON_DEVICE) gm_forget((const void *)(uintptr_t)it.address, it.span);
}

/* Makes unknown what an operator has written; false: Python has to look at that. Adds the bytes that count for the test. */
static bool forgets(const operator_note *note, const arguments *seen, object args, object result, uint64_t *counted) {
    object type = python.type_of(result);
    python.drop(type);
    bool is_several = type == python.list || type == python.tuple;
    results made = {.all_real = true};
    each(result, note_result, &made);
    bool is_large = made.largest > gm_small_piece();
    if (note->written) {
        for (intptr_t i = 0; i < 64 && i < python.tuple_size(args); i++)
            if (note->written >> i & 1) each(python.tuple_item(args, i), forget_tensor, NULL);
        each(result, forget_tensor, NULL);
        if (!is_several && is_large && made.all_real) *counted = made.sum;
        return true;
    }
    if (made.is_other) return false;
    if (!made.on_device) return true;
    bool is_lost;
    if (is_several) {
        if (note->flags & ASSUMED) return false;
        is_lost = made.largest > gm_largest_piece() || (seen->unknown && (is_large || made.all_real));
    } else if (!made.all_real) {
        return false;
    } else if (note->flags & CONSTANT) {
        is_lost = seen->unknown;
    } else {
        is_lost = made.largest > gm_largest_piece() || seen->unknown;
        if (note->flags & COPIES && !is_large && made.type == seen->first_type) is_lost = false; /* a plain copy, perhaps */
        if (note->flags & ALLOCATES && is_large) is_lost |= made.largest > gm_value_budget();
    }
    if (!is_lost) return false;
    each(result, forget_tensor, NULL);
    if (is_large && type != python.list && !(note->flags & (LIKE | CONSTANT))) *counted = made.sum;
    return true;
}

static object answer_of(const operator_note *note, const arguments *seen, object args, object kwargs) {
    object outer_args = running_args, outer_kwargs = running_kwargs;
    running_args = args;
    running_kwargs = kwargs;
    python.exclude(key, true);
    gm_count_operators(1);
    object result = python.call(note->function, args, kwargs);
    gm_count_operators(-1);
    running_args = outer_args;
    running_kwargs = outer_kwargs;
    object done = python.none;
    uint64_t counted = 0;
    if (result && !(note->flags & READS)) {
        if (!forgets(note, seen, args, result, &counted))
            done = python.call_with(python.finish, note->op, args, kwargs ? kwargs : python.none, result, NULL);
        else if (counted && gm_note_lost(counted))
            done = python.call_with(python.large, NULL);
        if (!done) {
            python.drop(result);
            result = NULL;
        } else if (done != python.none) {
            python.drop(done);
        }
    }
    python.exclude(key, false);
    return result;
}

/* The kernel; "number" is of the operator's note. */
GM_API object gpumem_operator(object number, object args, object kwargs) {
    operator_note note = notes[python.number_of(number)]; /* a copy: the notes move as more are made */
    if (!is_on || opened || !(note.flags & SHORT)) return python.call(note.slow, args, kwargs);
    /* What is made here would have Python's collector run earlier than on a GPU. */
    int collects = python.stop_collector();
    arguments seen = look_at(&note, args, kwargs);
    bool takes_short_way = is_short(&note, &seen, kwargs);
    object result = takes_short_way ? answer_of(&note, &seen, args, kwargs) : NULL;
    if (collects) python.start_collector();
    return takes_short_way ? result : python.call(note.slow, args, kwargs);
}

/* ---- functions that Python calls ---- */

/* Notes an operator that hands all calls to a function; its number, or -1 without memory. */
GM_API int64_t gpumem_new_operator(object slow) {
    if (note_count == note_room) {
        size_t room = note_room ? note_room * 2 : 8192;
        operator_note *more = realloc(notes, room * sizeof *more);
        if (!more) return -1;
        notes = more;
        note_room = room;
    }
    python.keep(slow);
    notes[note_count] = (operator_note){.slow = slow};
    return (int64_t)note_count++;
}

/* Says of one what its short way needs; what is given is kept as long as the process lives. */
GM_API void gpumem_know_operator(uint64_t number, object slow, object op, object function, uint64_t flags, uint64_t written,
                                 uint64_t unread, uint64_t tensors) {
    python.keep(slow);
    python.keep(op);
    python.keep(function);
    notes[number] = (operator_note){slow, op, function, flags, written, unread, tensors};
}

/* Whether any call takes the short way. */
GM_API void gpumem_short_ways(int on) { is_on = on; }

/* Counts operators of this thread's that run with those inside of them seen: none of these takes the short way. */
GM_API void gpumem_count_opened(int change) { opened += change; }

/* Whether this thread runs an operator that is seen as a whole: what its own kernels write is told by the operator. */
GM_API int gpumem_in_operator(void) { return gm_operators_here() > opened; }

/* The arguments, positional and by name, of the operator that runs on this thread on the short way; None: none does. */
GM_API object gpumem_running(object module, object no_argument) {
    (void)module, (void)no_argument;
    if (!running_args) {
        python.keep(python.none);
        return python.none;
    }
    return python.pack(2, running_args, running_kwargs ? running_kwargs : python.none);
}

typedef struct {
    bool no;
    uint64_t bytes;
} all_known;

static void note_known(object value, void *data) {
    all_known *seen = data;
    extent it;
    place where = look(value, &it);
    if (where == NO_TENSOR) {
        object type = python.type_of(value);
        python.drop(type);
        seen->no |= type == python.list || type == python.tuple || python.is_subtype(type, python.tensor);
    } else {
        seen->no |= where == ODD || it.bytes > gm_largest_piece() ||
                    (where == ON_DEVICE && it.bytes && !gm_is_known((const void *)(uintptr_t)it.address, it.span));
        seen->bytes += it.bytes;
    }
}

/* The bytes of the tensors among an operator's arguments, a tuple and a dictionary; None where not all are known, or one is
 * no plain tensor, or larger than is computed. */
GM_API object gpumem_known_bytes(object module, const object *arguments, intptr_t count) {
    (void)module;
    all_known seen = {.no = count != 2};
    for (intptr_t i = 0; !seen.no && i < python.tuple_size(arguments[0]); i++)
        each(python.tuple_item(arguments[0], i), note_known, &seen);
    object name, value;
    for (intptr_t at = 0; !seen.no && python.next_entry(arguments[1], &at, &name, &value);) each(value, note_known, &seen);
    if (!seen.no) return python.of_number(seen.bytes);
    python.keep(python.none);
    return python.none;
}

/* Addresses and their sizes: unknown bytes are written there. */
GM_API object gpumem_forget_ranges(object module, const object *ranges, intptr_t count) {
    (void)module;
    for (intptr_t i = 0; i + 1 < count; i += 2)
        gm_forget((const void *)(uintptr_t)python.number_of(ranges[i]), python.number_of(ranges[i + 1]));
    python.keep(python.none);
    return python.none;
}
