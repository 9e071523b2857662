"""Turns off ``torch.compile(mode="max-autotune")``, which selects kernels by timing.

The disk cache of such choices is off too, because nothing is timed here. So a later process also
requests the time of each kernel that a GPU would time (kernel_timing.py).
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.errors import DeviceError
from pytest_gpumem.patches import Patch, wrapped_by

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

COMPILATION: Final = Patch(
    "torch._inductor.compile_fx",
    "compile_fx",  # Inductor compiles each graph with it
    reason="max-autotune, which picks kernels by their time, is switched off",
)
SETTINGS: Final = "config_patches"
"""argument of ``compile_fx`` with the mode's settings"""
TUNING: Final = (
    *("max_autotune", "max_autotune_gemm"),
    *("max_autotune_pointwise", "coordinate_descent_tuning"),
)
"""Inductor's settings with which it compiles many kernels for an operator and selects the
fastest"""
CHOICES_KEPT: Final = "autotune_local_cache"
"""setting that caches the fastest configuration of each kernel on disk"""
LESSER: Final = ("triton.autotune_pointwise", "dynamic_scale_rblock")
"""settings that may give a kernel a second configuration in any mode"""
LEFT_OUT: Final = (
    "torch.compile's max-autotune chooses kernels by their time on a GPU: the virtual GPU switches "
    "it off, so memory that only the faster kernels need is not predicted"
)
MISSING: Final = (
    "torch.compile's max-autotune could not be switched off with this torch: its kernels, and "
    "their memory, may differ from run to run"
)


class MaxAutotuneSwitch:
    """Turns off max-autotune while the virtual GPU, the process's only GPU, is visible."""

    def __init__(self) -> None:
        self._turned_off = False
        self._is_missing = False

    def begin(self) -> None:
        """Reset what the last run recorded."""
        self._turned_off = False

    def notes(self) -> list[str]:
        """Return sentences on compilations that a reader of the figures needs."""
        return [LEFT_OUT] * self._turned_off + [MISSING] * self._is_missing

    def install(self, module: ModuleType) -> None:
        """Wrap the compiling function; ``module`` is the module of COMPILATION."""
        config = getattr(module, "config", None)
        self._is_missing = not hasattr(config, TUNING[0]) or not COMPILATION.wrap(
            module, wrapped_by(functools.partial(self._compile, config))
        )

    def _compile(
        self, config: Any, compile_graph: Callable[..., Any], *arguments: Any, **options: Any
    ) -> Any:
        import torch

        call = inspect.signature(compile_graph).bind(*arguments, **options)
        if compiles_for_gpu(arguments[1] if len(arguments) > 1 else ()):
            refuse_without_triton()
        patches = call.arguments.get(SETTINGS) or {}

        def is_on(name: str) -> bool:
            return bool(patches.get(name, getattr(config, name, False)))

        # While the virtual GPU is hidden, no GPU is available, and code is compiled for the CPU.
        if torch.cuda.is_available():
            off = [CHOICES_KEPT] * is_on(CHOICES_KEPT)
            if any(map(is_on, TUNING)):
                self._turned_off = True
                off += [name for name in TUNING + LESSER if has(config, name)]
            # Inductor's cache keys include these settings, and the backward is compiled with them.
            if off:  # compile_fx calls itself again with them
                call.arguments[SETTINGS] = {**patches, **dict.fromkeys(off, False)}
        return compile_graph(*call.args, **call.kwargs)


def compiles_for_gpu(example_inputs: object) -> bool:
    """Return whether Inductor compiles a graph for a GPU, judging by its example inputs."""
    inputs = example_inputs if isinstance(example_inputs, list | tuple) else ()
    return any(getattr(getattr(tensor, "device", None), "type", "") == "cuda" for tensor in inputs)


def refuse_without_triton() -> None:
    """Raise if Triton is missing: compiling for a GPU without it would crash Inductor's workers."""
    if importlib.util.find_spec("triton") is None:
        raise DeviceError(
            "torch.compile",
            "Inductor compiles kernels for a GPU with Triton, which is not installed",
            "pip install --no-deps triton, in the version that torch requires "
            "(gpumem light --triton prints it)",
        )


def has(config: object, name: str) -> bool:
    """Return whether this torch has a setting, also a nested one ("triton.autotune_pointwise")."""
    group, _, setting = name.rpartition(".")
    return hasattr(getattr(config, group, None) if group else config, setting)
