"""The kernel, which measures and judges one test: what it does not know."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest_gpumem

PACKAGE = Path(pytest_gpumem.__file__).parent
MEASURING = ("baselines", "judge", "meter", "testrun")
OF_THE_FACADE = {
    "meter/block.py",  # use_virtual_gpu(), which names it
    "testrun/pipeline.py",  # why a test took no memory
}
"""files that ask the virtual GPU's facade"""


def with_code(matches):
    """The measuring files with a node of code that matches; docstrings are none."""
    return {
        path.relative_to(PACKAGE).as_posix()
        for room in MEASURING
        for path in sorted((PACKAGE / room).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if matches(node)
    }


def test_few_files_that_measure_import_a_kind_of_gpu():
    """Rule 8 of docs/architecture.md; devices/virtual/test_facade.py has questions for the kind."""
    asks = ast.ImportFrom
    facade = with_code(
        lambda node: (
            isinstance(node, asks)
            and node.module == "pytest_gpumem.devices"
            and any(name.name == "virtual" for name in node.names)
        )
    )
    assert facade == OF_THE_FACADE
    of_kinds = {"pytest_gpumem.devices.cuda", "pytest_gpumem.devices.accelerator"}
    assert not with_code(lambda node: isinstance(node, asks) and node.module in of_kinds)
