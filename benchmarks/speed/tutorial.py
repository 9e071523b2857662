"""The tutorial, typed by a script: from an empty folder to a pull request that fails.

    python -m benchmarks.speed.tutorial [--environment .venv]

Files, commands and outputs are those of docs/tutorial/gate-in-ci.md; every output that the page
shows has to be printed, line for line. All commands run under ``env -i`` in an empty home, without
a GPU. With --environment the packages of that environment are taken, and the time of pip is not in
the figures; else they are installed as the page says, pytest-gpumem from this folder.

The pull request is a branch in a bare repository. Its check is the job of the page's workflow: a
clone of that branch in another folder, where the job's commands run with the variables that GitHub
Actions sets.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks import harness

sys.path.insert(0, str(harness.ROOT / "tests"))
from helpers.pages import blocks, changed, files, read, shows

PAGE = "tutorial/gate-in-ci.md"
AIM_S = 600
IDENTITY = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "A newcomer"), ("EMAIL", "newcomer@example.org"))
}


class Step(NamedTuple):
    """A step of the tutorial, done."""

    name: str
    seconds: float


class Typist:
    """Types commands in a folder, and compares what they print with the page.

    Args:
        folder: where it works; it is empty.
        environment: an environment with the packages; None: the page's commands make one.
    """

    def __init__(self, folder: Path, environment: Path | None) -> None:
        self.folder = folder
        self.environment = environment or folder / ".venv"
        self.steps: list[Step] = []
        self.compared = 0
        self._home = folder.parent / "home"
        self._home.mkdir(exist_ok=True)

    def type(self, command: str, *, fails: bool = False, **variables: str) -> str:
        """Type a command; return what it printed.

        Raises:
            SystemExit: it did not end as the page says.
        """
        path = f"{self.environment / 'bin'}:/usr/local/bin:/usr/bin:/bin"
        environment = {"HOME": str(self._home), "PATH": path, "COLUMNS": "80", "LANG": "C.UTF-8"}
        words = [f"{name}={value}" for name, value in {**environment, **variables}.items()]
        done = subprocess.run(
            ["env", "-i", *words, "bash", "-c", command],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if bool(done.returncode) is not fails:
            raise SystemExit(f"{command}: exit status {done.returncode}\n{done.stdout}")
        return done.stdout

    def write(self, name: str, content: str) -> None:
        """Write a file, as an editor would."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")

    def compare(self, output: str, shown: str) -> None:
        """Compare an output with the page's.

        Raises:
            SystemExit: a line that the page shows was not printed.
        """
        if not shows(output, shown):
            raise SystemExit(f"the page shows:\n{shown}\nand this was printed:\n{output}")
        self.compared += len(list(filter(None, shown.splitlines())))


