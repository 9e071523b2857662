/* The kernel of PyTorch's operators that Python has registered for its own dispatch key. It runs with every operator of a
 * step, so it is in C: by Python's code alone (values/interception.py) a training step takes more than twice as long, and a
 * Python kernel that only looked up the tensors' addresses would add a fifth. Without the part that computes results, steps
 * of small models, whose values are all known, would take up to half more.
 *
 * After most operators of a step the written values are unknown, and nothing else needs to be done: they read something
 * unknown, or write more than is stored. Such a call takes the short way here. So does a call with only known arguments
 * and one small result, as most calls in a test of small tensors are: it is computed here. Any other call is passed to
 * Python (its "slow" function), before or after the operator has run.
 *
 * These functions use CPython's C API like its own modules (python.h). A tensor's address is read with DLPack's exchange
 * API (dlpack.h), or else with a Python function. All run with the GIL. */
#include "base/base.h"
#include "base/python.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* Objects that Python passes, by these names. */
static struct {
    object tensor, parameter, buffer, device, generator; /* types of PyTorch */
    object describe; /* takes a tensor, returns a tuple of numbers: the fields of gm_extent */
    object finish;   /* takes an operator, its arguments, its result, and the host's if there is one: writes its values */
    object large;    /* called once the test counts as a large one */
    object affords;  /* takes an operator, its arguments, its result and their bytes: whether the test's budget covers its
                        cost */
    object refund;   /* returns the last deducted cost to the budget */
    object get_num_threads, set_num_threads; /* of the host */
    object is_neg; /* whether a tensor is lazily negated, as imaginary parts may be */
    object function_modes; /* returns how many of the program's function modes are active: a default device is one */
    object dispatch;       /* Tensor.__torch_dispatch__: a subclass that does not replace it is no wrapper */
} torch;
static struct {
    int (*export)(object tensor, void *dltensor); /* NULL: this PyTorch has none */
    int (*import)(void *managed, object *tensor); /* likewise */
} dlpack;
static void (*exclude)(uint16_t key, bool on); /* excludes a dispatch key of PyTorch on this thread */
static uint16_t key;

/* Flags that Python passes for an operator: see OperatorFlags in operator_functions.py. */
enum { SHORT = 1, LIKE = 2, CONSTANT = 4, COPIES = 8, ASSUMED = 16, READS = 32, ALLOCATES = 64, COMPUTES = 128, CHEAP = 256,
       THREADS = 512, INDEXES = 1024, CHANGES = 2048, RETURNS = 4096, SCATTERS = 8192 };

typedef struct {
    object slow, op, host;
    object function;     /* runs the operator; for some operators it accepts no number in a tensor's place */
    object with_numbers; /* runs it with such numbers, which is slower; None: not possible */
    uint64_t flags, written, unread, tensors; /* the last three: bit masks over the arguments */
} operator_note;

static operator_note *notes;
static size_t note_count, note_room;
static bool is_on;
static bool any_assumed;                             /* some values are assumed */
static _Thread_local int opened;                     /* running operators whose inner operators are seen */
static _Thread_local bool reads_argument;            /* the running operator copies its argument to the host */
static _Thread_local object running_args, running_kwargs; /* of the operator running here on the short way */

static object new_reference(object value) {
    Py_IncRef(value);
    return value;
}

static object type_of(object value) {
    object type = PyObject_Type(value);
    Py_DecRef(type); /* the value references it */
    return type;
}

/* ---- addresses of tensors ---- */

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
enum { DL_CPU = 1, DL_CUDA = 2, DL_CUDA_HOST = 3, DL_UNSIGNED = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_COMPLEX = 5, DL_BOOL = 6 };

/* DLManagedTensorVersioned of dlpack.h, version 1. */
typedef struct managed {
    uint32_t major, minor;
    void *context;
    void (*deleter)(struct managed *);
    uint64_t flags;
    dltensor tensor;
} managed;

typedef enum { NO_TENSOR, ON_HOST, ON_DEVICE, ODD /* sparse, nested, without memory */ } place;

typedef struct {
    uint64_t kind, address, bytes, span, real; /* span: from the first element to the end of the last */
    uint64_t type;                             /* equal for equal types */
} extent;

static place described(object tensor, extent *out) {
    object told = PyObject_CallFunctionObjArgs(torch.describe, tensor, NULL);
    if (!told) {
        PyErr_Clear();
        return ODD;
    }
    uint64_t *fields[] = {&out->kind, &out->address, &out->bytes, &out->span, &out->real, &out->type};
    for (intptr_t i = 0; i < 6; i++) *fields[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(told, i));
    Py_DecRef(told);
    return (place)out->kind;
}

