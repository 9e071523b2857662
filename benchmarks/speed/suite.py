"""How long do this project's own tests and its CI take?

    python -m benchmarks.speed.suite [--runs N] [fast] [all] [ci]
    python -m benchmarks.speed.suite --runs 1 --with tests/judge fast all

``fast`` is tests/run.sh, ``all`` is tests/run.sh --all, ``ci`` is .ci/run. Each is run N times, in
turn, and all are run unless some are named. Processor seconds are those of all processes. The
machine has to be idle: the load is noted as each run begins. The result goes to
benchmarks/results/suite.txt, after each run; a trial with other arguments is printed alone.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import time

from benchmarks.harness import ROOT, line, publish, table

COMMANDS = {
    "fast": ["bash", "tests/run.sh"],
    "all": ["bash", "tests/run.sh", "--all"],
    "ci": ["bash", ".ci/run"],
}
HEADS = ("command", "load before", "s", "processor s", "status", "ends with")
CLOSING = re.compile(r"^(?:=+ )?(\d+ (?:passed|failed).*? in \d.*?)(?: =+)?$", re.MULTILINE)
"""the last line of pytest"""
STEP = re.compile(r"^(\S+) +(\d+ s)  (ok|FAILED.*|no second Python.*)$", re.MULTILINE)
"""a step in the table that .ci/run ends with"""


def processor_seconds() -> float:
    """Return the processor seconds of all processes that this one has started and that ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measured(command: list[str]) -> list[str]:
    """Run a command; return its row."""
    load, used, began = os.getloadavg()[0], processor_seconds(), time.perf_counter()
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    wall, used = time.perf_counter() - began, processor_seconds() - used
    steps = [f"{name} {seconds} {verdict}" for name, seconds, verdict in STEP.findall(done.stdout)]
    ends_with = "; ".join(steps or CLOSING.findall(done.stdout)[-1:])
    figures = (f"{load:.1f}", f"{wall:.0f}", f"{used:.0f}", str(done.returncode))
    return [" ".join(command[1:]), *figures, ends_with]


def main() -> None:
    """Run the commands in turn."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="*", help=f"{', '.join(COMMANDS)} (all of them)")
    parser.add_argument("--runs", type=int, default=3, help="of each command (3)")
    parser.add_argument("--with", dest="more", action="append", default=[], metavar="ARGUMENT")
    asked = parser.parse_args()
    began, rows = line(), []
    for name in [*(asked.what or COMMANDS)] * asked.runs:
        rows.append(measured([*COMMANDS[name], *asked.more]))
        drawn = table(sorted(rows, key=lambda row: row[0]), HEADS, "lrrrrl")
        text = f"{__doc__.splitlines()[0]}\n{began}\n\n{drawn}"
        publish("suite", text, keep=not asked.more)


if __name__ == "__main__":
    main()
