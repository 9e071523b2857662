"""Do this project's own tests pass without NVIDIA's packages?

    python -m benchmarks.fidelity.light_suite [--kind cudnn|none] [--keep PLACE] [FOLDER ...]

uv makes an environment of the versions in .ci/constraints.txt, with the names of ``gpumem light
--excludes``: without NVIDIA's packages but cuDNN and without Triton (cudnn), or without cuDNN as
well (none). In it pytest runs the tests of one folder after another ("." has those above). The rows
of a folder that runs again replace its rows in benchmarks/results/light_suite.txt, each with its
own date and commit. A folder in a folder ("devices/sharing"), the files of one alone ("devices/.")
or one file may be named as well: it has rows of its own until the folder runs. With ``--keep`` the
environments stay in a place, where the next run finds them; otherwise each is deleted after its
run.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.harness import RESULTS, ROOT, excludes, output_of, packages, publish, where

KINDS = {
    "cudnn": ("without NVIDIA's packages but cuDNN, without Triton", ["--cudnn"]),
    "none": ("without NVIDIA's packages and Triton", []),
}
NOT_RUN = {"gold", "helpers", "gpu"}
EXTRAS = "nvml,html,examples,docs,test,dev"
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
CLOSING = re.compile(r"(?m)^=* ?((?:\d+ [a-z]+, )*\d+ [a-z]+) in [\d.]+s")
SKIPPED = re.compile(r"(?m)^SKIPPED \[(\d+)\] \S+: (.*)$")
FAILED = re.compile(r"(?m)^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$")


def folders() -> list[str]:
    """Return the rooms of the tests, "." for the files above."""
    found = {path.relative_to(ROOT / "tests").parent for path in ROOT.glob("tests/**/test_*.py")}
    return sorted({str(Path(*it.parts[:1])) for it in found} - NOT_RUN)


def environment(folder: Path, kind: str) -> Path:
    """Make an environment, unless it is there; return its folder of programs."""
    place = folder / f"light-suite-{kind}"
    if not (place / "whole").exists():
        output_of(sys.executable, "-m", "venv", "--clear", str(place))
        install = ("uv", "pip", "install", "--quiet", "--python", str(place))
        with_names = (*excludes(folder, KINDS[kind][1]), "-c", ".ci/constraints.txt")
        output_of(*install, *with_names, "--upgrade", "pip", "setuptools", "wheel")
        output_of(*install, *with_names, "--no-build-isolation", "-e", f".[{EXTRAS}]")
        output_of(str(place / "bin/python"), "setup.py", "--quiet", "build_ext", "--inplace")
        (place / "whole").touch()
    return place / "bin"


def run(programs: Path, folder: str, workers: str) -> list[str]:
    """Run a folder's tests; return how many passed, why others were skipped, and which failed."""
    paths = [f"tests/{folder}"]
    if folder.rpartition("/")[2] == ".":
        paths = sorted(map(str, (ROOT / "tests" / folder).glob("test_*.py")))
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    its = {"PATH": path, "VIRTUAL_ENV": str(programs.parent), "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [str(programs / "pytest"), "-q", "-p", "no:cacheprovider", "-n", workers, *paths],
        cwd=ROOT,
        env={**os.environ, **its},
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if process.returncode:
        print(process.stdout)
    return came_of(process.stdout)


def came_of(output: str) -> list[str]:
    """Return what the output says: how many passed, which failed, why others were skipped."""
    said = COLOURS.sub("", output)
    failed = FAILED.findall(said)
    closing = CLOSING.findall(said)
    outcome = closing[-1] if closing else "did not come to an end"
    reasons: Counter[str] = Counter()
    for number, reason in SKIPPED.findall(said):
        reasons[reason] += int(number)
    return [
        outcome,
        *(f"  failed: {name}" for name in failed),
        *(f"  {number} skipped: {reason}" for reason, number in sorted(reasons.items())),
    ]


def recorded(path: Path) -> dict[str, dict[str, list[str]]]:
    """Return the rows that are recorded, by environment and folder."""
    tables: dict[str, dict[str, list[str]]] = {kind: {} for kind in KINDS}
    if not path.exists():
        return tables
    for text in path.read_text(encoding="utf-8").rstrip().split("\n\n")[1:]:
        head, *lines = text.splitlines()
        (rows,) = (tables[kind] for kind, (words, _) in KINDS.items() if head == words)
        for line in lines:
            if not line.startswith(" "):
                name = line.split()[0]
                rows[name] = []
            rows[name].append(line)
    return tables


def holds(folder: str, name: str) -> bool:
    """Return whether the tests of a row are among those of a folder, or of its files alone."""
    if folder.endswith("/."):
        own = name.removeprefix(folder[:-1])
        return own != name and "/" not in own and own.endswith(".py")
    return name.startswith(f"{folder}/")


def record(kind: str, folder: str, came: list[str], its: dict[str, str]) -> None:
    """Put a folder's rows among those recorded."""
    tables = recorded(RESULTS / "light_suite.txt")
    outcome, *below = came
    for name in [name for name in tables[kind] if holds(folder, name)]:
        del tables[kind][name]
    tables[kind][folder] = [
        f"{folder:28} {outcome}; {its['date']}, commit {its['commit']}",
        *below,
    ]
    machine = {**packages("torch", "pytest"), "cpu": its["cpu"], "python": its["python"]}
    versions = "; ".join(f"{name} {value}" for name, value in machine.items())
    texts = [f"{__doc__.splitlines()[0]}\n{versions}"]
    for of_kind, (words, _) in KINDS.items():
        rows = [line for name in sorted(tables[of_kind]) for line in tables[of_kind][name]]
        texts += ["\n".join([words, *rows])] if rows else []
    publish("light_suite", "\n\n".join(texts))


def main() -> None:
    """Run the folders that are named in the environments that are named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help=", ".join(folders()))
    parser.add_argument("--kind", choices=KINDS, action="append", help="both, if none is named")
    parser.add_argument("--keep", type=Path, metavar="PLACE", help="keep the environments there")
    parser.add_argument("--workers", default="2", metavar="N", help="of pytest-xdist (2)")
    options = parser.parse_args()
    for kind in options.kind or KINDS:
        with tempfile.TemporaryDirectory(prefix="light-suite-") as scratch:
            programs = environment(options.keep or Path(scratch), kind)
            for folder in options.folders or folders():
                its = where()
                record(kind, folder, run(programs, folder, options.workers), its)


if __name__ == "__main__":
    main()