def walk(typist: Typist, *, install: bool) -> None:
    """Do all steps of the page."""
    test = files(PAGE)["test_training.py"]
    settings = files(PAGE, "toml")["pyproject.toml"]
    first, within, regressed, out_of_memory, hint, requirements = blocks(PAGE, "text")[:6]
    growth = blocks(PAGE, "diff")[0].replace("-        loss", "-        loss", 1)
    began = time.monotonic()

    def done(name: str) -> None:
        nonlocal began
        typist.steps.append(Step(name, time.monotonic() - began))
        began = time.monotonic()

    if install:
        typist.type("python3 -m venv .venv")
        packages = re.search(r"pip install .*?\b(torchvision\b.*)$", read(PAGE), re.MULTILINE)[1]
        typist.type(f"pip install --quiet {harness.ROOT}[html] {packages}")
        done("install")
    typist.type("git init --quiet --initial-branch=main")
    typist.write("pyproject.toml", settings)
    typist.write("test_training.py", test)
    typist.compare(typist.type("pytest"), first)
    done("write a test and run it")
    command = re.search(r"to record baselines: (pytest .*)", first)[1]
    typist.type(command)
    typist.write(".gitignore", ".venv/\n__pycache__/\n.pytest_cache/\n")
    typist.type("git add . && git commit --quiet -m 'A memory test'", **IDENTITY)
    typist.compare(typist.type("pytest -v"), within)
    done("record a baseline")
    typist.write("test_training.py", changed(test, growth))
    typist.compare(typist.type("pytest", fails=True), regressed)
    done("let memory grow")
    typist.write("test_training.py", test.replace("batch_size=32", "batch_size=256"))
    typist.compare(typist.type("pytest", fails=True), out_of_memory + hint)
    typist.write("test_training.py", test)
    done("ask for too much")
    workflow = files(PAGE, "yaml")[".github/workflows/gpu-memory.yml"]
    typist.write("requirements.txt", requirements)
    typist.write(".github/workflows/gpu-memory.yml", workflow)
    bare = typist.folder.parent / "origin.git"
    typist.type(f"git init --quiet --bare {bare} && git remote add origin {bare}")
    typist.type("git add . && git commit --quiet -m 'The gate'", **IDENTITY)
    typist.type("git push --quiet origin main")
    typist.type("git switch --quiet -c keep-the-graph")
    typist.write("test_training.py", changed(test, growth))
    typist.type("git commit --quiet -am 'Keep the graph'", **IDENTITY)
    typist.type("git push --quiet origin HEAD")
    done("push the gate, and a pull request")
    check_pull_request(typist, workflow, regressed)
    done("the pull request's check")


def check_pull_request(typist: Typist, workflow: str, regressed: str) -> None:
    """Run the workflow's job on the branch, as a runner of GitHub does.

    Raises:
        SystemExit: it does not fail with the cause that the page shows.
    """
    runner = typist.folder.parent / "runner"
    typist.type(f"git clone --quiet --branch keep-the-graph ../origin.git {runner}")
    job = Typist(runner, typist.environment)
    commands = [line.partition("run: ")[2] for line in workflow.splitlines() if "run: " in line]
    summary = typist.folder.parent / "summary.md"
    variables = {
        "CI": "true",
        "GITHUB_ACTIONS": "true",
        "GITHUB_WORKSPACE": str(runner),
        "GITHUB_STEP_SUMMARY": str(summary),
    }
    (command,) = [command for command in commands if command.startswith("pytest")]
    output = job.type(command, fails=True, **variables)
    job.compare(output, regressed)
    typist.compared += job.compared
    cause = regressed.split("; peak", maxsplit=1)[0].removeprefix("regressed: ")
    told = summary.read_text("utf-8").replace("\\", "")  # Markdown's
    if " ".join(cause.split()) not in " ".join(told.split()):
        raise SystemExit(f"the job's summary does not name {cause}")
    if "::error file=test_training.py" not in output:
        raise SystemExit(f"no annotation of the test:\n{output}")


def main() -> None:
    """Type it, and print the times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--environment", type=Path, help="an environment that has the packages")
    environment = parser.parse_args().environment
    if environment is not None:
        environment = environment.absolute()
    folder = Path(tempfile.mkdtemp(prefix="tutorial-"))
    try:
        (folder / "gate").mkdir()
        typist = Typist(folder / "gate", environment)
        walk(typist, install=environment is None)
    finally:
        shutil.rmtree(folder)
    total = sum(step.seconds for step in typist.steps)
    rows = [(step.name, f"{step.seconds:.0f}") for step in typist.steps]
    pip = "in the time" if environment is None else "not in the time: they were there"
    text = [
        "The tutorial, typed by a script under env -i, without a GPU",
        harness.line("torch", "pytest"),
        "",
        harness.table([*rows, ("together", f"{total:.0f}")], ["step", "s"]),
        "",
        f"{typist.compared} lines that the page shows were printed as they are there.",
        f"Installing the packages is {pip}. Aim: {AIM_S} s. Load: {os.getloadavg()[0]:.0f}.",
    ]
    harness.publish("tutorial", "\n".join(text))


if __name__ == "__main__":
    main()
