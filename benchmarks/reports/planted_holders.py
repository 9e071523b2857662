"""How often is what keeps planted memory named first, in shapes that were named wrong once?

    python -m benchmarks.reports.planted_holders [--programs N] [--first SEED] [--show]

Each program of tests/helpers/planted_holders.py has one planted leak, growth from step to step or
higher peak with a known holder, or one edit that made it grow. Programs are listed if their report
names another holder or edit first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import harness

sys.path.insert(0, str(harness.ROOT / "tests"))

from helpers.planted_holders import (
    EDIT,
    NOT_FIRST,
    NOT_NAMED,
    PEAK,
    RIGHT,
    WRONG,
    naming,
    planted_program,
)

if TYPE_CHECKING:
    from helpers.planted_holders import Planted

DEVICE = ("-p", "no:randomly", "--gpumem-device=virtual", "--gpumem-card=H100")


def main() -> int:
    """Run the programs; return 1 if a wrong holder is named without the right one before it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=300, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--show", action="store_true", help="print the programs that are listed")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.programs)
    programs = {f"test_{seed}.py": planted_program(seed) for seed in seeds}
    held = {name: program for name, program in programs.items() if program.found_as != EDIT}
    results = found_in_one_session(held) if held else []
    for name, program in programs.items():
        if program.found_as == EDIT:
            results += found_after_an_edit(name, program)
    found = {result["nodeid"].partition("::")[0]: result for result in results}
    named = {name: naming(program, found.get(name)) for name, program in programs.items()}
    kinds = Counter(kind for kind, _ in named.values())
    ways = Counter(program.found_as for program in programs.values())
    lines = [
        harness.line(),
        "",
        f"{len(programs)} programs: {', '.join(f'{ways[way]} {way}' for way in sorted(ways))}",
        *(f"{number} {kind}" for kind, number in kinds.most_common()),
        f"{kinds[WRONG] + kinds[NOT_FIRST]} with a wrong holder first",
        "",
        *(
            f"{name} ({programs[name].found_as}: {programs[name].shape}): {kind}: {texts}"
            for name, (kind, texts) in named.items()
            if kind != RIGHT
        ),
    ]
    harness.publish("planted_holders", "\n".join(lines), keep=options.programs >= 300)
    if options.show:
        shown = [name for name, (kind, _) in named.items() if kind != RIGHT]
        print(*(f"# {name}\n{programs[name].source}" for name in shown), sep="\n\n")
    return any(kind not in {RIGHT, NOT_NAMED} for kind, _ in named.values())


def found_in_one_session(programs: dict[str, Planted]) -> list[dict[str, Any]]:
    """Record baselines of programs, run all with the variable NEW; return the results."""
    with tempfile.TemporaryDirectory() as folder:
        for name, program in programs.items():
            Path(folder, name).write_text(program.source, encoding="utf-8")
        peaks = [name for name, program in programs.items() if program.found_as == PEAK]
        harness.session(folder, *DEVICE, "--gpumem-update-baselines", *peaks)
        return results_in(folder, {**os.environ, "NEW": "1"})


def found_after_an_edit(name: str, program: Planted) -> list[dict[str, Any]]:
    """Commit a program with its baseline, edit it, and return its results."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, name).write_text(program.before, encoding="utf-8")
        harness.session(folder, *DEVICE, "--gpumem-update-baselines")
        git = ("git", "-C", folder, "-c", "user.name=n", "-c", "user.email=e@x")
        for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "A baseline")):
            subprocess.run((*git, *words), check=True)
        Path(folder, name).write_text(program.source, encoding="utf-8")
        return results_in(folder, {**os.environ})


def results_in(folder: str, environment: dict[str, str]) -> list[dict[str, Any]]:
    """Run a folder's tests; return the results of the JSON report."""
    report = Path(folder, "report.json")
    done = harness.session(folder, *DEVICE, f"--gpumem-json={report}", environment=environment)
    assert done.status < 2, done.output
    results: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["results"]
    return results


if __name__ == "__main__":
    sys.exit(main())
