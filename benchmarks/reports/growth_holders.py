"""How often does ``steady=True`` name what holds the growth of random programs, and its line?

    python -m benchmarks.reports.growth_holders [--programs N] [--first SEED] [--show]

Each program of tests/helpers/random_growth.py has one planted growth; for every five programs there
is one more without growth. A report is right if the verdict, the first holder, the first line, and
the bytes of all holders and of all lines are right. Programs with other reports are listed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks import harness

sys.path.insert(0, str(harness.ROOT / "tests"))

from helpers.random_growth import mistake, random_program


def main() -> int:
    """Run the programs in one session; return 1 if less than 95 % of the reports are right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=205, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--show", action="store_true", help="print the programs with a mistake")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.programs)
    programs = {f"test_{seed}.py": random_program(seed) for seed in seeds}
    programs |= {f"test_steady_{seed}.py": random_program(seed, steady=True) for seed in seeds[::5]}
    with tempfile.TemporaryDirectory() as folder:
        for name, program in programs.items():
            Path(folder, name).write_text(program.source, encoding="utf-8")
        report = Path(folder, "report.json")
        device = ("--gpumem-device=virtual", "--gpumem-card=H100", f"--gpumem-json={report}")
        done = harness.session(folder, "-p", "no:randomly", *device)
        assert done.status < 2, done.output
        results = json.loads(report.read_text(encoding="utf-8"))["results"]
    found = {result["nodeid"].partition("::")[0]: result for result in results}
    mistakes = {
        name: what
        for name, program in programs.items()
        if (what := mistake(program, found[name]) if name in found else "no result")
    }
    kinds = Counter(programs[name].plant or "no growth" for name in mistakes)
    planted = sum(bool(programs[name].plant) for name in mistakes)
    lines = [
        harness.line(),
        "",
        f"{options.programs - planted} of {options.programs} programs with a growth: all is right",
        f"{len(seeds[::5]) - len(mistakes) + planted} of {len(seeds[::5])} programs without: pass",
        *(f"{number} of {kind}" for kind, number in kinds.most_common()),
        *(f"{name} ({programs[name].plant}): {what}" for name, what in mistakes.items()),
    ]
    harness.publish("growth_holders", "\n".join(lines), keep=options.programs >= 205)
    if options.show:
        print(*(f"# {name}\n{programs[name].source}" for name in mistakes), sep="\n\n")
    return planted * 20 > options.programs


if __name__ == "__main__":
    sys.exit(main())
