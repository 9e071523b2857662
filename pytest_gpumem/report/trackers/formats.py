"""The figures of a session as github-action-benchmark and Bencher read them.

Each measured test, and part of one, has its peak allocated and its peak reserved. A step that ran
out of memory has no peak, and is left out.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pytest_gpumem.judge.breakdown_diff import provenance_text
from pytest_gpumem.judge.verdict import PEAKS
from pytest_gpumem.sizes import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pytest_gpumem.judge.result import Result


class _Figure(NamedTuple):
    name: str
    """the test, its part and its device"""
    peak: str
    """ "allocated", "reserved" or "pinned" """
    nbytes: int
    result: Result


def _tracked_figures(results: Iterable[Result]) -> Iterator[_Figure]:
    for result in results:
        measurement = result.measurement
        if measurement is None or measurement.out_of_memory is not None:
            continue
        for index, peak in enumerate(measurement.peaks):
            device = f", device {index}" if len(measurement.peaks) > 1 else ""
            name = f"{result.name} on {result.device_key}{device}"
            for kind in (*PEAKS, *["pinned"] * bool(peak.pinned)):
                yield _Figure(name, kind, getattr(peak, kind), result)


def benchmark_action(results: Iterable[Result]) -> str:
    """Return the form "customSmallerIsBetter" of github-action-benchmark: figures in MiB.

    https://github.com/benchmark-action/github-action-benchmark
    """
    rows = []
    for figure in _tracked_figures(results):
        row: dict[str, Any] = {
            "name": f"{figure.name}: peak {figure.peak}",
            "unit": "MiB",
            "value": figure.nbytes / MIB,
        }
        measurement = figure.result.measurement
        if measurement is not None:
            row["extra"] = f"{figure.nbytes} bytes; {provenance_text(measurement.provenance)}"
        rows.append(row)
    lines = ",\n".join(f" {json.dumps(row)}" for row in rows)
    return f"[\n{lines}\n]\n" if rows else "[]\n"


def bencher(results: Iterable[Result]) -> str:
    """Return the Bencher Metric Format: figures in bytes, by the measures "peak-allocated" ...

    https://bencher.dev/docs/reference/bencher-metric-format/
    """
    benchmarks: dict[str, dict[str, dict[str, int]]] = {}
    for figure in _tracked_figures(results):
        measures = benchmarks.setdefault(figure.name, {})
        measures[f"peak-{figure.peak}"] = {"value": figure.nbytes}
    return json.dumps(benchmarks, indent=1) + "\n"


FORMATS: Final[dict[str, Callable[[Iterable[Result]], str]]] = {
    "github-action-benchmark": benchmark_action,
    "bencher": bencher,
}
