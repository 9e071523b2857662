"""Which of PyTorch's operators have the CPU's results on the virtual GPU that computes values.

    python -m benchmarks.operators.results [--values auto] [--types int64] [--only NAME]

The operators of sweep.py run with their samples on the CPU and, with everything computed, on the
virtual GPU, forwards and backwards. Results and gradients are compared: sizes, types, and values
within a tolerance. Operators run in forks: one that crashes is named, and the next ones run.

With ``--values auto`` each operator runs as in a test with that option, the default. The sizes of
its results are compared with the CPU's, and its peak with the peak with everything computed
(sizes.py).
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from benchmarks.harness import line, publish
from benchmarks.operators.cases import entries
from benchmarks.operators.sizes import SLOWEST_S as SIZES_SLOWEST_S
from benchmarks.operators.sizes import (
    VERDICTS,
    form_of,
    forms_of,
    results_of,
    shapes,
    sizes_comparer,
    summary,
)
from benchmarks.operators.sweep import parser, swept, tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from benchmarks.operators.cases import Case
    from pytest_gpumem.devices.virtual.values.mode import ValueMode

SLOWEST_S = 60
"""seconds after which an operator counts as hanging"""
TOLERANCES = {"float32": 1e-3, "complex64": 1e-3, "bfloat16": 3e-2, "float16": 1e-2}
OWN = "refused, or of another type, as on a GPU"
UNDEFINED = ("empty", "new_empty")
"""operators whose results have undefined values"""


def outcome(case: Case, device: str) -> list[Any]:
    """Run a call on a device; return its results and gradients, on the host."""
    import torch

    result, gradients = results_of(case, device, lambda: None)
    results = list(tensors(result)) if not isinstance(result, (bool, int, float)) else [result]
    hosts = (
        part.detach().cpu() if isinstance(part, torch.Tensor) else part
        for part in (*results, *gradients)
    )
    return [
        part.values() if isinstance(part, torch.Tensor) and part.is_nested else part
        for part in hosts
    ]


def difference(name: str, case: Case, results: list[Any], expected: list[Any]) -> str:
    """Return a line on how an operator's results differ from the CPU's; "" if they do not."""
    import torch

    if len(results) != len(expected):
        return f"{len(results)} results instead of {len(expected)}"
    tolerance = TOLERANCES.get(case.label.split()[0], 0.0)
    base = name.removeprefix("nested ")
    is_random = base in RANDOM or any(base.startswith(f"{random}.") for random in RANDOM)
    for place, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            result = result.to(wanted.dtype)  # noqa: PLW2901 - PyTorch's CUDA code chose its type
        if base.startswith(UNDEFINED) or is_random:
            if isinstance(wanted, torch.Tensor) and result.shape != wanted.shape:
                return f"result {place}: sizes {tuple(result.shape)} not {tuple(wanted.shape)}"
            continue
        try:
            torch.testing.assert_close(
                result, wanted, rtol=tolerance, atol=tolerance, equal_nan=True
            )
        except AssertionError as error:
            return f"result {place}: " + " ".join(str(error).split())[:110]
    return ""


def own_form(results: list[Any], expected: list[Any]) -> str:
    """Return a line on types or sizes that differ from the CPU's; "" if none do."""
    import torch

    for place, (result, wanted) in enumerate(zip(results, expected, strict=False)):
        if isinstance(result, torch.Tensor):
            forms = [(str(part.dtype), [*part.shape]) for part in (result, wanted)]
            if forms[0] != forms[1]:
                return f"result {place}: {forms[0]} not {forms[1]}"
    return ""


def is_as_exact(case: Case, results: list[Any], expected: list[Any]) -> bool:
    """Return whether 16-bit results are about as close to 32-bit results as the CPU's are.

    If summands are large, the last bit of a result may exceed the tolerance.
    """
    import torch

    def widened(part: Any) -> Any:  # noqa: ANN401 - a sample's
        if isinstance(part, torch.Tensor):
            return part.float() if part.dtype in {torch.bfloat16, torch.float16} else part
        if isinstance(part, (list, tuple)):
            return type(part)(widened(item) for item in part)
        return part

    sample = case.sample
    wide = type(sample)(
        widened(sample.input),
        args=tuple(map(widened, sample.args)),
        kwargs={key: widened(part) for key, part in sample.kwargs.items()},
    )
    exact = outcome(case._replace(sample=wide), "cpu")
    errors = (
        [
            (part.float() - true.float()).abs().max().item()
            for part, true in zip(parts, exact, strict=True)
        ]
        for parts in (results, expected)
    )
    return all(here <= 2 * on_cpu for here, on_cpu in zip(*errors, strict=True))


