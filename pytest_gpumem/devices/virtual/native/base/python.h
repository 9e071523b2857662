/* The part of CPython's stable ABI that operator_functions.c needs, by its own names ("Stable Application Binary Interface"
 * in Python's C API). It is declared here, with weak symbols, and not included from Python.h, because programs without
 * Python load this library too: each program that a test starts, such as a shell or a compiler, preloads it
 * (virtual/inherited.py), and would end with "undefined symbol: PyFloat_Type". Python's header is not needed to build
 * either: Debian's python3 and python3-venv come without it. */
#ifndef GPUMEM_PYTHON_H
#define GPUMEM_PYTHON_H

#include <stdint.h>

#define WEAK extern __attribute__((weak))

typedef void *object;

WEAK char _Py_NoneStruct, _Py_FalseStruct, _Py_TrueStruct;
WEAK char PyList_Type, PyTuple_Type, PyLong_Type, PyBool_Type, PyFloat_Type, PyComplex_Type;
WEAK object PyExc_Exception;
#define Py_None ((object)&_Py_NoneStruct)
#define Py_False ((object)&_Py_FalseStruct)
#define Py_True ((object)&_Py_TrueStruct)

WEAK void Py_IncRef(object);
WEAK void Py_DecRef(object);
WEAK object PyObject_Type(object);
WEAK object PyObject_GetAttrString(object, const char *name);
WEAK object PyObject_Call(object function, object arguments, object keywords);
WEAK object PyObject_CallFunctionObjArgs(object function, ...);
WEAK int PyType_IsSubtype(object, object);
WEAK object PyList_New(intptr_t size);
WEAK intptr_t PyList_Size(object);
WEAK object PyList_GetItem(object, intptr_t);
WEAK int PyList_SetItem(object, intptr_t, object); /* takes the reference */
WEAK object PyTuple_New(intptr_t size);
WEAK object PyTuple_Pack(intptr_t count, ...);
WEAK intptr_t PyTuple_Size(object);
WEAK object PyTuple_GetItem(object, intptr_t);
WEAK int PyTuple_SetItem(object, intptr_t, object); /* takes the reference */
WEAK object PyDict_New(void);
WEAK int PyDict_Next(object, intptr_t *place, object *key, object *value);
WEAK object PyDict_GetItemString(object, const char *key); /* borrowed; NULL: no such key */
WEAK int PyDict_SetItemString(object, const char *key, object);
WEAK int PyUnicode_CompareWithASCIIString(object, const char *);
WEAK uint64_t PyLong_AsUnsignedLongLong(object);
WEAK object PyLong_FromUnsignedLongLong(uint64_t);
WEAK object PyErr_NoMemory(void); /* NULL */
WEAK void PyErr_Clear(void);
WEAK int PyErr_ExceptionMatches(object type);
WEAK int PyGC_Disable(void); /* returns whether it was on */
WEAK int PyGC_Enable(void);

enum { METH_VARARGS = 1, METH_KEYWORDS = 2, METH_NOARGS = 4, METH_O = 8, METH_FASTCALL = 128 };
typedef struct {
    const char *name;
    void *function;
    int flags;
    const char *doc;
} PyMethodDef; /* Python reads it at each call */
WEAK object PyCFunction_NewEx(PyMethodDef *, object self, object module);

#endif
