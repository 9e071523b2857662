"""The C sources of the virtual GPU, and the compiler that tests build them with."""

from __future__ import annotations

import os
import shutil

import pytest

from helpers.paths import ROOT

NATIVE = ROOT / "pytest_gpumem" / "devices" / "virtual" / "native"
SOURCES = sorted(NATIVE.glob("*/*.c"))


def compiler() -> list[str]:
    """Return $CC, or the first of cc and gcc, as a command; skips where there is none."""
    name = os.environ.get("CC", "").split() or [shutil.which("cc") or shutil.which("gcc") or ""]
    if not name[0]:
        pytest.skip("no C compiler")
    return name
