"""What ten thousand marked tests with baselines cost, beside pytest-benchmark and syrupy.

    python -m benchmarks.scale.sessions [--counts 1000 3000 10000] [--repeats 3]

Suites of tests that allocate one tensor each, in modules of a hundred, are run as sessions of
pytest, no other plugin loaded. The plugin's share is the processor's time of a session whose tests
are marked, less that of the same tests unmarked and without the plugin, over their number: hooks,
device, measurement, judging, summary and, where asked for, the update, all of it. Of this, the
calls that are the measurement itself (Python's collector, synchronising, the allocator's
statistics, caps and cache) are timed one by one in sessions of their own. pytest-benchmark and
syrupy, where they are installed, run as many tests of theirs: a round of nothing, and a text that
is compared with its snapshot; likewise less the same tests without them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

from benchmarks.harness import line, publish, table
from benchmarks.scale.reports import made_up, pages
from benchmarks.scale.suites import (
    BENCHMARK,
    ENVIRONMENT,
    HEAD,
    MARKED,
    NOTHING,
    PER_MODULE,
    PLAIN,
    SNAPSHOT,
    STEP,
    VIRTUAL,
    Suite,
    Took,
    in_one_module,
    run,
    suite,
)

AIMS = "aims: a test under 1 ms, summary and update under 2 s"


def median(values: list[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def share(suites: tuple[Suite, Suite], repeats: int) -> tuple[float, dict[str, float], list[float]]:
    """Return the plugin's share of a test, in ms: of all, by kind of inherent call; the range."""
    marked, plain = suites
    different, inherent = [], defaultdict(list)
    for _ in range(repeats):
        pair = run(marked).seconds - run(plain).seconds
        different.append(1000 * pair / marked.number)
        clock = run(marked, "-p", "scale_clock").clock
        for key, seconds in clock.items():
            inherent[key].append(1000 * seconds / marked.number)
    parts = {key: median(values) for key, values in inherent.items() if key != "summary"}
    return median(different), parts, [min(different), max(different)]


def shares(root: Path, counts: list[int], repeats: int) -> list[str]:
    """Return the table of the plugin's share."""
    rows, parts = [], {}
    for number in counts:
        marked = suite(root, "marked", number, MARKED, "gpumem")
        plain = suite(root, "plain", number, (HEAD, STEP))
        (plain.folder / "conftest.py").write_text(VIRTUAL, encoding="utf-8")
        run(plain)
        run(marked, "--gpumem-update-baselines")
        whole, parts, ends = share((marked, plain), repeats)
        inherent = sum(parts.values())
        spread = f"{ends[0]:.2f} to {ends[1]:.2f}"
        rows.append([f"{number}", f"{whole:.2f}", spread, f"{inherent:.2f}"])
        rows[-1].append(f"{whole - inherent:.2f}")
        shutil.rmtree(plain.folder)
    heads = ["tests", "ms a test", "of the repeats", "the measurement itself", "the rest"]
    named = sorted(parts.items(), key=lambda it: -it[1])
    text = ", ".join(f"{key} {value:.3f}" for key, value in named)
    return [
        table(rows, heads, "r"),
        "",
        f"The measurement itself, of {counts[-1]} tests, ms a test: {text}.",
    ]


MODES = {
    "baselines all new": (("--gpumem-update-baselines",), 0, 1),
    "baselines unchanged": (("--gpumem-update-baselines",), 0, 1),
    "baselines all changed": (("--gpumem-update-baselines",), 0, 3),
    "all within": ((), 0, 3),
    "all regressed": (("--gpumem-attribution=off", "--tb=no", "-rN"), 1, 5),
}
"""options, pytest's exit status and the factor of the tensors' sizes, one after the other"""


