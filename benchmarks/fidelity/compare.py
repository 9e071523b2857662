"""Compare two files of run.py: relative errors of the second against the first, by family.

python -m benchmarks.fidelity.compare REAL.json VIRTUAL.json
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from tabulate import tabulate

from benchmarks.harness import MIB, table


def load(path: str) -> dict:
    """Return one file's content."""
    data = json.loads(Path(path).read_text(encoding="utf-8"))
    assert data["format"] == 1, f"{path}: format {data['format']} is unknown"
    return data


def percentile(values: list[float], share: float) -> float:
    """Return the least value that a ``share`` of the values do not exceed (nearest rank)."""
    ranked = sorted(values)
    return ranked[max(0, -(-len(ranked) * round(share * 100) // 100) - 1)]


def errors(first: dict, second: dict, figure: str) -> dict[str, float]:
    """Return the signed relative error, in percent, of each step that ran in both files."""
    return {
        name: 100 * (second[name][figure] - one[figure]) / one[figure]
        for name, one in first.items()
        if one["status"] == "ok" and second.get(name, {}).get("status") == "ok"
    }


def cells(values: list[float]) -> list[str]:
    """Return median, 95th percentile and maximum of the absolute errors."""
    sizes = [abs(value) for value in values]
    shown = (statistics.median(sizes), percentile(sizes, 0.95), max(sizes))
    return [f"{value:.3f}" for value in shown]


def main() -> None:
    """Print the comparison."""
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    one, two = load(sys.argv[1]), load(sys.argv[2])
    first, second = one["steps"], two["steps"]
    for label, data in (("reference", one), ("compared", two)):
        made = ", ".join(f"{k} {v}" for k, v in data["provenance"].items())
        print(f"{label}: {data['kind']}: {made}")
    allocated, reserved = (errors(first, second, it) for it in ("allocated", "reserved"))
    if not allocated:
        sys.exit("no step ran in both")
    rows = []
    for family in [*dict.fromkeys(first[name]["family"] for name in allocated), "all"]:
        names = [it for it in allocated if family in {"all", first[it]["family"]}]
        row = [cells([errs[name] for name in names]) for errs in (allocated, reserved)]
        rows.append([family, len(names), *row[0], *row[1]])
    heads = [
        f"{figure} {what}" for figure in ("alloc.", "res.") for what in ("median", "p95", "worst")
    ]
    print("\nRelative error in per cent")
    print(table(rows, ["family", "steps", *heads], "r"))
    steps = [
        [
            name,
            first[name]["allocated"] / MIB,
            second[name]["allocated"] / MIB,
            allocated[name],
            first[name]["reserved"] / MIB,
            second[name]["reserved"] / MIB,
            reserved[name],
            second[name]["segments"] - first[name]["segments"],
            second[name]["retries"] - first[name]["retries"],
        ]
        for name in sorted(allocated, key=lambda it: -abs(allocated[it]))
    ]
    print("\nEvery step, MiB and per cent, worst allocated first")
    heads = ["step", "allocated", "compared", "%", "reserved", "compared", "%", "segm.", "retries"]
    print(tabulate(steps, heads, floatfmt=".2f"))
    unlike = [
        f"{name}: {one['status']} against {second.get(name, {}).get('status', 'not run')}"
        for name, one in first.items()
        if name not in allocated and one["status"] != "skipped"
    ]
    if unlike:
        print("\nNot compared:\n  " + "\n  ".join(unlike))


if __name__ == "__main__":
    main()
