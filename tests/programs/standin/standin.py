"""The module of the stand-in accelerator (standin.cpp), as a package of a backend has it.

PyTorch imports it by an entry point where its folder is on the path, unless
TORCH_DEVICE_BACKEND_AUTOLOAD is 0.
"""

import ctypes
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

LIBRARY = Path(__file__).with_name("libstandin.so")
torch.utils.rename_privateuse1_backend("standin")
torch.ops.load_library(LIBRARY)


def is_available():
    """As torch.cuda has it."""
    return device_count() > 0


def device_count():
    """As torch.cuda has it."""
    return torch._C._accelerator_hooks_device_count()


def current_device():
    """As torch.cuda has it."""
    return torch.accelerator.current_device_index()


def get_device_name(device=None):
    """As torch.cuda has it."""
    return "Stand-in 1000"


def get_amp_supported_dtype():
    """As the documentation of PrivateUse1 asks for."""
    return [torch.float16, torch.bfloat16]


def is_initialized():
    """As torch.cuda has it."""
    return True


def _is_in_bad_fork():
    return False


def manual_seed_all(seed):
    """Have no generators: operators run on the CPU."""


class History:
    """What torch.xpu.memory has: a history with the Python frames of each allocation.

    A request is a segment of its own, which is freed with it.
    """

    def __init__(self):
        self.records = False
        self.live = {}
        self.traces = [[] for _ in range(2)]
        kind = ctypes.CFUNCTYPE(None, ctypes.c_char_p, *[ctypes.c_size_t] * 2, ctypes.c_int)
        self.observer = kind(self.see)
        ctypes.CDLL(LIBRARY).standin_observe(self.observer)

    def see(self, action, address, size, device):
        """Note an event, with its frames if it is recorded."""
        frames = []
        # A thread of autograd has no other frame than this one.
        frame = sys._getframe().f_back if self.records and action == b"alloc" else None
        while frame is not None:
            code = frame.f_code
            place = {"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name}
            frames.append(place)
            frame = frame.f_back
        rounded = -(-size // 512) * 512
        if action == b"alloc":
            self.live[address] = device, rounded, size, frames
            actions = ("segment_alloc", rounded), ("alloc", size)
        elif self.live.pop(address, None) is not None:
            sizes = dict.fromkeys(("free_requested", "free_completed"), size)
            actions = *sizes.items(), ("segment_free", rounded)
        else:  # allocated before the first look
            return
        if self.records:
            now = time.time_ns() // 1000
            event = {"addr": address, "stream": 0, "time_us": now, "frames": frames}
            self.traces[device] += [{**event, "action": what, "size": n} for what, n in actions]

    def record(self, enabled="all", context="all", stacks="all", max_entries=sys.maxsize):
        """As torch.xpu.memory._record_memory_history."""
        self.records = enabled is not None
        self.traces = [[] for _ in range(2)]

    def snapshot(self):
        """As torch.xpu.memory._snapshot."""
        segments = []
        for address, (device, size, requested, frames) in self.live.items():
            place = {"address": address, "frames": frames}
            block = {**place, "size": size, "requested_size": requested}
            sizes = dict.fromkeys(("total_size", "allocated_size", "active_size"), size)
            blocks = [{**block, "state": "active_allocated"}]
            segments.append({**place, **sizes, "device": device, "stream": 0, "blocks": blocks})
        return {"segments": segments, "device_traces": [[*trace] for trace in self.traces]}


if "STANDIN_HISTORY" in os.environ:
    HISTORY = History()
    memory = SimpleNamespace(_record_memory_history=HISTORY.record, _snapshot=HISTORY.snapshot)

torch._register_device_module("standin", sys.modules[__name__])
torch.utils.generate_methods_for_privateuse1_backend()


def autoload():
    """Do nothing: the import has done it all."""