def ends(root: Path, number: int, repeats: int) -> list[str]:
    """Return the table of summaries and updates."""
    rows = []
    clock = ("-p", "scale_clock")
    for layout, per_module in (("modules of 100", PER_MODULE), ("one module", number)):
        found: dict[str, list[Took]] = defaultdict(list)
        for repeat in range(repeats):
            made = suite(root, f"{per_module}-{repeat}", number, MARKED, "gpumem")
            if per_module != PER_MODULE:
                in_one_module(made)
            for name, (options, status, factor) in MODES.items():
                found[name].append(run(made, *options, *clock, status=status, factor=factor))
            shutil.rmtree(made.folder)
        for name, runs in found.items():
            said = {key: [it.clock.get(key) for it in runs] for key in ("update", "summary")}
            cells = ["" if None in its else f"{median(its):.2f}" for its in said.values()]
            rows.append([layout, name, *cells])
    heads = ["tests", "session", "update, s", "summary, s"]
    return [table(rows, heads)]


PEERS = {
    "benchmark": (
        "pytest-benchmark",
        BENCHMARK,
        ("--benchmark-save=base",),
        ("--benchmark-compare", "--benchmark-compare-fail=mean:1000000%"),
    ),
    "syrupy": ("syrupy", SNAPSHOT, ("--snapshot-update",), ()),
}


def peers(root: Path, number: int, repeats: int, own: list[list[str]]) -> list[str]:
    """Return the table of what others take."""
    plain = suite(root, "nothing", number, (NOTHING, PLAIN))
    without = [run(plain).seconds for _ in range(repeats + 1)][1:]
    rows = [*own]
    for module, (name, test, first, then) in PEERS.items():
        if find_spec(name.replace("-", "_")) is None:
            rows.append([name, "not installed", ""])
            continue
        made = suite(root, name, number, (NOTHING, test), module)
        cells = []
        for options in (first, then):
            took = [run(made, *options).seconds for _ in range(repeats)]
            each = [1000 * (a - b) / number for a, b in zip(took, without, strict=True)]
            cells.append(f"{median(each):.2f}")
        rows.append([name, *cells])
    heads = ["", "record, ms a test", "compare, ms a test"]
    return [table(rows, heads)]


def own_sessions(root: Path, number: int, repeats: int) -> list[list[str]]:
    """Return what recording and comparing takes with this plugin, as for the others."""
    marked = suite(root, "marked", number, MARKED, "gpumem")
    plain = suite(root, "plain", number, (HEAD, STEP))
    (plain.folder / "conftest.py").write_text(VIRTUAL, encoding="utf-8")
    without = [run(plain).seconds for _ in range(repeats + 1)][1:]
    cells = []
    for options in (("--gpumem-update-baselines",), ("--gpumem-attribution=off",)):
        took = []
        for _ in range(repeats):
            if "update" in options[0]:
                shutil.rmtree(marked.folder / "gpumem-baselines", ignore_errors=True)
            took.append(run(marked, *options).seconds)
        each = [1000 * (a - b) / number for a, b in zip(took, without, strict=True)]
        cells.append(f"{median(each):.2f}")
    return [["pytest-gpumem", *cells]]


PARTS = {
    "share": "The plugin's share: sessions with marked tests, less the same unmarked without it",
    "ends": "The end of a session",
    "others": "Beside others",
    "reports": "What a session ends with, of results that are made up, one in a hundred failed",
}


def measured(part: str, counts: list[int], repeats: int) -> list[str]:
    """Measure one part; return its lines."""
    most = counts[-1]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        ENVIRONMENT["PYTHONPYCACHEPREFIX"] = str(root / "compiled")
        if part == "share":
            return shares(root, counts, repeats)
        if part == "ends":
            return ends(root, most, repeats)
        if part == "others":
            return peers(root, most, repeats, own_sessions(root, most, repeats))
        return [*made_up(most), "", *pages(most)]


def main() -> None:
    """Measure and print, each part for itself."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[1000, 3000, 10_000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    wanted = parser.parse_args()
    for part in wanted.parts:
        text = [
            f"{PARTS[part]}; the processor's time",
            f"up to {wanted.counts[-1]} tests, medians of {wanted.repeats}",
            line("pytest_benchmark", "syrupy", "jinja2", "matplotlib"),
            f"load when measured: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {AIMS}",
            "",
            *measured(part, wanted.counts, wanted.repeats),
        ]
        publish(f"scale_{part}", "\n".join(text))


if __name__ == "__main__":
    main()
