"""What does somebody read who wants to know the package: lines, imports, the way of a test.

    python -m benchmarks.house.figures [--checkout PATH]...

Each PATH is another checkout, whose native library must be built. Lines are counted in the Python
files, C files and headers that git tracks. The kernel is the rooms devices (without the virtual
GPU), meter, judge, baselines, testrun and plugin. ``walk.py`` follows each test; in the session
every test runs after another of its kind, so that nothing is imported for the first time.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.harness import ROOT, line, publish, table

KERNEL = ("devices", "meter", "judge", "baselines", "testrun", "plugin")
SUITE = """
import os

import pytest
import torch

GROWN = bool(os.environ.get("GROWN"))


def step(mib):
    model = torch.nn.Linear(256, 256, device="cuda")
    model(torch.ones(mib << 10, 256, device="cuda")).sum().backward()


@pytest.mark.gpu_memory
@pytest.mark.parametrize("turn", [1, 2])
def test_passes(turn):
    step(8)


@pytest.mark.gpu_memory
@pytest.mark.parametrize("turn", [1, 2])
def test_regresses(turn):
    step(64 if GROWN else 8)


@pytest.mark.gpu_memory(max_gib=1)
@pytest.mark.parametrize("turn", [1, 2])
def test_is_out_of_memory(turn):
    step(2048 if GROWN else 8)
"""


def sources(checkout: Path) -> dict[str, str]:
    """Return the text of each source file of the package, by its path in the package."""
    command = ["git", "-C", str(checkout), "ls-files", "pytest_gpumem"]
    paths = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return {
        path.removeprefix("pytest_gpumem/"): (checkout / path).read_text(encoding="utf-8")
        for path in paths
        if path.endswith((".py", ".c", ".h")) and (checkout / path).exists()
    }


def room(path: str) -> str:
    """Return the room that a file belongs to."""
    if path.startswith("devices/virtual/"):
        return "devices/virtual"
    return path.rpartition("/")[0].partition("/")[0] or "(root)"


def across_the_facade(files: dict[str, str]) -> tuple[int, int, int]:
    """Count imports across the border of ``devices/virtual``.

    Returns:
        imports from outside of modules inside, imports from inside of modules outside, and the
        number of different modules in the latter.
    """
    into, out = 0, Counter[str]()
    for path, text in files.items():
        if not path.endswith(".py"):
            continue
        within = room(path) == "devices/virtual"
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            is_inside = node.module.startswith("pytest_gpumem.devices.virtual")
            if not within and node.module.startswith("pytest_gpumem.devices.virtual."):
                into += 1
            elif within and not is_inside and node.module.startswith("pytest_gpumem"):
                out[node.module] += 1
    return into, out.total(), len(out)


def used_once(files: dict[str, str]) -> str:
    """Return the share of functions that are private and used only once in their file."""
    functions = once = 0
    for path, text in files.items():
        if not path.endswith(".py"):
            continue
        nodes = list(ast.walk(ast.parse(text)))
        uses = Counter(node.attr for node in nodes if isinstance(node, ast.Attribute))
        uses.update(
            node.id
            for node in nodes
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        )
        names = [
            node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        ]
        functions += len(names)
        once += sum(bool(re.match(r"_[^_]", name)) and uses[name] <= 1 for name in names)
    return f"{100 * once / functions:.1f} % of {functions}"


def walks(checkout: Path) -> dict[str, dict[str, list[int]]]:
    """Return the files, moves and calls of each test, in the package and in its kernel."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "test_walked.py").write_text(SUITE, encoding="utf-8")
        (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\n", encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:xdist"]
        environment = {**os.environ, "PYTHONPATH": str(checkout), "WALKS": str(folder / "walks")}
        for options, grown in ((["--gpumem-update-baselines"], ""), ([], "1")):
            subprocess.run(
                [*command, "--gpumem-device=virtual", *options],
                cwd=folder,
                env={**environment, "GROWN": grown},
                stdout=sys.stderr,
                check=False,
            )
            shutil.copy(Path(__file__).with_name("walk.py"), folder / "conftest.py")
        lines = (folder / "walks").read_text(encoding="utf-8").splitlines()
    told = dict(json.loads(each) for each in lines)
    return {name: parts for name, parts in told.items() if name.endswith("[2]")}


def main() -> None:
    """Print lines, imports and walks, with a column for each checkout."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--checkout", action="append", default=[], type=Path, help="another one")
    checkouts = [*(path.resolve() for path in parser.parse_args().checkout), ROOT]
    columns: list[dict[str, object]] = []
    heads = []
    for checkout in checkouts:
        git = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
        heads.append(subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip())
        files = sources(checkout)
        rooms, numbers = Counter[str](), Counter[str]()
        for path, text in files.items():
            rooms[room(path)] += text.count("\n")
            numbers[room(path)] += 1
        into, out, modules = across_the_facade(files)
        base = ast.parse(files["devices/base.py"])
        device = next(
            node for node in base.body if isinstance(node, ast.ClassDef) and node.name == "Device"
        )
        members = (ast.FunctionDef, ast.AnnAssign, ast.Assign)
        rows: dict[str, object] = {
            "lines": rooms.total(),
            **{f"lines of {name}": lines for name, lines in sorted(rooms.items())},
            "lines of the kernel": sum(rooms[name] for name in KERNEL),
            "files of the kernel": sum(numbers[name] for name in KERNEL),
            "functions that are private and used once": used_once(files),
            "imports into the virtual GPU, not of its facade": into,
            "imports out of it": out,
            "modules that these go to": modules,
            "members of Device": sum(isinstance(node, members) for node in device.body),
        }
        for name, parts in walks(checkout).items():
            for part, counts in parts.items():
                rows[f"{name.partition('[')[0]}, {part}: files, moves, calls"] = ", ".join(
                    str(count) for count in counts
                )
        columns.append(rows)
    names = dict.fromkeys(name for column in columns for name in column)
    rows_of_all = [[name, *(column.get(name, "") for column in columns)] for name in names]
    publish("house", f"{line()}\n{table(rows_of_all, ['', *heads], 'lr')}")


if __name__ == "__main__":
    main()
