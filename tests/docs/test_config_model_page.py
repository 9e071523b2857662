"""The page of ``gpumem model`` shows what the command prints."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest
from helpers.pages import blocks, shows
from helpers.warm import HANGS

PAGE = "how-to/outside-pytest.md"


def test_the_page_shows_what_is_printed(tmp_path):
    pytest.importorskip("transformers")
    versions = [version(name).partition("+")[0] for name in ("torch", "transformers")]
    if versions != ["2.15.0", "5.23.0"]:
        pytest.skip("the page's figures are torch 2.15.0's and transformers 5.23.0's")
    (text,) = blocks(PAGE, "json")
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    command = next(it for it in blocks(PAGE, "console") if "gpumem model" in it)
    ended = subprocess.run(
        # A fork of the warm process would name a line of that process.
        [
            sys.executable,
            "-m",
            "pytest_gpumem.cli.main",
            *command.removeprefix("$ gpumem ").split(),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANGS,
    )
    assert shows(ended.stdout, next(it for it in blocks(PAGE, "text") if "inference" in it))
