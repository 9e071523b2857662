"""Other people's training programs, unmodified, under gpumem run: peaks and a planted growth.

    python -m benchmarks.launched.run torchtitan=PATH nanoGPT=PATH [--only WORD] > launched.txt

Each PATH is a clone of the repository; nothing is downloaded. programs.toml has the command lines.
Each program records its baseline, is compared with it, and runs once more with an inserted source
line that allocates 256 MiB: that run must fail, and its headline is printed. Afterwards the clones
are restored. benchmarks/results/launched.txt is a recorded run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.harness import MIB, OFFLINE, ROOT, packages, read_toml, table, where

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

HANGS_S = 1500
FIGURES = ("allocated", "reserved")
PLANTED = "planted = torch.empty(64 << 20, device='cuda')"


class Program(NamedTuple):
    """A program of a repository; programs.toml explains the fields."""

    name: str
    repository: str
    options: list[str]
    """options of gpumem run"""
    command: list[str]
    file: str
    """the source file in which a line is planted"""
    before: str
    """the source line before which it is planted"""
    environment: Mapping[str, str] = MappingProxyType({})
    """environment variables that a launcher would set"""


class Ended(NamedTuple):
    """A run of ``gpumem run``."""

    status: int
    result: dict[str, Any]
    """from the JSON report; of several processes the one that failed, or the fullest"""
    seconds: float
    text: str

    @property
    def headline(self) -> str:
        """The verdict's headline, or the exit status."""
        return str(self.result.get("verdict", {}).get("headline", f"status {self.status}"))


def peaks_of(result: dict[str, Any], figure: str) -> list[int]:
    """Return a result's peaks ("allocated" or "reserved") in bytes, one per device."""
    return [peak[figure] for peak in result["measurement"]["peaks"]]


def run(program: Program, clone: Path, folder: Path, *options: str) -> Ended:
    """Run a program in its clone, with the baseline in ``folder``."""
    report, kept = folder / "report.json", folder / "kept"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest_gpumem.cli.main", "run", f"--baseline={kept}"]
    began = time.monotonic()
    done = subprocess.run(
        [*command, f"--json={report}", *options, *program.options, *program.command],
        cwd=clone,
        env={
            **os.environ,
            **OFFLINE,
            "PYTHONPATH": str(ROOT),
            "WANDB_MODE": "disabled",
            **program.environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=HANGS_S,
    )
    results = json.loads(report.read_text(encoding="utf-8"))["results"] if report.exists() else []
    used = [result for result in results if any(peaks_of(result, "reserved"))]
    used.sort(key=lambda it: (not it["verdict"]["failed"], -max(peaks_of(it, "allocated"))))
    result = used[0] if used else {}
    return Ended(done.returncode, result, time.monotonic() - began, done.stdout)


@contextmanager
def planted(clone: Path, program: Program) -> Iterator[None]:
    """Insert a line into a program's source that allocates and keeps a tensor, for the block."""
    path = clone / program.file
    text = path.read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.strip() == program.before)
    indent = line[: len(line) - len(line.lstrip())]
    try:
        path.write_text(text.replace(line, f"{indent}{PLANTED}\n{line}", 1), encoding="utf-8")
        yield
    finally:
        path.write_text(text, encoding="utf-8")


def row(program: Program, clone: Path) -> list[str]:
    """Return a program's row of the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = run(program, clone, folder, "--update")
        if first.status or not first.result:
            reason = first.text.partition("\ngpumem: ")[0].strip().rpartition("\n")[2]
            return [program.name, "", "", f"{first.seconds:.0f}", f"failed: {reason}", ""]
        second = run(program, clone, folder)
        with planted(clone, program):
            third = run(program, clone, folder)
    sizes = [f"{max(peaks_of(first.result, figure)) / MIB:.2f}" for figure in FIGURES]
    again, cause = second.headline.split(":")[0], third.headline.split(";")[0]
    return [program.name, *sizes, f"{first.seconds:.0f}", again, cause]


def main() -> int:
    """Run the programs of the clones that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clones", nargs="+", metavar="NAME=PATH")
    parser.add_argument("--only", default="", help="programs with this word in their name")
    arguments = parser.parse_args()
    pairs = (argument.split("=", 1) for argument in arguments.clones)
    clones = {name: Path(path).resolve() for name, path in pairs}
    fields = read_toml(Path(__file__).with_name("programs.toml"))["programs"]
    facts = {**where(), **packages("torch", "transformers", "lightning", "deepspeed", "accelerate")}
    print("; ".join(f"{key} {value}" for key, value in facts.items()))
    for name, clone in clones.items():
        git = ["git", "-C", str(clone), "log", "-1", "--format=%h of %cs"]
        head = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
        print(f"{name}: {head or 'no commit'}", flush=True)
    rows = []
    for program in (Program(**program) for program in fields):
        if program.repository in clones and arguments.only in program.name:
            rows.append(row(program, clones[program.repository]))
            print(rows[-1], file=sys.stderr, flush=True)
    titles = ["program", "MiB allocated", "reserved", "s", "again", "with 256 MiB more at a line"]
    print(table(rows, titles, "lrrrl"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
