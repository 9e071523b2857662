"""Which of PyTorch's operators run on the virtual GPU, forwards and backwards.

    python benchmarks/op_sweep.py [--samples 6] [--types float32,int64] [--only NAME ...]

Takes the operators and the sample arguments of PyTorch's own tests (``op_db`` of
torch.testing._internal.common_methods_invocations), runs each on the virtual GPU in some of its
types, and then backwards. They run in processes of their own, chunk by chunk: one that crashes
or hangs is named and the rest goes on. What fails on the virtual GPU and not on the CPU is listed,
with its reason.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import subprocess
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from provenance import line, publish
from tabulate import tabulate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

START_S = 600.0
"""seconds that a process may take to its first operator"""
SLOWEST_S = 60.0
"""seconds after which an operator counts as hanging"""
CHUNK = 60
"""operators a process"""
KINDS = ("float32", "bfloat16", "complex64", "int64", "bool")

# -- in a process of its own: runs the operators that it is told --


def database() -> list[Any]:
    """Return PyTorch's list of operators with their sample arguments."""
    try:
        import expecttest  # noqa: F401 - PyTorch's test utilities want it
    except ImportError:
        import types
        import unittest

        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def name_of(op: Any) -> str:  # noqa: ANN401 - an OpInfo
    """Return an operator's name with its variant's."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def tensors(found: Any) -> Iterator[Any]:  # noqa: ANN401 - whatever an operator returns
    """Walk the tensors in a result."""
    import torch

    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, (tuple, list)):
        for each in found:
            yield from tensors(each)


def backwards(found: Any) -> None:  # noqa: ANN401
    """Differentiate the sum of a result's magnitudes."""
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
    """Return the types that an operator is tried in: the wanted ones, else one that it has.

    None: it is not for GPUs.
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
    """Run an operator in every type; return what became of it, and the first failure's reason."""
    before = library.unsupported()
    total, reason, cpu, read = 0, "", "", False
    for kind in kinds_of(op, kinds):
        readbacks = library.counters().readbacks
        ran, failure = attempt(op, kind, "cuda", most)
        total += ran
        if failure and not reason:
            read = library.counters().readbacks > readbacks
            cpu = attempt(op, kind, "cpu", most)[1]
            reason = f"{str(kind)[6:]}: {failure}"
    missing = [it for it, calls in library.unsupported().items() if calls > before.get(it, 0)]
    return {"ran": total, "reason": reason, "cpu": cpu, "read": read, "missing": missing}


def serve(names: list[str], kinds: list[str], most: int) -> None:
    """Run operators on the virtual GPU; one JSON object a line, before and after each.

    With no names: say which ones there are.
    """
    import warnings

    import pytest_gpumem

    pytest_gpumem.use_virtual_gpu("H100", devices=2, values="off")
    from pytest_gpumem.devices.virtual.device import VirtualDevice

    warnings.simplefilter("ignore")
    device = VirtualDevice.loaded()
    assert device is not None
    known = {name_of(op): op for op in database()}
    if not names:
        print(json.dumps({"names": sorted(known)}), flush=True)
    for name in names:
        print(json.dumps({"begun": name}), flush=True)
        outcome = tried(known[name], kinds, most, device.library)
        print(json.dumps({"done": name, **outcome}), flush=True)


# -- the sweep --


def told(names: list[str], kinds: list[str], most: int) -> Iterator[dict[str, Any]]:
    """Run operators in a process; yield what it says, and at last how it ended."""
    options = ["--samples", str(most), "--types", ",".join(kinds)]
    command = [sys.executable, __file__, "--serve", *options, *names]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        assert process.stdout is not None
        selector = selectors.DefaultSelector()
        selector.register(process.stdout, selectors.EVENT_READ)
        rest, limit = b"", START_S
        while selector.select(limit):
            limit = SLOWEST_S
            read = os.read(process.stdout.fileno(), 1 << 16)
            if not read:
                break
            *lines, rest = (rest + read).split(b"\n")
            yield from (json.loads(it) for it in lines if it.startswith(b"{"))
        else:
            process.kill()
            yield {"ended": f"hangs (more than {limit:.0f} s)"}
            return
        status = process.wait()
    if status:
        yield {"ended": f"crashes (signal {-status})" if status < 0 else f"exit status {status}"}


def swept(names: list[str], kinds: list[str], most: int) -> dict[str, dict[str, Any]]:
    """Run all operators; return what became of each."""
    found: dict[str, dict[str, Any]] = {}
    while left := [name for name in names if name not in found]:
        current = ""
        for message in told(left[:CHUNK], kinds, most):
            if "begun" in message:
                current = message["begun"]
            elif "done" in message:
                found[message["done"]] = message
            else:  # it ended before its time
                found[current or left[0]] = {"ran": 0, "crash": message["ended"]}
    return found


def verdict(it: dict[str, Any]) -> str:
    """Sort an operator's outcome."""
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
"""those that are listed with their reasons"""


def report(found: dict[str, dict[str, Any]], kinds: list[str], most: int, seconds: float) -> str:
    """Return the sweep's result as text."""
    verdicts = {name: verdict(it) for name, it in found.items()}
    counts = Counter(verdicts.values())
    rows = [[what, counts[what]] for what in sorted(counts, key=counts.__getitem__, reverse=True)]
    samples = sum(it["ran"] for it in found.values())
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
    """Sweep; return 1 where an operator crashes or calls what is not supported."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=6, help="most samples of an operator")
    parser.add_argument("--types", default=",".join(KINDS), help="of the samples")
    parser.add_argument("--every", type=int, default=1, help="one operator of so many")
    parser.add_argument("--only", nargs="+", default=[], help="these operators")
    parser.add_argument("--name", default="op_sweep", help="of the result's file")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    kinds = args.types.split(",")
    if args.serve:
        serve(args.names, kinds, args.samples)
        return 0
    started = time.monotonic()
    [listed] = told([], kinds, args.samples)
    found = swept(args.only or listed["names"][:: args.every], kinds, args.samples)
    text = report(found, kinds, args.samples, time.monotonic() - started)
    if args.only or args.every > 1:
        print(text)
    else:
        publish(args.name, text)
    return any(verdict(it) in {"crashes or hangs", "unsupported"} for it in found.values())


if __name__ == "__main__":
    sys.exit(main())
