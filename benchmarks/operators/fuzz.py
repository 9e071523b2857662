"""Whether PyTorch's operators end the process on the virtual GPU, given extreme arguments.

    python -m benchmarks.operators.fuzz [--card T4] [--samples 4] [--only NAME ...]

The operators of sweep.py run with their samples, in which every tensor is changed in the same way:
empty in one dimension or in all, with 2^31 elements and more, strided, expanded, of another type,
complex, a scalar, with twenty dimensions. PyTorch's wrong arguments (``error_inputs``) are used,
too. An operator may raise any error. Each operator runs in a fork of a process that has torch; if a
signal ends the fork, its last sample is named. An operator that takes too long is named, but is no
fault: a GPU would also take long for 2^31 tensors.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from benchmarks.harness import forked, line, publish
from benchmarks.operators.sweep import backwards, database, name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

CALL_S = 6
"""seconds after which a call is too long"""
OPERATOR_S = 60
"""CPU seconds after which an operator takes too long"""
TOO_LONG = ("SIGALRM", "SIGXCPU", "SIGKILL")
TYPES = ("float32", "bfloat16", "complex64", "int64")
OTHER_TYPES = (
    *("complex64", "complex32", "half", "float64", "int8", "bool", "float8_e4m3fn"),
    *("uint16", "uint32", "int64"),
)
PYTORCHS = dict.fromkeys(
    ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"),
    "PyTorch divides by the number of channels, on the host: a real GPU's process ends too",
)
"""operators that end the process because of a fault in PyTorch"""


def map_tensors(change: Callable[[Any], Any], value: Any) -> Any:  # noqa: ANN401 - a sample's part
    """Return a sample's part with every tensor in it changed."""
    import torch

    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        parts = [map_tensors(change, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {key: map_tensors(change, part) for key, part in value.items()}
    return value


def where_possible(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a change that returns a tensor unchanged if it cannot be applied."""
    import torch

    def changed(tensor: Any) -> Any:  # noqa: ANN401
        if tensor.layout != torch.strided or not tensor.is_cuda:
            return tensor
        try:
            result = change(tensor.detach())
        except (RuntimeError, IndexError, ValueError, TypeError):
            return tensor
        differentiable = result.is_floating_point() or result.is_complex()
        return result.requires_grad_() if tensor.requires_grad and differentiable else result

    return changed


def changes(sample: Any) -> Iterator[tuple[str, Callable[[Any], Any]]]:  # noqa: ANN401
    """Yield the changes to try with a sample, each with its name."""
    import torch

    tensors: list[Any] = []
    map_tensors(tensors.append, sample.input)
    yield "as it is", lambda tensor: tensor
    if not tensors or tensors[0].layout != torch.strided:
        return
    for size in sorted(set(tensors[0].shape)):
        yield (
            f"no element where {size} were",
            lambda t, size=size: t.narrow(list(t.shape).index(size), 0, 0),
        )
    huge = 1 << 31
    yield "empty", lambda t: t.new_empty([0] * t.ndim)
    yield "empty batch", lambda t: t.new_empty((0,) + (100_000,) * (t.ndim - 1))
    yield "strided", lambda t: t.repeat_interleave(2, -1)[..., ::2]
    yield "expanded", lambda t: t[:1].expand(t.shape)
    yield "transposed", lambda t: t.transpose(0, -1)
    yield "scalar", lambda t: t.new_empty(())
    yield "channels last", lambda t: t.contiguous(memory_format=torch.channels_last)
    yield "twenty dimensions", lambda t: t.reshape((1,) * 20 + tuple(t.shape))
    yield "one element", lambda t: t.new_empty((1,) * t.ndim)
    yield "wide", lambda t: t.new_empty((1,) * (t.ndim - 1) + (70_000,))
    yield "tall", lambda t: t.new_empty((70_000,) + (1,) * (t.ndim - 1))
    yield "many channels", lambda t: t.new_empty((1, 70_000) + (3,) * (t.ndim - 2))
    yield "huge first", lambda t: t.new_empty((huge, *t.shape[1:]))
    yield "huge last", lambda t: t.new_empty((*t.shape[:-1], huge))
    yield "beyond memory", lambda t: t.new_empty((1,) * t.ndim).expand(1 << 40, *t.shape[1:])
    for name in OTHER_TYPES:
        yield name, lambda t, name=name: t.to(getattr(torch, name))


def call(operator: Any, sample: Any, change: Callable[[Any], Any], *, back: bool) -> None:  # noqa: ANN401
    """Call an operator with a changed sample, forwards and backwards; it may raise."""
    signal.alarm(CALL_S)
    try:
        change = where_possible(change)
        arguments = map_tensors(change, (sample.input, tuple(sample.args), sample.kwargs))
        result = operator(arguments[0], *arguments[1], **arguments[2])
        if back:
            backwards(result)
    except Exception:  # noqa: BLE001, S110 - whatever it raises, it does not end the process
        pass
    finally:
        signal.alarm(0)


def fuzz(operator: Any, most: int) -> Iterator[str]:  # noqa: ANN401
    """Call an operator with all changed samples, in a fork; before each, yield its name."""
    import torch

    with open(os.devnull, "w") as silent:  # noqa: PTH123 - a device
        os.dup2(silent.fileno(), 1)
        os.dup2(silent.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_CPU, (OPERATOR_S, OPERATOR_S + 5))
    # A fork replaces PyTorch's thread pool at its first use. If two of autograd's threads use it
    # first at the same time, the process may end ("Invalid thread pool!"): use it here.
    torch.set_num_threads(1)
    for number, error in enumerate(tolerant(lambda: operator.error_inputs("cuda"))):
        yield f"wrong arguments {number}"
        call(operator, error.sample_input, lambda tensor: tensor, back=False)
    for kind in (getattr(torch, name) for name in TYPES):
        if kind not in operator.supported_dtypes("cuda"):
            continue
        back = operator.supports_autograd and kind in operator.supported_backward_dtypes("cuda")
        samples = tolerant(
            lambda kind=kind, back=back: operator.sample_inputs("cuda", kind, requires_grad=back)
        )
        for number, sample in zip(range(most), samples, strict=False):
            for name, change in changes(sample):
                yield f"{str(kind)[6:]}, sample {number}, {name}"
                call(operator, sample, change, back=back)


def tolerant(samples: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """Yield samples, up to the first one that cannot be made."""
    try:
        yield from samples()
    except Exception:  # noqa: BLE001 - values that are read back are zeros, on which some samples depend
        return


def ended(operator: Any, most: int) -> tuple[str, str]:  # noqa: ANN401
    """Fuzz an operator in a fork; return the signal that ended it, or "", and the last sample."""
    last = ""
    for record in forked(fuzz, operator, most):
        if isinstance(record, dict):
            return record["ended"] if record["ended"].startswith("SIG") else "", last
        last = record
    return "", last


def report(card: str, results: dict[str, tuple[str, str]], seconds: float) -> str:
    """Return the result as text."""
    fatal = {name: it for name, it in results.items() if it[0] and it[0] not in TOO_LONG}
    rows = [
        ["raise, or run", sum(not end for end, _ in results.values())],
        ["take too long", sum(end in TOO_LONG for end, _ in results.values())],
        ["end the process by PyTorch's own fault", sum(name in PYTORCHS for name in fatal)],
        ["end the process", sum(name not in PYTORCHS for name in fatal)],
        ["operators", len(results)],
    ]
    text = [
        f"PyTorch's operators on the virtual GPU ({card}), given extreme arguments",
        line(),
        "",
        tabulate(rows, ["outcome", "operators"]),
        "",
        f"in {seconds:.0f} s",
    ]
    for name, (end, last) in sorted(results.items()):
        if end:
            reason = f": {PYTORCHS[name]}" if name in PYTORCHS and name in fatal else ""
            text.append(f"    {name}: {end} at {last}{reason}")
    return "\n".join(text)


def main(arguments: Iterable[str] | None = None) -> int:
    """Fuzz; return 1 if an operator ends the process, except by a fault in PyTorch."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--card", default="H100")
    parser.add_argument("--samples", type=int, default=4, help="most samples of an operator's type")
    parser.add_argument("--only", nargs="+", default=[], help="these operators")
    options = parser.parse_args(arguments)
    import pytest_gpumem

    pytest_gpumem.use_virtual_gpu(options.card, values="off")
    import torch

    warnings.simplefilter("ignore")
    torch.empty(1, device="cuda")
    torch.cuda._is_in_bad_fork = lambda: False  # the virtual GPU works in a fork
    started = time.monotonic()
    operators = {name_of(operator): operator for operator in database()}
    chosen = options.only or operators
    results = {name: ended(operators[name], options.samples) for name in chosen}
    text = report(options.card, results, time.monotonic() - started)
    if options.only:
        print(text)
    else:
        publish("op_fuzz", text)
    fatal = {name for name, (end, _) in results.items() if end and end not in TOO_LONG}
    return int(bool(fatal - set(PYTORCHS)))


if __name__ == "__main__":
    sys.exit(main())