RANDOM = {
    *("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal"),
    *("rand_like", "randn", "randn_like", "randint", "randint_like", "uniform", "randperm"),
    *("nn.functional.dropout", "nn.functional.dropout2d", "nn.functional.dropout3d", "rand"),
    *("nn.functional.alpha_dropout", "nn.functional.feature_alpha_dropout", "poisson"),
    *("nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d"),
    *("nn.functional.multi_head_attention_forward", "nn.functional.rrelu", "pca_lowrank"),
    *("svd_lowrank", "bernoulli_", "native_dropout", "torch.Generator"),
}
"""operators with random results, which differ between a CPU and a GPU"""


def attempt(name: str, case: Case, mode: ValueMode, record: dict[str, Any]) -> None:
    """Compare a call of an operator; record it if it is the first that differs ("reason").

    The record also has the first call that PyTorch's CUDA code refuses, or whose result it gives
    another type ("own"), and the first that fails on the CPU ("cpu").
    """
    kind = case.label
    try:
        expected = outcome(case, "cpu")
    except Exception as error:  # noqa: BLE001
        record["cpu"] = record["cpu"] or f"{kind}: {summary(error)}"
        return
    try:
        with mode:
            results = outcome(case, "cuda")
    except Exception as error:  # noqa: BLE001
        place = "own" if alone(case)[1] == summary(error) else "reason"
        record[place] = record[place] or f"{kind}: {summary(error)}"
        return
    record["compared"] += 1
    own = own_form(results, expected)
    if own and alone(case)[0] == shapes([form_of(result) for result in results]):
        expected = [
            wanted if result.shape == wanted.shape else result
            for result, wanted in zip(results, expected, strict=True)
        ]
    else:
        own = ""
    problem = difference(name, case, results, expected)
    if problem and kind.startswith("bfloat16") and is_as_exact(case, results, expected):
        problem = ""
    record["own"] = record["own"] or (own and f"{kind}: {own}")
    record["reason"] = record["reason"] or (problem and f"{kind}: {problem}")


def alone(case: Case) -> tuple[Any, str]:
    """Return the sizes or the error without computed values; (None, "") if values were read."""
    from pytest_gpumem.devices.virtual.device import VirtualDevice

    device = VirtualDevice.loaded()
    assert device is not None
    before, sizes, error = device.library.readbacks(), None, ""
    try:
        sizes = shapes(forms_of(case, "cuda", lambda: None))
    except Exception as failure:  # noqa: BLE001
        error = summary(failure)
    return (sizes, error) if device.library.readbacks() == before else (None, "")


def comparer(kinds: list[str], most: int) -> Callable[[str], dict[str, Any]]:
    """Return a function that compares an operator, given its name."""
    import pytest_gpumem

    pytest_gpumem.use_virtual_gpu("H100", devices=2, values="off")
    from pytest_gpumem.devices.virtual.device import VirtualDevice
    from pytest_gpumem.devices.virtual.values.mode import ValueMode

    warnings.simplefilter("ignore")
    device = VirtualDevice.loaded()
    assert device is not None
    known = entries()

    def compare(name: str) -> dict[str, Any]:
        record: dict[str, Any] = {"compared": 0, "reason": "", "own": "", "cpu": ""}
        mode = ValueMode(device.library, "full")
        for case in known[name](kinds, most):
            try:
                attempt(name, case, mode, record)
            except Exception as error:  # noqa: BLE001, PERF203 - results that cannot be compared
                record["reason"] = record["reason"] or f"{case.label}: {summary(error)}"
        return {**record, "failures": mode.host.unknown.failures}

    return compare


def verdict(record: dict[str, Any]) -> str:
    """Return the class of an operator's outcome."""
    if record.get("crash"):
        return "crashes or hangs"
    if record["reason"]:
        return "differs"
    if record["own"]:
        return OWN
    return "as on the CPU" if record["compared"] else "the CPU has none"


