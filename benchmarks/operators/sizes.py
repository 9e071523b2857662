"""The comparison of results.py --values auto: sizes of results, and peaks.

Each call runs as in a test, with values computed from its first operator on. Sizes of results and
gradients are compared with the CPU's, the peak with that of the same call with everything computed.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.operators.cases import entries
from benchmarks.operators.sweep import backwards, tensors
from pytest_gpumem.notes import NoteKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.operators.cases import Case
    from pytest_gpumem.devices.virtual.device import VirtualDevice

SLOWEST_S = 120
VERDICTS = (
    "differs in silence",
    "crashes or hangs",
    "fails, not as on a GPU",
    "differs with a note",
    "a GPU's own form",
    "a GPU's own error",
    "the same",
    "the CPU has none",
)
"""the worst first: an operator gets the worst verdict of its calls"""


class Outcome(NamedTuple):
    """One run of a call."""

    forms: list[Any] | None
    """forms of the results and gradients; None if the call failed"""
    peak: int
    """peak bytes in addition to the arguments"""
    error: str
    notes: tuple[str, ...]
    """notes on values"""
    readbacks: int
    """number of copies of unknown bytes to the host"""


def form_of(tensor: Any) -> Any:  # noqa: ANN401 - a tensor of any layout
    """Return a tensor's type, sizes, strides of dimensions above 1, and bytes of storage."""
    import torch

    if tensor.is_nested:
        parts = [tensor.values(), tensor.offsets()] if tensor.layout is torch.jagged else []
        return ("nested", str(tensor.dtype), tensor.dim(), [form_of(part) for part in parts])
    if tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
        return ("sparse", str(tensor.dtype), [*tensor.shape], [form_of(part) for part in parts])
    if tensor.layout is not torch.strided:
        rows = tensor.layout in {torch.sparse_csr, torch.sparse_bsr}
        parts = [tensor.crow_indices(), tensor.col_indices()] if rows else []
        parts += [] if rows else [tensor.ccol_indices(), tensor.row_indices()]
        forms = [form_of(part) for part in (*parts, tensor.values())]
        return (str(tensor.layout), str(tensor.dtype), [*tensor.shape], forms)
    strides = [
        stride if size > 1 and tensor.numel() else 0
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    nbytes = 0 if tensor._is_zerotensor() else tensor.untyped_storage().nbytes()
    return (str(tensor.dtype), [*tensor.shape], strides, nbytes)


def shapes(forms: Any) -> Any:  # noqa: ANN401 - of form_of
    """Return forms without strides and storage."""
    if isinstance(forms, tuple) and len(forms) == 4 and isinstance(forms[3], int):
        return forms[:2]
    return [*map(shapes, forms)] if isinstance(forms, (list, tuple)) else forms


def first_difference(forms: list[Any], expected: list[Any]) -> str:
    """Return the first difference of results from the CPU's; "" if there is none."""
    for form, wanted in zip(forms, expected, strict=False):
        if form != wanted:
            return f"{form} not {wanted}"
    return f"{len(forms)} results not {len(expected)}" if len(forms) != len(expected) else ""


def moved(value: Any, device: str, *, grad: bool) -> Any:  # noqa: ANN401 - a sample's part
    """Return a copy of a sample's part on a device; its tensors are leaves."""
    import torch

    if isinstance(value, torch.Tensor):
        there = value.detach().clone().to(device)
        real = there.is_floating_point() or there.is_complex()
        return there.requires_grad_() if grad and real else there
    if isinstance(value, (list, tuple)):
        parts = [moved(part, device, grad=grad) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {key: moved(part, device, grad=grad) for key, part in value.items()}
    return torch.device(device) if value in {torch.device("cpu"), "cpu"} else value


def results_of(case: Case, device: str, begin: Callable[[], None]) -> tuple[Any, list[Any]]:
    """Run a call on a device; return its result, and its arguments' gradients.

    Args:
        case: the call.
        device: "cpu" or "cuda".
        begin: called once the arguments are on the device.
    """
    import torch

    sample = case.sample
    given = (sample.input, tuple(sample.args), dict(sample.kwargs))
    arguments = moved(given, device, grad=case.grad)
    if not list(tensors(given[0])) and not list(tensors(given[1])):
        arguments[2]["device"] = device
    torch.manual_seed(0)
    begin()
    result = case.function(arguments[0], *arguments[1], **arguments[2])
    if case.grad:
        backwards(sample.output_process_fn_grad(result))
    leaves = [leaf for part in (arguments[0], arguments[1]) for leaf in tensors(part)]
    return result, [leaf.grad for leaf in leaves if leaf.is_leaf and leaf.grad is not None]


def forms_of(case: Case, device: str, begin: Callable[[], None]) -> list[Any]:
    """Run a call on a device; return the forms of its results and gradients."""
    result, gradients = results_of(case, device, begin)
    if not list(tensors(result)):
        return [type(result).__name__]
    return [form_of(part) for part in (*tensors(result), *gradients)]


class Sizes:
    """Runs calls on the virtual GPU for their sizes and peaks."""

    def __init__(self, device: VirtualDevice) -> None:
        import torch

        self._device = device
        self._ones = torch.ones(1 << 14, dtype=torch.uint8)

    def run(self, case: Case, scope: Any) -> Outcome:  # noqa: ANN401 - "off", "auto" or "full"
        """Run a call with computed values: "off", "auto" or "full"."""
        import torch

        from pytest_gpumem.devices.autograd_threads import await_autograd

        library, start, readbacks = self._device.library, [0], [0]

        def begin() -> None:
            await_autograd()
            torch.cuda.reset_peak_memory_stats()
            start[0] = torch.cuda.memory_allocated()
            readbacks[0] = library.readbacks()

        forms, error = None, ""
        self._device.values.compute(scope)
        try:
            forms = forms_of(case, "cuda", begin)
        except Exception as failure:  # noqa: BLE001 - the operator's own
            error = summary(failure)
        await_autograd()
        peak = torch.cuda.max_memory_allocated() - start[0]
        notes = [
            note.text for note in self._device.notes(Path.cwd()) if note.kind is NoteKind.VALUES
        ]
        read = library.readbacks() - readbacks[0]
        return Outcome(forms, peak, error, tuple(notes), read)

    def as_test(self, case: Case) -> Outcome:
        """Run a call as a test under ``--gpumem-values=auto`` does.

        Returns:
            the outcome; its readbacks are those of the same call without values.
        """
        readbacks = self.run(case, "off").readbacks
        self._leave_old_values()
        return self.run(case, "auto")._replace(readbacks=readbacks)

    def _leave_old_values(self) -> None:
        """Fill the memory that small tensors will use with known, irrelevant values."""
        import torch

        filled = [self._ones.to("cuda") for _ in range(128)]
        del filled
        torch.cuda.synchronize()

    def verdict(self, case: Case) -> tuple[str, str]:
        """Return a call's verdict, and how it differs from the CPU or from everything computed."""
        try:
            expected = forms_of(case, "cpu", lambda: None)
        except Exception as failure:  # noqa: BLE001 - the operator's own
            return "the CPU has none", summary(failure)
        for _ in range(3):  # a library's workspace is taken by its first call
            outcome, full = self.as_test(case), self.run(case, "full")
            if (outcome.forms, outcome.peak) == (expected, full.peak):
                return "the same", ""
        return judged(outcome, expected, full)


def judged(outcome: Outcome, expected: list[Any], full: Outcome) -> tuple[str, str]:
    """Return an outcome's verdict, and how it differs."""
    if outcome.forms is None:  # an error of PyTorch's CUDA code itself, if no value was read
        is_own = full.forms is None and not outcome.readbacks
        return "a GPU's own error" if is_own else "fails, not as on a GPU", outcome.error
    difference = first_difference(outcome.forms, expected)
    if (outcome.forms, outcome.peak) == (full.forms, full.peak) and (
        not outcome.readbacks or shapes(outcome.forms) == shapes(expected)
    ):
        # Strides and storage are decided by PyTorch's CUDA code, which depends on sizes only.
        return ("a GPU's own form" if difference else "the same"), difference
    if outcome.peak != full.peak:
        difference += f" peak {outcome.peak} not {full.peak}"
    return "differs with a note" if outcome.notes else "differs in silence", difference


def summary(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:110]}"


def sizes_comparer(kinds: list[str], most: int) -> Callable[[str], dict[str, Any]]:
    """Return a function that compares an operator's sizes, given its name."""
    import pytest_gpumem

    pytest_gpumem.use_virtual_gpu("H100", devices=2, values="off")
    import torch

    from pytest_gpumem.devices.virtual.device import VirtualDevice

    warnings.simplefilter("ignore")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    device = VirtualDevice.loaded()
    assert device is not None
    sizes, known = Sizes(device), entries()
    torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")  # cuBLAS's workspace

    def compare(name: str) -> dict[str, Any]:
        counts: dict[str, int] = {}
        examples: dict[str, str] = {}
        for case in known[name](kinds, most):
            verdict, difference = sizes.verdict(case)
            counts[verdict] = counts.get(verdict, 0) + 1
            examples.setdefault(verdict, f"{case.label}: {difference}")
        return {"counts": counts, "examples": examples}

    return compare
