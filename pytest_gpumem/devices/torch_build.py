"""Finds the installed torch by reading its files, because only marked tests may import it."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TorchBuild:
    """An installed torch."""

    version: str
    """such as "2.15.0+cu132"; "unknown" if it cannot be read"""
    cuda: str | None
    """CUDA version that it was built for, such as "13.2"; None for a build without CUDA"""
    hip: str | None = None
    """version of HIP (AMD's ROCm) that it was built for; None for any other build"""
    xpu: str | None = None
    """version of Intel's compiler that it was built with; None for any other build"""


def torch_folder() -> Path | None:
    """Return the folder of the torch that ``import torch`` would load; None without one."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        spec = None
    folders = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(folders))) if folders else None


def installed_torch() -> TorchBuild | None:
    """Return the torch that ``import torch`` would load; None without one.

    Its ``torch/version.py`` is read as text; torch is not imported.
    """
    folder = torch_folder()
    if folder is None:
        return None
    try:
        source = (folder / "version.py").read_text(encoding="utf-8")
    except OSError:
        return TorchBuild("unknown", None)
    names = "__version__", "cuda", "hip", "xpu"
    version, cuda, hip, xpu = (_assigned(source, name) for name in names)
    return TorchBuild(version or "unknown", cuda, hip, xpu)


def _assigned(source: str, name: str) -> str | None:
    """Return the string that Python source assigns to a name (``cuda: str = '13.2'``), or None."""
    match = re.search(rf"^{name}\s*(?::[^=]+)?=\s*['\"]([^'\"]+)['\"]", source, re.MULTILINE)
    return match.group(1) if match else None


def torch_is_imported() -> bool:
    """Return whether torch has been imported in this process, or is being imported."""
    return "torch" in sys.modules
