"""Which of PyTorch's operators run on the virtual GPU, forwards and backwards.

    python -m benchmarks.operators.sweep [--samples 6] [--types float32,int64] [--only NAME ...]

The operators and sample arguments are those of PyTorch's own tests (``op_db`` of
torch.testing._internal.common_methods_invocations). Each operator runs on the virtual GPU in some
of its types, forwards and backwards. Operators run in forks of this process, chunk by chunk: one
that crashes or hangs is named, and the next ones run. Operators that fail on the virtual GPU and
not on the CPU are listed with the reason.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import warnings
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from benchmarks.harness import forked, line, publish

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

SLOWEST_S = 60
"""seconds after which an operator counts as hanging"""
CHUNK = 40
"""number of operators per process"""
KINDS = ("float32", "bfloat16", "complex64", "int64", "bool")

# -- in a fork: run operators --


def database() -> list[Any]:
    """Return PyTorch's list of operators with their sample arguments."""
    try:
        import expecttest  # noqa: F401 - PyTorch's test utilities import it
    except ImportError:
        import types
        import unittest

        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def name_of(op: Any) -> str:  # noqa: ANN401 - an OpInfo
    """Return an operator's name, followed by its variant's."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def tensors(found: Any) -> Iterator[Any]:  # noqa: ANN401 - whatever an operator returns
    """Yield the tensors in a result."""
    import torch

    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, (tuple, list)):
        for each in found:
            yield from tensors(each)


def backwards(found: Any) -> None:  # noqa: ANN401
    """Differentiate the sum of a result, or of magnitudes if it is complex."""
    import torch

    total: Any = None
    for each in tensors(found):
        if each.requires_grad and each.grad_fn is not None:
            dense = each.values() if each.is_nested else each
            dense = dense.to_dense() if dense.layout is not torch.strided else dense
            part = (dense.abs() if dense.is_complex() else dense).sum()
            total = part if total is None else total + part.to(total.dtype)
    if total is not None:
        total.backward()


def kinds_of(op: Any, wanted: Iterable[str]) -> list[Any]:  # noqa: ANN401
    """Return the types to try an operator with: the wanted ones, else one that it supports.

    [] if the operator does not support GPUs.
    """
    import torch

    known = op.supported_dtypes("cuda")
    found = [kind for kind in (getattr(torch, it) for it in wanted) if kind in known]
    return found or sorted(known, key=str)[:1]


def attempt(op: Any, kind: Any, device: str, most: int) -> tuple[int, str]:  # noqa: ANN401
    """Run an operator's samples in a type; return how many ran and a failure's reason, or ""."""
    import torch

    ran = 0
    try:
        differentiates = op.supports_autograd and kind in op.supported_backward_dtypes(device)
        samples = iter(op.sample_inputs(device, kind, requires_grad=differentiates))
        for _ in range(most):
            sample = next(samples, None)
            if sample is None:
                break
            found = op(sample.input, *sample.args, **sample.kwargs)
            if differentiates:
                backwards(sample.output_process_fn_grad(found))
            ran += 1
        if device == "cuda":
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - the step's own, recorded
        text = str(error).strip().splitlines() or [""]
        return ran, f"{type(error).__name__}: {text[0][:110]}"
    return ran, ""


def tried(op: Any, kinds: Iterable[str], most: int, library: Any) -> dict[str, Any]:  # noqa: ANN401
    """Run an operator in each type; return a record with the first failure's reason."""
    before = library.unsupported()
    total, reason, cpu, read = 0, "", "", False
    for kind in kinds_of(op, kinds):
        readbacks = library.readbacks()
        ran, failure = attempt(op, kind, "cuda", most)
        total += ran
        if failure and not reason:
            read = library.readbacks() > readbacks
            cpu = attempt(op, kind, "cpu", most)[1]
            reason = f"{str(kind)[6:]}: {failure}"
    missing = [it for it, calls in library.unsupported().items() if calls > before.get(it, 0)]
    return {"ran": total, "reason": reason, "cpu": cpu, "read": read, "missing": missing}


def attempts(kinds: list[str], most: int) -> Callable[[str], dict[str, Any]]:
    """Return a function that runs an operator, given its name, on this process's virtual GPU."""
    import pytest_gpumem

    pytest_gpumem.use_virtual_gpu("H100", devices=2, values="off")
    from pytest_gpumem.devices.virtual.device import VirtualDevice

    warnings.simplefilter("ignore")
    device = VirtualDevice.loaded()
    assert device is not None
    known = {name_of(op): op for op in database()}
    return lambda name: tried(known[name], kinds, most, device.library)


