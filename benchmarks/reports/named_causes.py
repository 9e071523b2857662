"""How often does a report name the line and the keeper that made a peak grow, and how often others?

    python -m benchmarks.reports.named_causes [--programs N] [--first SEED] [--show]

Each program of tests/helpers/random_growth.py has two versions. The old one records the baseline;
the new one has one planted growth with a known line and keeper. In half of the programs other
memory moves to another line. Programs with a wrong report are listed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks import harness

sys.path.insert(0, str(harness.ROOT / "tests"))

from helpers.random_growth import edited_program, wrong_cause


def main() -> int:
    """Run both versions; return 1 if under 95 % are right, or if a wrong keeper is named first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=200, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--show", action="store_true", help="print the programs with a mistake")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.programs)
    programs = {f"test_{seed}.py": edited_program(seed) for seed in seeds}
    with tempfile.TemporaryDirectory() as folder:
        for name, program in programs.items():
            Path(folder, name).write_text(program.source, encoding="utf-8")
        device = ("-p", "no:randomly", "--gpumem-device=virtual", "--gpumem-card=H100")
        harness.session(folder, *device, "--gpumem-update-baselines")
        report = Path(folder, "report.json")
        new = {**os.environ, "NEW": "1"}
        done = harness.session(folder, *device, f"--gpumem-json={report}", environment=new)
        assert done.status < 2, done.output
        results = json.loads(report.read_text(encoding="utf-8"))["results"]
    found = {result["nodeid"].partition("::")[0]: result for result in results}
    mistakes = {
        name: what
        for name, program in programs.items()
        if (what := wrong_cause(program, found.get(name)))
    }
    kinds = Counter(what.partition(":")[0] for what in mistakes.values())
    lines = [
        harness.line(),
        "",
        f"{len(programs) - len(mistakes)} of {len(programs)}: line, keeper and bytes are right",
        *(f"{number} {kind}" for kind, number in kinds.most_common()),
        "",
        *(f"{name} ({programs[name].plant}): {what}" for name, what in mistakes.items()),
    ]
    harness.publish("named_causes", "\n".join(lines), keep=options.programs >= 200)
    if options.show:
        print(*(f"# {name}\n{programs[name].source}" for name in mistakes), sep="\n\n")
    return len(mistakes) * 20 > len(programs) or "wrong keeper" in kinds


if __name__ == "__main__":
    sys.exit(main())
