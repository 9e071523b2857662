"""How long do this project's own tests and its CI take?

    python -m benchmarks.speed.suite [--runs N] [fast] [all] [ci]
    python -m benchmarks.speed.suite --runs 1 --with tests/judge fast all

``fast`` is tests/run.sh, ``all`` is tests/run.sh --all, ``ci`` is .ci/run. The named commands, or
all of them, run N times in turn. CPU seconds are those of all processes. The machine must be idle:
the load at the start of each run is noted. After each run the result is written to
benchmarks/results/suite.txt; with other arguments it is only printed.
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
"""matches pytest's last line"""
STEP = re.compile(r"^(\S+) +(\d+ s)  (ok|FAILED.*|no second Python.*)$", re.MULTILINE)
"""matches a row in the table at the end of .ci/run's output"""


def processor_seconds() -> float:
    """Return the CPU seconds of all ended child processes."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measured(command: list[str]) -> list[str]:
    """Run a command; return its row of the table."""
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
