"""NVML's Python module, nvidia-ml-py, where it is installed."""

from __future__ import annotations

import importlib
import warnings
from typing import Any


def import_nvml() -> Any:  # noqa: ANN401 - a module without types
    """Return the module; None where it is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the deprecated package pynvml warns when imported
        try:
            return importlib.import_module("pynvml")
        except ImportError:
            return None
