"""Whether operators in code of ``torch.compile`` have the CPU's results on the virtual GPU.

    python -m benchmarks.operators.compiled [--samples 1] [--every 2] [--only NAME ...] [--dry]

Takes PyTorch's own operators and sample arguments (sweep.py), of float32 or another type that an
operator has, compiles each with Inductor, and compares its results and gradients with those of the
same call on the CPU. All values are computed. A compilation takes a second or more: ``--every 2``
takes every second operator.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from benchmarks.harness import line, publish
from benchmarks.operators.cases import Case, entries
from benchmarks.operators.results import difference
from benchmarks.operators.sizes import moved, summary
from benchmarks.operators.sweep import backwards, database, name_of, swept, tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SLOWEST_S = 120
"""seconds after which an operator counts as hanging"""


def outcome(case: Case, device: str) -> tuple[list[Any], bool]:
    """Run a call, compiled on the GPU; return results and gradients, and whether all are known."""
    import torch

    from pytest_gpumem.devices.virtual.values.interception import Interception

    sample, operator = case.sample, getattr(case.function, "op", case.function)
    given = (sample.input, tuple(sample.args), dict(sample.kwargs))
    values, args, kwargs = moved(given, device, grad=case.grad)
    if not list(tensors(values)) and not list(tensors(args)):
        kwargs["device"] = device

    def call(values: Any, args: Any, kwargs: Any) -> Any:  # noqa: ANN401 - a sample's
        return operator(values, *args, **kwargs)

    torch.manual_seed(0)
    result = (torch.compile(call) if device == "cuda" else call)(values, args, kwargs)
    if case.grad:
        backwards(sample.output_process_fn_grad(result))
    leaves = [leaf for part in (values, args) for leaf in tensors(part) if leaf.is_leaf]
    parts = [*tensors(result), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    mode = Interception.mode
    known = all(mode is None or mode.values.is_known(part) for part in parts)  # type: ignore[attr-defined]
    return [part.detach().cpu() for part in parts], known


def comparer(most: int) -> Callable[[str], dict[str, Any]]:
    """Return what compares an operator by its name."""
    import pytest_gpumem

    pytest_gpumem.use_virtual_gpu("H100", values="full")
    import torch

    warnings.simplefilter("ignore")
    known = entries()

    def compare(name: str) -> dict[str, Any]:
        for case in known[name](["float32"], most):
            if " " in case.label:
                continue  # in place, with out=, sparse
            torch.compiler.reset()
            try:
                expected, _ = outcome(case, "cpu")
                results, is_known = outcome(case, "cuda")
            except Exception as error:  # noqa: BLE001 - recorded
                return {"verdict": "an error", "why": summary(error)}
            why = difference(name, case, results, expected)
            if not is_known or why:
                return {"verdict": "other results" if is_known else "unknown", "why": why}
        return {"verdict": "the CPU's results", "why": ""}

    return compare


def report(records: dict[str, dict[str, Any]], seconds: float) -> str:
    """Return the page of results."""
    verdicts = {
        name: record.get("verdict", "a crash or a time-out") for name, record in records.items()
    }
    counts = Counter(verdicts.values()).most_common()
    rows = [
        [name, verdict, records[name].get("why") or records[name].get("crash", "")]
        for name, verdict in sorted(verdicts.items())
        if verdict != "the CPU's results"
    ]
    return "\n".join(
        [
            f"{len(records)} operators in code of torch.compile, in {seconds:.0f} s",
            line(),
            "",
            *(f"{count:5} {verdict}" for verdict, count in counts),
            "",
            tabulate(rows, ["operator", "verdict", "why"], "plain"),
        ]
    )


def main(arguments: Iterable[str] | None = None) -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=1, help="the most of each operator")
    parser.add_argument("--every", type=int, default=1, help="each of so many operators is taken")
    parser.add_argument("--only", nargs="*", help="names of operators")
    parser.add_argument("--dry", action="store_true", help="record nothing")
    options = parser.parse_args(arguments if arguments is None else list(arguments))
    from pytest_gpumem.devices.cards import CARDS
    from pytest_gpumem.devices.virtual.device import VirtualDevice

    VirtualDevice.load(CARDS["H100"])  # before torch; forks initialise it
    names = options.only or [name_of(op) for op in database()][:: options.every]
    start = time.monotonic()
    records = swept(lambda: comparer(options.samples), names, SLOWEST_S)
    text = report(records, time.monotonic() - start)
    is_whole = not options.only and options.every == 1
    publish("operators_compiled", text, keep=is_whole and not options.dry)


if __name__ == "__main__":
    main()
