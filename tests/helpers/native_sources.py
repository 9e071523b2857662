"""The C sources of the virtual GPU, and the compiler that tests build them with."""

from __future__ import annotations

import os
import runpy
import shutil
from typing import TYPE_CHECKING

import pytest
import setuptools

from helpers.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

NATIVE = ROOT / "pytest_gpumem" / "devices" / "virtual" / "native"
SOURCES = sorted(NATIVE.glob("*/*.c"))


def compiler() -> list[str]:
    """Return the C compiler's command: $CC, cc or gcc; skip the test if there is none."""
    name = os.environ.get("CC", "").split() or [shutil.which("cc") or shutil.which("gcc") or ""]
    if not name[0]:
        pytest.skip("no C compiler")
    return name


def write_listed_source(folder: Path) -> Path:
    """Write the C source that setup.py generates from the lists of functions; return its path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(setuptools, "setup", lambda **_: None)
        source = runpy.run_path(str(ROOT / "setup.py"))["listed_source"]()
    path = folder / "listed.c"
    path.write_text(source)
    return path
