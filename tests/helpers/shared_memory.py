"""Share device memory between processes; a spawned process imports this module."""

import ctypes

from helpers.virtual_gpu import MIB, private_library, small_card


class Handle(ctypes.Structure):
    """``cudaIpcMemHandle_t``."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


def handle_of(library, address):
    raw = ctypes.create_string_buffer(64)
    status = library.call("cudaIpcGetMemHandle", raw, ctypes.c_void_p(address))
    return status, raw.raw


def open_handle(library, raw):
    address = ctypes.c_void_p()
    handle = Handle.from_buffer_copy(raw)
    return library.call("cudaIpcOpenMemHandle", ctypes.byref(address), handle, 1), address


def in_another_process(folder, raw, pipe):
    library = private_library(folder, small_card(100 * MIB), count=2)
    found = []
    status, first = open_handle(library, raw)
    out = (ctypes.c_int * 32)()
    library.call("cudaPointerGetAttributes", out, ctypes.c_void_p(first.value + MIB))
    found += [status, out[0], out[1], library.account(1).charged]
    found += [open_handle(library, raw)[1].value == first.value]  # the same address again
    found += [library.call("cudaIpcCloseMemHandle", first) for _ in range(3)]
    library.show(1)
    found += [open_handle(library, raw)[0]]
    pipe.send(found)


def exchange(folder, raw, pipe):
    """Open shared memory, write the bytes received from the pipe, and send back what it reads."""
    library = private_library(folder, small_card(100 * MIB), count=2)
    _, address = open_handle(library, raw)
    write(library, address.value, pipe.recv())
    pipe.send(read(library, address.value, 5))


def read(library, address, size):
    """Return bytes of device memory, or None if they are unknown."""
    counted = library.readbacks()
    out = ctypes.create_string_buffer(size)
    assert library.call("cudaMemcpy", out, ctypes.c_void_p(address), ctypes.c_size_t(size), 2) == 0
    return out.raw if library.readbacks() == counted else None


def write(library, address, data):
    """Copy bytes to device memory; return the status."""
    size = ctypes.c_size_t(len(data))
    return library.call("cudaMemcpy", ctypes.c_void_p(address), data, size, 1)