/* For a plain tensor of PyTorch, not a wrapper. */
static place look(object value, extent *out) {
    object type = type_of(value);
    if (type != torch.tensor && type != torch.parameter && type != torch.buffer) return NO_TENSOR;
    if (!dlpack.export) return described(value, out);
    dltensor tensor;
    if (dlpack.export(value, &tensor)) {
        PyErr_Clear();
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

/* Calls a function with a value, or with each element of a list or tuple. */
static void each(object value, void (*function)(object, void *), void *data) {
    object type = type_of(value);
    if (type == &PyList_Type)
        for (intptr_t i = 0; i < PyList_Size(value); i++) function(PyList_GetItem(value, i), data);
    else if (type == &PyTuple_Type)
        for (intptr_t i = 0; i < PyTuple_Size(value); i++) function(PyTuple_GetItem(value, i), data);
    else
        function(value, data);
}

/* Does the same with each argument of an operator. */
static void each_argument(object args, object kwargs, void (*function)(object, void *), void *data) {
    for (intptr_t i = 0; i < PyTuple_Size(args); i++) each(PyTuple_GetItem(args, i), function, data);
    object name, value;
    for (intptr_t at = 0; kwargs && PyDict_Next(kwargs, &at, &name, &value);) each(value, function, data);
}

/* ---- before an operator runs ---- */

typedef struct {
    bool is_written, is_unread, is_tensor;   /* the arguments to look at */
    bool odd, unknown;                       /* some tensor is odd; some tensor that is read is unknown */
    bool any_number;                         /* in place of a tensor */
    bool host_written, all_real;             /* for the written tensors */
    uint64_t written_count, largest_written; /* tensors; bytes */
    uint64_t first_type;                     /* of the first tensor's elements */
    bool first_on_device, any, any_on_device;
} arguments;

static bool is_number(object value) {
    object type = type_of(value);
    return type == &PyLong_Type || type == &PyBool_Type || type == &PyFloat_Type || type == &PyComplex_Type;
}

/* Whether a tensor is of a subclass that wraps no other: it has values, and its class may replace any method of Python's. */
static bool has_own_class(object value) {
    object type = type_of(value);
    if (!PyType_IsSubtype(type, torch.tensor)) return false;
    object dispatch = PyObject_GetAttrString(type, "__torch_dispatch__");
    if (dispatch) Py_DecRef(dispatch);
    else PyErr_Clear();
    return dispatch == torch.dispatch;
}

static void note_argument(object value, void *data) {
    arguments *seen = data;
    extent it;
    place where = look(value, &it);
    if (where == NO_TENSOR) {
        seen->any_number |= seen->is_tensor && is_number(value);
        seen->odd |= has_own_class(value);
        return;
    }
    if (where == ODD) {
        seen->odd = true;
        return;
    }
    if (!seen->any) {
        seen->any = true;
        seen->first_type = it.type;
        seen->first_on_device = where == ON_DEVICE;
    }
    seen->any_on_device |= where == ON_DEVICE;
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
    intptr_t count = PyTuple_Size(args);
    for (intptr_t i = 0; i < count; i++) {
        uint64_t bit = i < 64 ? (uint64_t)1 << i : 0;
        seen.is_written = note->written & bit;
        seen.is_unread = (note->unread & bit) || (note->flags & LIKE);
        seen.is_tensor = note->tensors & bit;
        each(PyTuple_GetItem(args, i), note_argument, &seen);
    }
    seen.is_written = seen.is_tensor = false;
    seen.is_unread = note->flags & LIKE;
    object name, value;
    for (intptr_t at = 0; kwargs && PyDict_Next(kwargs, &at, &name, &value);) each(value, note_argument, &seen);
    seen.odd |= seen.any_number && note->with_numbers == Py_None;
    return seen;
}

static bool goes_to_host(object kwargs) {
    object device = kwargs ? PyDict_GetItemString(kwargs, "device") : NULL;
    if (!device || device == Py_None) return false;
    object type = PyObject_GetAttrString(device, "type");
    if (!type) {
        PyErr_Clear();
        return true;
    }
    bool is_cpu = !PyUnicode_CompareWithASCIIString(type, "cpu");
    Py_DecRef(type);
    return is_cpu;
}

/* Whether values can be used as they are: no kernel of compiled code or of a captured graph will still overwrite them. */
static bool values_hold(void) { return !any_assumed && !gm_operators_here() && !gm_any_capture(); }

static bool reads_known(object args) {
    extent it;
    return values_hold() && PyTuple_Size(args) == 1 && look(PyTuple_GetItem(args, 0), &it) == ON_DEVICE &&
           gm_is_known((const void *)(uintptr_t)it.address, it.span);
}

static void note_mask(object value, void *data) {
    extent it;
    if (look(value, &it) == NO_TENSOR) return;
    *(bool *)data |= it.type == (DL_BOOL << 8 | 8) || it.type == (DL_UNSIGNED << 8 | 8);
}

static bool has_mask(object args) {
    bool has = PyTuple_Size(args) < 2 || !dlpack.export;
    if (!has) each(PyTuple_GetItem(args, 1), note_mask, &has);
    return has;
}

static void note_subclass(object value, void *data) {
    object type = type_of(value);
    *(bool *)data |= type != torch.tensor && type != torch.parameter && type != torch.buffer &&
                     PyType_IsSubtype(type, torch.tensor);
}

/* Whether all of an operator's tensors are on the host, and none is of a subclass, which may wrap others. */
static bool is_of_host(const arguments *seen, object args, object kwargs) {
    if (!seen->any || seen->any_on_device) return false;
    bool any_subclass = false;
    each_argument(args, kwargs, note_subclass, &any_subclass);
    return !any_subclass;
}

static bool is_short(const operator_note *note, const arguments *seen, object args, object kwargs) {
    if (seen->odd) return false;
    if (note->flags & READS) return seen->any && (!seen->first_on_device || reads_known(args));
    if (note->written) {
        if (is_of_host(seen, args, kwargs)) return true;
        if (note->flags & CHANGES) return false;
        if (seen->host_written || !seen->written_count) return false;
        if (note->flags & COPIES && (seen->largest_written <= gm_small_piece() || !seen->all_real)) return false;
        bool too_large = seen->largest_written > gm_largest_piece();
        if (note->flags & SCATTERS && seen->written_count == 1) return seen->unknown;
        return seen->unknown || (too_large && (seen->written_count > 1 || seen->all_real));
    }
    return !(note->flags & COPIES) || !goes_to_host(kwargs);
}

/* ---- after it has run ---- */

typedef struct {
    bool is_other, all_real; /* some result is not a tensor, number or None; all tensors are floating-point */
    uint64_t largest, sum;   /* bytes */
    uint64_t type;           /* element type of the last tensor */
    bool on_device;          /* some tensor is on a device */
} results;

static void note_result(object value, void *data) {
    results *seen = data;
    extent it;
    place where = look(value, &it);
    if (where == ON_DEVICE) {
        seen->on_device = true;
        seen->all_real &= it.real;
        seen->type = it.type;
        seen->sum += it.span;
        if (it.bytes > seen->largest) seen->largest = it.bytes;
    } else if (where != ON_HOST && value != Py_None) {
        seen->is_other |= !is_number(value);
    }
}

static void forget_tensor(object value, void *data) {
    extent it;
    if (look(value, &it) == ON_DEVICE) gm_forget((const void *)(uintptr_t)it.address, it.span);
}

/* Marks what an operator has written as unknown; false: Python has to handle it. Adds the bytes that count for the test. */
static bool forgets(const operator_note *note, const arguments *seen, object args, object result, uint64_t *counted) {
    object type = type_of(result);
    bool is_several = type == &PyList_Type || type == &PyTuple_Type;
    results made = {.all_real = true};
    each(result, note_result, &made);
    bool is_large = made.largest > gm_small_piece();
    if (note->written) {
        for (intptr_t i = 0; i < 64 && i < PyTuple_Size(args); i++) {
            object argument = PyTuple_GetItem(args, i);
            if (note->written >> i & 1 && argument != result) each(argument, forget_tensor, NULL);
        }
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
        if (note->flags & COPIES && !is_large && made.type == seen->first_type) is_lost = false; /* possibly a plain copy */
        if (note->flags & ALLOCATES && is_large) is_lost |= made.largest > gm_value_budget();
    }
    if (!is_lost) return false;
    each(result, forget_tensor, NULL);
    if (is_large && type != &PyList_Type && !(note->flags & (LIKE | CONSTANT))) *counted = made.sum;
    return true;
}

/* ---- results that are computed here ---- */

enum {
    MAX_BYTES = 4096,       /* of all tensors: such an operator is free in a test's budget (TINY of budget.py) */
    MAX_ELEMENTS = 1 << 15, /* of a cheap operator: PyTorch uses one thread, and it is free too */
    MAX_ALONE = 99,         /* elements up to which each operator except those of THREADS uses one thread: from 100 on MKL's
                               vector functions (sin, exp) start a second one, once set_num_threads has been called. Waiting
                               for it takes 10 ms and more on a busy machine */
    MAX_WRITTEN = 64,       /* tensors among the arguments */
    MAX_RESULTS = 8
};

typedef struct {
    uint64_t bytes, elements; /* of all tensors */
    uint64_t known;           /* bytes of the arguments */
    bool no;                  /* leave the call to Python */
    struct {
        void *address, *values; /* on the device; computed on the host */
        uint64_t span;
    } written[MAX_WRITTEN];
    size_t count;
} host_call;

/* Adds the size of a plain tensor. */
static void add_size(host_call *call, object tensor, const extent *it, dltensor *out) {
    if (dlpack.export(tensor, out)) {
        PyErr_Clear();
        call->no = true;
        return;
    }
    call->bytes += it->bytes;
    call->elements += it->bytes / ((uint64_t)out->bits * out->lanes / 8);
    call->no |= out->code == DL_COMPLEX || it->bytes > gm_largest_piece(); /* the first may be a lazy conjugate */
}

/* Whether a call is free in a test's budget. */
static bool is_free(const operator_note *note, const host_call *call) {
    return call->bytes <= MAX_BYTES || (note->flags & CHEAP && call->elements <= MAX_ELEMENTS);
}

static void free_managed(managed *tensor) { free(tensor); }

/* Returns a CPU tensor over some bytes, which it does not keep alive; NULL: there is none. */
static object tensor_over(void *bytes, const dltensor *like) {
    managed *host = calloc(1, sizeof *host);
    if (!host) return NULL;
    host->major = 1;
    host->deleter = free_managed;
    host->tensor = *like;
    host->tensor.data = bytes;
    host->tensor.offset = 0;
    host->tensor.device_type = DL_CPU;
    host->tensor.device = 0;
    object made = NULL;
    if (dlpack.import(host, &made)) PyErr_Clear();
    return made;
}

/* Converts an argument for the host: for a device tensor, the CPU tensor over its bytes, or over a copy of them if the
 * operator writes it. NULL: leave the call to Python, for example because bytes that it reads are unknown. */
static object on_host(host_call *call, object value, bool is_written, bool is_read) {
    extent it;
    dltensor tensor;
    place where = look(value, &it);
    if (where == NO_TENSOR) {
        object type = type_of(value);
        if (type == &PyList_Type) {
            intptr_t count = PyList_Size(value);
            object items = PyList_New(count);
            call->no |= !items;
            for (intptr_t i = 0; i < count && !call->no; i++) {
                object item = on_host(call, PyList_GetItem(value, i), is_written, is_read);
                if (item) PyList_SetItem(items, i, item);
            }
            if (call->no && items) Py_DecRef(items);
            return call->no ? NULL : items;
        }
        call->no |= type == torch.device || type == torch.generator || type == &PyTuple_Type ||
                    PyType_IsSubtype(type, torch.tensor);
    } else if (where == ODD || (where == ON_HOST && is_written)) {
        call->no = true;
    } else {
        add_size(call, value, &it, &tensor);
        call->known += it.bytes;
    }
    if (!call->no && where == ON_DEVICE) {
        void *address = (void *)(uintptr_t)it.address;
        object made = NULL;
        if (it.bytes && (!is_read || gm_is_known(address, it.span))) {
            void *bytes = address;
            if (is_written) bytes = call->count < MAX_WRITTEN && it.span <= gm_largest_piece() ? malloc(it.span) : NULL;
            if (is_written && bytes) {
                memcpy(bytes, address, it.span);
                call->written[call->count].address = address;
                call->written[call->count].values = bytes;
                call->written[call->count++].span = it.span;
            }
            if (bytes) made = tensor_over(bytes, &tensor);
        }
        call->no |= !made;
        return made;
    }
    if (call->no) return NULL;
    return new_reference(value);
}

static void refuse(object value, void *data) {
    host_call *call = data;
    object type = type_of(value);
    call->no |= type == torch.device || type == torch.generator || PyType_IsSubtype(type, torch.tensor);
}

typedef enum { LEFT, COMPUTED, FAILED } outcome;

/* Whether a function mode would see the calls of the host's function. */
static bool any_function_mode(void) {
    object count = PyObject_CallFunctionObjArgs(torch.function_modes, NULL);
    if (!count) {
        PyErr_Clear();
        return true;
    }
    bool any = PyLong_AsUnsignedLongLong(count) > 0;
    Py_DecRef(count);
    return any;
}

/* Whether the test's budget covers a call, whose cost is then deducted. */
static outcome affords(const operator_note *note, const host_call *call, object args, object kwargs, object result) {
    object bytes = PyLong_FromUnsignedLongLong(call->known);
    if (!bytes) return FAILED;
    object answer = PyObject_CallFunctionObjArgs(torch.affords, note->op, args, kwargs ? kwargs : Py_None, result, bytes, NULL);
    Py_DecRef(bytes);
    if (!answer) return FAILED;
    Py_DecRef(answer);
    return answer == Py_True ? COMPUTED : LEFT;
}

/* Sets the host's number of threads to a Python number. */
static void use_threads(object count) {
    object none = count ? PyObject_CallFunctionObjArgs(torch.set_num_threads, count, NULL) : NULL;
    if (none) Py_DecRef(none);
    else PyErr_Clear();
}

/* Calls the host's function, with one thread if it might use more. LEFT: it failed, perhaps because the CPU does not
 * support these types. */
static outcome call_alone(const operator_note *note, const host_call *call, object args, object kwargs, object *host) {
    bool is_divided = note->flags & THREADS || call->elements > MAX_ALONE;
    object before = is_divided ? PyObject_CallFunctionObjArgs(torch.get_num_threads, NULL) : NULL, one = NULL;
    if (before && PyLong_AsUnsignedLongLong(before) > 1) use_threads(one = PyLong_FromUnsignedLongLong(1));
    *host = PyObject_Call(note->host, args, kwargs);
    outcome called = *host ? COMPUTED : PyErr_ExceptionMatches(PyExc_Exception) ? LEFT : FAILED;
    if (called == LEFT) PyErr_Clear();
    if (one && called != FAILED) use_threads(before);
    if (one) Py_DecRef(one);
    if (before) Py_DecRef(before);
    return called;
}

/* Calls the host's function. LEFT: Python has to handle the call; FAILED: an error must be raised. "result" is what the
 * operator returned, or None. */
static outcome call_host(const operator_note *note, host_call *call, object args, object kwargs, object result, object *host) {
    object name, value;
    for (intptr_t at = 0; kwargs && PyDict_Next(kwargs, &at, &name, &value);) each(value, refuse, call);
    if (call->no || any_function_mode()) return LEFT;
    intptr_t count = PyTuple_Size(args);
    object host_args = PyTuple_New(count);
    if (!host_args) return FAILED;
    for (intptr_t i = 0; i < count && !call->no; i++) {
        bool is_written = i < 64 && note->written >> i & 1, is_unread = i < 64 && note->unread >> i & 1;
        object argument = on_host(call, PyTuple_GetItem(args, i), is_written, is_written || !is_unread);
        if (argument) PyTuple_SetItem(host_args, i, argument);
    }
    outcome called = call->no ? LEFT : COMPUTED;
    bool costs = !is_free(note, call);
    if (called == COMPUTED && costs) called = affords(note, call, args, kwargs, result);
    if (called == COMPUTED) {
        called = call_alone(note, call, host_args, kwargs, host);
        if (called == LEFT && costs) { /* Python computes it, or reports why not, and deducts the cost again */
            object none = PyObject_CallFunctionObjArgs(torch.refund, NULL);
            if (!none) called = FAILED;
            else Py_DecRef(none);
        }
    }
    Py_DecRef(host_args);
    return called;
}

static bool has_its_strides(const dltensor *tensor, const dltensor *other) {
    for (int i = 0; i < tensor->dimensions; i++)
        if (tensor->shape[i] != other->shape[i] || (tensor->shape[i] > 1 && tensor->strides[i] != other->strides[i])) return false;
    return true;
}

/* Whether the host's result has the type, the sizes and the layout of the device's; returns the extent of both. */
static bool are_alike(object result, object host, extent *it, extent *from) {
    dltensor tensor, values;
    if (look(result, it) != ON_DEVICE || look(host, from) != ON_HOST) return false;
    if (dlpack.export(result, &tensor) || dlpack.export(host, &values)) {
        PyErr_Clear();
        return false;
    }
    return it->type == from->type && tensor.lanes == values.lanes && tensor.dimensions == values.dimensions &&
           it->span == it->bytes && has_its_strides(&tensor, &values);
}

/* Writes the host's bytes to the device's addresses; false: there is no room. */
static bool put(const extent *it, const extent *from) {
    if (!gm_open_for_writing((void *)(uintptr_t)it->address, it->bytes)) return false;
    memmove((void *)(uintptr_t)it->address, (const void *)(uintptr_t)from->address, it->bytes);
    return true;
}

/* Whether a small result has the known bytes of the argument, in order: PyTorch copied them with this library. */
static bool is_plain_copy(object args, object result) {
    extent it, from;
    dltensor tensor, source;
    if (!values_hold() || !dlpack.export || !PyTuple_Size(args) || look(result, &it) != ON_DEVICE) return false;
    place where = look(PyTuple_GetItem(args, 0), &from);
    if ((where != ON_HOST && where != ON_DEVICE) || it.type != from.type || it.bytes > gm_small_piece()) return false;
    if (dlpack.export(result, &tensor) || dlpack.export(PyTuple_GetItem(args, 0), &source)) {
        PyErr_Clear();
        return false;
    }
    if (tensor.code == DL_COMPLEX || tensor.lanes != source.lanes || tensor.dimensions != source.dimensions) return false;
    if (it.span != it.bytes || !has_its_strides(&tensor, &source)) return false;
    object negative = PyObject_CallFunctionObjArgs(torch.is_neg, PyTuple_GetItem(args, 0), NULL);
    if (!negative) PyErr_Clear();
    else Py_DecRef(negative);
    if (negative != Py_False) return false; /* a kernel copies lazily negated tensors */
    if (where == ON_DEVICE && !gm_is_known((const void *)(uintptr_t)from.address, from.span)) return false; /* perhaps not
                                                                                                               yet */
    return gm_is_known((const void *)(uintptr_t)it.address, it.span);
}

/* Checks a result that may be computed here: large integer results are computed once they are read. */
static void note_made(object value, void *data) {
    host_call *call = data;
    extent it;
    dltensor tensor;
    if (value == Py_None) return;
    if (look(value, &it) == ON_DEVICE && it.bytes && (it.real || it.bytes <= gm_small_piece())) add_size(call, value, &it, &tensor);
    else call->no = true;
}

/* Writes the host's results to the device's; false: Python has to do that, as some differ in form. */
static bool write_results(object result, object host) {
    object type = type_of(result), host_type = type_of(host);
    extent it[MAX_RESULTS], from[MAX_RESULTS];
    bool several = type == &PyTuple_Type;
    intptr_t count = several ? PyTuple_Size(result) : 1;
    if (count > MAX_RESULTS || (several && (host_type != &PyTuple_Type || PyTuple_Size(host) != count))) return false;
    for (intptr_t i = 0; i < count; i++) {
        object one = several ? PyTuple_GetItem(result, i) : result, other = several ? PyTuple_GetItem(host, i) : host;
        it[i].bytes = 0;
        if (one == Py_None || (look(one, &it[i]) == ON_DEVICE && !it[i].bytes)) continue;
        if (!are_alike(one, other, &it[i], &from[i])) return false;
    }
    bool any_room = true;
    for (intptr_t i = 0; i < count; i++) any_room &= !it[i].bytes || put(&it[i], &from[i]);
    return any_room;
}

/* Writes an operator's results that the host has computed; false: an error must be raised. */
static bool finishes(const operator_note *note, object args, object kwargs, object result, object host) {
    if (write_results(result, host)) return true;
    object done = PyObject_CallFunctionObjArgs(torch.finish, note->op, args, kwargs ? kwargs : Py_None, result, host, NULL);
    if (done) Py_DecRef(done);
    return done;
}

/* Computes the results of an operator that has run, if all its arguments are known. */
static outcome computes(const operator_note *note, object args, object kwargs, object result) {
    extent it;
    if (note->flags & ALLOCATES && !any_assumed && !gm_any_capture() && look(result, &it) == ON_DEVICE && it.bytes) {
        /* Any bytes count as known values: if a program writes the tensor part by part, all of it is known. */
        gm_open_for_writing((void *)(uintptr_t)it.address, it.span);
        return COMPUTED;
    }
    if (note->flags & COPIES && is_plain_copy(args, result)) return COMPUTED;
    if (!(note->flags & COMPUTES) || !dlpack.import || !values_hold()) return LEFT;
    host_call call = {.count = 0};
    each(result, note_made, &call);
    if (call.no) return LEFT;
    object host = NULL;
    outcome called = call_host(note, &call, args, kwargs, result, &host);
    if (called == COMPUTED && !finishes(note, args, kwargs, result, host)) called = FAILED;
    if (host) Py_DecRef(host);
    return called;
}

static object run(const operator_note *note, const arguments *seen, object args, object kwargs) {
    gm_count_operators(1);
    object result = PyObject_Call(seen->any_number ? note->with_numbers : note->function, args, kwargs);
    gm_count_operators(-1);
    return result;
}

static object answer_of(const operator_note *note, const arguments *seen, object args, object kwargs) {
    object outer_args = running_args, outer_kwargs = running_kwargs;
    running_args = args;
    running_kwargs = kwargs;
    exclude(key, true);
    reads_argument = note->flags & READS;
    object result = run(note, seen, args, kwargs);
    reads_argument = false;
    running_args = outer_args;
    running_kwargs = outer_kwargs;
    object done = Py_None;
    uint64_t counted = 0;
    if (result && !(note->flags & READS)) {
        outcome written = COMPUTED;
        if (!forgets(note, seen, args, result, &counted)) written = computes(note, args, kwargs, result);
        if (written == FAILED)
            done = NULL;
        else if (written == LEFT)
            done = PyObject_CallFunctionObjArgs(torch.finish, note->op, args, kwargs ? kwargs : Py_None, result, NULL);
        else if (counted && gm_note_lost(counted))
            done = PyObject_CallFunctionObjArgs(torch.large, NULL);
        if (!done) {
            Py_DecRef(result);
            result = NULL;
        } else if (done != Py_None) {
            Py_DecRef(done);
        }
    }
    exclude(key, false);
    return result;
}

/* Runs an operator that changes known tensors, and computes their new values: before it runs, as the operator may still
 * copy unknown bytes there. NULL with LEFT: Python has to handle it. */
static object change(const operator_note *note, const arguments *seen, object args, object kwargs, outcome *called) {
    *called = LEFT;
    if (!(note->flags & COMPUTES) || !dlpack.import || !values_hold()) return NULL;
    host_call call = {.count = 0};
    object host = NULL, result = NULL;
    exclude(key, true);
    *called = call_host(note, &call, args, kwargs, Py_None, &host);
    if (*called == COMPUTED) result = run(note, seen, args, kwargs);
    if (result && note->flags & RETURNS && !finishes(note, args, kwargs, result, host)) {
        Py_DecRef(result);
        result = NULL;
    }
    if (host) Py_DecRef(host);
    exclude(key, false);
    for (size_t i = 0; i < call.count; i++) {
        if (result && gm_open_for_writing(call.written[i].address, call.written[i].span))
            memcpy(call.written[i].address, call.written[i].values, call.written[i].span);
        free(call.written[i].values);
    }
    return result;
}

/* The kernel of all operators; "number" is the index of an operator's note. */
static object run_operator(object number, object args, object kwargs) {
    operator_note note = notes[PyLong_AsUnsignedLongLong(number)]; /* a copy: adding notes moves them */
    if (!is_on || opened || !(note.flags & SHORT)) return PyObject_Call(note.slow, args, kwargs);
    /* Objects created here would make Python's garbage collector run earlier than on a GPU. */
    int collects = PyGC_Disable();
    arguments seen = look_at(&note, args, kwargs);
    object result = NULL;
    outcome done = LEFT;
    seen.odd |= note.flags & INDEXES && has_mask(args);
    if (is_short(&note, &seen, args, kwargs)) {
        result = answer_of(&note, &seen, args, kwargs);
        done = COMPUTED;
    } else if (note.written && !seen.odd && !seen.unknown && (seen.written_count || !(note.flags & RETURNS))) {
        result = change(&note, &seen, args, kwargs, &done);
    }
    if (collects) PyGC_Enable();
    return done == LEFT ? PyObject_Call(note.slow, args, kwargs) : result;
}

/* ---- functions that Python calls ---- */

/* Sets whether any values are assumed. */
GM_API void gpumem_tell_assumed(int any) { any_assumed = any; }

bool gm_reads_argument(void) { return reads_argument; }

/* Sets whether any call takes the short way. */
GM_API void gpumem_short_ways(int on) { is_on = on; }

/* Counts this thread's running operators whose inner operators are seen: until they end, no call takes the short way. */
GM_API void gpumem_count_opened(int change) { opened += change; }

/* Whether this thread runs an operator that is seen as a whole: the operator declares what its own kernels write. */
GM_API int gpumem_in_operator(void) { return gm_operators_here() > opened; }

/* Returns the arguments, positional and by name, of the operator running on this thread on the short way; None: there is
 * none. */
static object running(object module, object no_argument) {
    if (!running_args) return new_reference(Py_None);
    return PyTuple_Pack(2, running_args, running_kwargs ? running_kwargs : Py_None);
}

typedef struct {
    bool no;
    uint64_t bytes;
} all_known;

static void note_known(object value, void *data) {
    all_known *seen = data;
    extent it;
    place where = seen->no ? ODD : look(value, &it);
    if (where == NO_TENSOR) {
        object type = type_of(value);
        seen->no |= type == &PyList_Type || type == &PyTuple_Type || PyType_IsSubtype(type, torch.tensor);
    } else {
        seen->no = where == ODD || it.bytes > gm_largest_piece() ||
                   (where == ON_DEVICE && it.bytes && !gm_is_known((const void *)(uintptr_t)it.address, it.span));
        if (!seen->no) seen->bytes += it.bytes;
    }
}

/* Returns the bytes of the tensors among an operator's arguments, a tuple and a dictionary; None if not all are known, or
 * one is not a plain tensor, or is too large to compute. */
static object known_bytes(object module, const object *arguments, intptr_t count) {
    all_known seen = {.no = false};
    each_argument(arguments[0], arguments[1], note_known, &seen);
    return seen.no ? new_reference(Py_None) : PyLong_FromUnsignedLongLong(seen.bytes);
}

/* Returns a CPU tensor over the bytes of a device tensor; None: Python creates it. */
static object over(object module, object value) {
    extent it;
    dltensor tensor;
    object made = NULL;
    if (dlpack.import && look(value, &it) == ON_DEVICE && it.bytes) {
        if (dlpack.export(value, &tensor)) PyErr_Clear();
        else if (tensor.code != DL_COMPLEX) made = tensor_over((void *)(uintptr_t)it.address, &tensor);
    }
    return made ? made : new_reference(Py_None);
}

/* Writes the host's values, the second argument, to a device tensor, and returns whether there is room; None: the two
 * differ in form, and nothing is written. */
static object put_values(object module, const object *arguments, intptr_t count) {
    object answer = Py_None;
    extent it, from;
    if (count == 2 && dlpack.export && are_alike(arguments[0], arguments[1], &it, &from))
        answer = put(&it, &from) ? Py_True : Py_False;
    return new_reference(answer);
}

static PyMethodDef KERNEL = {"operator", run_operator, METH_VARARGS | METH_KEYWORDS, NULL};

/* Returns a kernel that passes all calls to a function. */
static object kernel(object module, object slow) {
    if (!gm_grow(&notes, &note_room, note_count, sizeof *notes)) return PyErr_NoMemory();
    notes[note_count] = (operator_note){.slow = new_reference(slow)};
    object number = PyLong_FromUnsignedLongLong(note_count++);
    object made = number ? PyCFunction_NewEx(&KERNEL, number, NULL) : NULL;
    if (number) Py_DecRef(number);
    return made;
}

/* Configures a kernel's short way: sets the fields of operator_note. The objects are kept for the lifetime of the
 * process. */
static object know(object module, const object *given, intptr_t count) {
    object number = PyObject_GetAttrString(given[0], "__self__");
    if (!number) return NULL;
    operator_note *note = &notes[PyLong_AsUnsignedLongLong(number)];
    Py_DecRef(number);
    object objects[5];
    uint64_t words[4];
    for (int i = 0; i < 5; i++) objects[i] = new_reference(given[1 + i]);
    for (int i = 0; i < 4; i++) words[i] = PyLong_AsUnsignedLongLong(given[6 + i]);
    memcpy(note, objects, sizeof objects);
    memcpy(&note->flags, words, sizeof words);
    return new_reference(Py_None);
}

static PyMethodDef FUNCTIONS[] = {
    {"kernel", kernel, METH_O, NULL},
    {"know", know, METH_FASTCALL, NULL},
    {"running", running, METH_NOARGS, NULL},
    {"known_bytes", known_bytes, METH_FASTCALL, NULL},
    {"over", over, METH_O, NULL},
    {"put", put_values, METH_FASTCALL, NULL},
};

/* Returns the functions above by name. Takes Python's objects by name, and functions of PyTorch. */
GM_API object gpumem_operator_functions(object given, uint64_t excluded_key, void *exclude_key, void *export, void *import) {
    static const char *const NAMES[] = {"tensor", "parameter", "buffer", "device", "generator", "describe", "finish", "large",
                                        "affords", "refund", "get_num_threads", "set_num_threads", "is_neg", "function_modes",
                                        "dispatch"};
    static_assert(sizeof NAMES / sizeof *NAMES == sizeof torch / sizeof(object), "a name for each");
    for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++)
        ((object *)&torch)[i] = new_reference(PyDict_GetItemString(given, NAMES[i]));
    key = (uint16_t)excluded_key;
    *(void **)&exclude = exclude_key;
    *(void **)&dlpack.export = export;
    *(void **)&dlpack.import = import;
    object functions = PyDict_New();
    for (size_t i = 0; i < sizeof FUNCTIONS / sizeof *FUNCTIONS; i++)
        PyDict_SetItemString(functions, FUNCTIONS[i].name, PyCFunction_NewEx(&FUNCTIONS[i], NULL, NULL));
    return functions;
}
