"""The module of the stand-in accelerator (standin.cpp), as a package of a backend has it.

PyTorch imports it by an entry point where its folder is on the path, unless
TORCH_DEVICE_BACKEND_AUTOLOAD is 0.
"""

import sys
from pathlib import Path

import torch

torch.utils.rename_privateuse1_backend("standin")
torch.ops.load_library(Path(__file__).with_name("libstandin.so"))


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


torch._register_device_module("standin", sys.modules[__name__])
torch.utils.generate_methods_for_privateuse1_backend()


def autoload():
    """Do nothing: the import has done it all."""