def report(records: dict[str, dict[str, Any]], kinds: list[str], most: int, seconds: float) -> str:
    """Return the sweep's result as text."""
    verdicts = {name: verdict(record) for name, record in records.items()}
    rows = Counter(verdicts.values()).most_common()
    samples = sum(record.get("compared", 0) for record in records.values())
    lines = [
        "PyTorch's operators on the virtual GPU (H100) with everything computed, and on the CPU",
        f"up to {most} samples of each in {', '.join(kinds)}; gradients too, in place, with out=,",
        "sparse, nested, lists, torchvision's",
        line(),
        "",
        tabulate([*rows, ["operators", len(records)]], ["results", "operators"]),
        "",
        f"{samples} calls were compared, in {seconds:.0f} s",
    ]
    for kind in ("crashes or hangs", "differs", OWN, "the CPU has none"):
        names = sorted(name for name, kind_of in verdicts.items() if kind_of == kind)
        if names:
            lines += ["", f"{kind}:", *(f"    {name}: {why(records[name])}" for name in names)]
    failures: dict[str, str] = {}
    for record in records.values():
        failures.update(record.get("failures", {}))
    if failures:
        lines += ["", "operators that the host could not compute:"]
        lines += [f"    {name}: {reason[:150]}" for name, reason in sorted(failures.items())]
    return "\n".join(lines)


def why(record: dict[str, Any]) -> str:
    """Return why an operator's results differ from the CPU's, or were not compared."""
    return str(record.get("crash") or record["reason"] or record["own"] or record["cpu"])


def report_of_sizes(
    records: dict[str, dict[str, Any]], kinds: list[str], most: int, seconds: float
) -> str:
    """Return the result of ``--values auto`` as text."""
    worst: dict[str, list[str]] = {verdict: [] for verdict in VERDICTS}
    totals: Counter[str] = Counter()
    for name, record in sorted(records.items()):
        counts = {"crashes or hangs": 1} if "crash" in record else record["counts"]
        totals.update(counts)
        if counts:
            worst[min(counts, key=VERDICTS.index)].append(name)
    rows = [[verdict, totals[verdict], len(worst[verdict])] for verdict in VERDICTS]
    total = ["", sum(totals.values()), sum(map(len, worst.values()))]
    lines = [
        "Sizes of operators on the virtual GPU (H100) under --gpumem-values=auto, the default",
        f"up to {most} samples of each in {', '.join(kinds)}; in place, with out=, sparse, nested,",
        "lists, torchvision's, and gradients: types, shapes, strides, storage as on the CPU,",
        "peaks as with everything computed",
        line(),
        "",
        tabulate([*rows, total], ["calls", "number", "operators whose worst"]),
        "",
        f"in {seconds:.0f} s",
    ]
    for verdict in VERDICTS[:-2]:
        listed = [name for name, record in records.items() if verdict in record.get("examples", {})]
        listed += [name for name in worst[verdict] if "crash" in records[name]]
        if listed:
            lines += ["", f"{verdict}:"]
            lines += [
                f"    {name}: {example_of(records[name], verdict)}" for name in sorted(listed)
            ]
    return "\n".join(lines)


def example_of(record: dict[str, Any], verdict: str) -> str:
    """Return the number of an operator's calls with a verdict, and the first one."""
    if "crash" in record:
        return str(record["crash"])
    return f"{record['counts'][verdict]}, {record['examples'][verdict][:230]}"


def main(arguments: Iterable[str] | None = None) -> int:
    """Sweep; return 1 if an operator crashes."""
    options = parser(__doc__, 4)
    options.add_argument("--values", choices=("full", "auto"), default="full", help="computed")
    args = options.parse_args(arguments)
    kinds = args.types.split(",")
    from pytest_gpumem.devices.cards import CARDS
    from pytest_gpumem.devices.virtual.device import VirtualDevice

    VirtualDevice.load(CARDS["H100"])  # before torch; forks initialise it
    started = time.monotonic()
    sizes_alone = args.values == "auto"
    names = args.only or sorted(entries())[:: args.every]
    begin = partial(sizes_comparer if sizes_alone else comparer, kinds, args.samples)
    records = swept(begin, names, SIZES_SLOWEST_S if sizes_alone else SLOWEST_S)
    write = report_of_sizes if sizes_alone else report
    text = write(records, kinds, args.samples, time.monotonic() - started)
    name = "values_sweep_auto" if sizes_alone else "values_sweep"
    publish(name, text, keep=not args.only and args.every == 1)
    if sizes_alone:
        bad = {"crashes or hangs", "differs in silence"}
        return any("crash" in record or bad & {*record["counts"]} for record in records.values())
    return any(verdict(record) == "crashes or hangs" for record in records.values())


if __name__ == "__main__":
    sys.exit(main())