# -- the sweep --


def in_turn(
    begin: Callable[[], Callable[[str], dict[str, Any]]], names: list[str], slowest_s: int
) -> Iterator[dict[str, Any]]:
    """Run operators; yield a record before and after each."""
    attempt = begin()
    for name in names:
        signal.alarm(slowest_s)  # the signal ends this process
        yield {"begun": name}
        yield {"done": name, **attempt(name)}
    signal.alarm(0)


def swept(
    begin: Callable[[], Callable[[str], dict[str, Any]]], names: list[str], slowest_s: int
) -> dict[str, dict[str, Any]]:
    """Run operators in forks of this process; return a record for each.

    Args:
        begin: called in each fork; returns a function that runs an operator, given its name.
        names: the operators' names.
        slowest_s: seconds after which an operator counts as hanging.
    """
    records: dict[str, dict[str, Any]] = {}
    while left := [name for name in names if name not in records]:
        current = left[0]
        for record in forked(in_turn, begin, left[:CHUNK], slowest_s):
            if "begun" in record:
                current = record["begun"]
            elif "done" in record:
                records[record["done"]] = record
            else:  # the fork crashed or hung
                records[current] = {"crash": record["ended"]}
    return records


def parser(description: str | None, samples: int) -> argparse.ArgumentParser:
    """Return a parser with the options of a sweep."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    options.add_argument("--samples", type=int, default=samples, help="most samples of an operator")
    options.add_argument("--types", default=",".join(KINDS), help="of the samples")
    options.add_argument("--every", type=int, default=1, help="one operator of so many")
    options.add_argument("--only", nargs="+", default=[], help="these operators")
    return options


def verdict(it: dict[str, Any]) -> str:
    """Return the class of an operator's outcome."""
    if it.get("crash"):
        return "crashes or hangs"
    if it["missing"]:
        return "unsupported"
    if not it["reason"]:
        return "runs" if it["ran"] else "no samples"
    if it["cpu"]:
        return "fails on the CPU as well"
    return "fails, having read values" if it["read"] else "fails, having read none"


OUTCOMES = (
    "crashes or hangs",
    "unsupported",
    "fails, having read values",
    "fails, having read none",
    "fails on the CPU as well",
)
"""classes whose operators are listed with their reasons"""


def report(found: dict[str, dict[str, Any]], kinds: list[str], most: int, seconds: float) -> str:
    """Return the sweep's result as text."""
    verdicts = {name: verdict(it) for name, it in found.items()}
    counts = Counter(verdicts.values())
    rows = [[what, counts[what]] for what in sorted(counts, key=counts.__getitem__, reverse=True)]
    samples = sum(it.get("ran", 0) for it in found.values())
    text = [
        "PyTorch's operators on the virtual GPU (H100), forwards and backwards",
        f"up to {most} samples of each in {', '.join(kinds)}, where it has them",
        line(),
        "",
        tabulate([*rows, ["operators", len(found)]], ["outcome", "operators"]),
        "",
        f"{samples} samples ran, in {seconds:.0f} s",
    ]
    for what in OUTCOMES:
        names = sorted(name for name, it in verdicts.items() if it == what)
        if names:
            text += ["", f"{what}:", *(f"    {name}: {why(found[name])}" for name in names)]
    return "\n".join(text)


def why(it: dict[str, Any]) -> str:
    """Return why an operator did not run."""
    return str(it.get("crash") or ", ".join(it["missing"]) or it["reason"])


def main(given: Iterable[str] | None = None) -> int:
    """Sweep; return 1 if an operator crashes or calls an unsupported function."""
    options = parser(__doc__, 6)
    options.add_argument("--name", default="op_sweep", help="of the result's file")
    args = options.parse_args(given)
    kinds = args.types.split(",")
    from pytest_gpumem.devices.cards import CARDS
    from pytest_gpumem.devices.virtual.device import VirtualDevice

    os.environ["OMP_NUM_THREADS"] = "1"
    VirtualDevice.load(CARDS["H100"])  # before torch; forks initialise it
    started = time.monotonic()
    names = args.only or sorted(map(name_of, database()))[:: args.every]
    records = swept(partial(attempts, kinds, args.samples), names, SLOWEST_S)
    text = report(records, kinds, args.samples, time.monotonic() - started)
    publish(args.name, text, keep=not args.only and args.every == 1)
    return any(verdict(it) in {"crashes or hangs", "unsupported"} for it in records.values())


if __name__ == "__main__":
    sys.exit(main())
