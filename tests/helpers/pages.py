"""Read code blocks and tables of the documents' pages, and run commands in a project folder."""

from __future__ import annotations

import os
import re
import subprocess
from types import SimpleNamespace

from helpers.paths import ROOT
from helpers.warm import HANGS, warm_python

DOCS = ROOT / "docs"
PAGES = tuple(sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")))
"""all pages of the documentation"""
FOREIGN = ("CI", "BUILD_NUMBER", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE")
"""variables of CI that change what pytest or the plugin prints; removed for commands of pages"""


def read(page):
    """The text of a page of docs, or of a document in the root folder."""
    path = DOCS / page
    return (path if path.exists() else ROOT / page).read_text(encoding="utf-8")


def blocks(page, language):
    """The page's code blocks in one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", read(page), re.MULTILINE | re.DOTALL)


def files(page, language="python"):
    """The code blocks in one language, by the file name in a comment on the first line.

    If several blocks have the same name, the second one's key is name#2, and so on.
    """
    named = {}
    for block in blocks(page, language):
        name = block.partition("\n")[0].removeprefix("# ")
        number = sum(key.partition("#")[0] == name for key in named) + 1
        named[name if number == 1 else f"{name}#{number}"] = block
    return named


def table(page, number=0):
    """The rows of a page's table as lists of cells, without backticks; the first table is 0."""
    tables = re.findall(r"(?:^\|.*\n)+", read(page), re.MULTILINE)
    rows = tables[number].splitlines()[2:]
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]


def flat(text):
    return " ".join(text.split())


def shows(output, text):
    """Whether an output contains all lines of a text, in order."""
    position = 0
    for line in filter(None, text.splitlines()):
        position = output.find(line, position)
        if position == -1:
            return False
    return True


def changed(text, diff):
    """A program to which a page's diff was applied."""
    lines = diff.splitlines(keepends=True)
    old = "".join(line[1:] for line in lines if line[0] in " -")
    new = "".join(line[1:] for line in lines if line[0] in " +")
    assert text.count(old) == 1
    return text.replace(old, new)


class Place:
    """A project's folder and a shell in it, whose pytest, gpumem and python are this process's.

    Its pip only records its arguments in ``asked``: all packages are installed, and there is no
    network.
    """

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.asked = folder.parent / "pip.txt"
        self._bin = folder.parent / "bin"
        self._bin.mkdir(exist_ok=True)
        python = warm_python()
        for name, command in {
            "python": f'exec "{python}" "$@"',
            "pytest": f'exec "{python}" -m pytest "$@"',
            "gpumem": f'exec "{python}" -m pytest_gpumem.cli.main "$@"',
            "pip": f'echo "$@" >> "{self.asked}"',
        }.items():
            path = self._bin / name
            path.write_text(f"#!/bin/sh\n{command}\n", encoding="utf-8")
            path.chmod(0o755)

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def have_light_print(self, text):
        """Make ``gpumem light`` print a text, and record its arguments, as pip does."""
        path = self._bin / "gpumem"
        head, command = path.read_text(encoding="utf-8").splitlines()
        asked = f'echo "gpumem $@" >> "{self.asked}"'
        light = f'if [ "$1" = light ]; then {asked}; echo "{text}"; exit; fi'
        path.write_text(f"{head}\n{light}\n{command}\n", encoding="utf-8")

    def sh(self, command, **environment):
        """Run a command as GitHub does without ``shell:``; return status and output."""
        inherited = {name: value for name, value in os.environ.items() if name not in FOREIGN}
        plugins = "-p no:cacheprovider -p no:hypothesispytest -p no:randomly -p no:asyncio"
        done = subprocess.run(
            ["bash", "-e", "-c", command],
            cwd=self.folder,
            env={
                **inherited,
                "PATH": f"{self._bin}{os.pathsep}{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
                "PYTEST_ADDOPTS": plugins,
                "COLUMNS": "80",
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=HANGS,
            check=False,
        )
        return SimpleNamespace(ret=done.returncode, out=done.stdout, err=done.stderr)


def on_virtual(command):
    """A command for a real GPU, changed to run on the virtual GPU."""
    return command.replace("--gpumem-device=cuda", "--gpumem-device=virtual")
