"""What tests of docs/recipes share: a page's blocks, and CI's jobs run as a runner runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from types import SimpleNamespace

from helpers.paths import ROOT

RECIPES = ROOT / "docs/recipes"
SLOW = 240
"""seconds that a command of a recipe may take"""
FOREIGN = ("CI", "BUILD_NUMBER", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE")
"""variables of whoever runs these tests, which pytest or the plugin heed"""


def blocks(page, language):
    """The page's blocks of one language, in their order."""
    text = (RECIPES / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def files(page, language="python"):
    """The same by the file's name, which stands in a comment on the first line.

    Of several of one name, the later ones come under name#2 and so on.
    """
    found = {}
    for block in blocks(page, language):
        name = block.partition("\n")[0].removeprefix("# ")
        number = sum(it.partition("#")[0] == name for it in found) + 1
        found[name if number == 1 else f"{name}#{number}"] = block
    return found


class Place:
    """A project's folder and a shell in it, whose pytest, gpumem and python are those of here.

    pip only writes down what it was asked for: all is installed, and there is no network.
    """

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.asked = folder.parent / "pip.txt"
        self._bin = folder.parent / "bin"
        self._bin.mkdir(exist_ok=True)
        for name, command in {
            "python": f'exec "{sys.executable}" "$@"',
            "pytest": f'exec "{sys.executable}" -m pytest "$@"',
            "gpumem": f'exec "{sys.executable}" -m pytest_gpumem.cli.main "$@"',
            "pip": f'echo "$@" >> "{self.asked}"',
        }.items():
            path = self._bin / name
            path.write_text(f"#!/bin/sh\n{command}\n", encoding="utf-8")
            path.chmod(0o755)

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

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
            timeout=SLOW,
            check=False,
        )
        return SimpleNamespace(ret=done.returncode, out=done.stdout, err=done.stderr)


def on_virtual(command):
    """A command for a GPU, adapted to a machine that has none."""
    return command.replace("--gpumem-device=cuda", "--gpumem-device=virtual")
