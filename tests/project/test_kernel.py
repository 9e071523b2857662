"""The kernel, which measures and judges one test: what it does not know."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest_gpumem

PACKAGE = Path(pytest_gpumem.__file__).parent
MEASURING = ("baselines", "judge", "meter", "testrun")
VIRTUAL = PACKAGE / "devices" / "virtual"
OF_THE_FACADE = {
    "meter/block.py",  # use_virtual_gpu(), which names it
    "testrun/pipeline.py",  # why a test took no memory
}
"""files that ask the virtual GPU's facade"""
OF_CUDNN = {
    "meter/allocator.py",  # its version is of the provenance
    "meter/dropout_state.py",  # PyTorch keeps its state of dropout: each test makes its own
    "testrun/timed_plans.py",  # plans that it timed: the test runs again
    "judge/verdict.py",  # the tolerance where it cannot be asked
}


def files(*rooms):
    return [
        path
        for room in rooms
        for path in sorted((PACKAGE / room).rglob("*.py"))
        if not path.is_relative_to(VIRTUAL)
    ]


def with_code(matches):
    """The measuring files with a node of code that matches; docstrings are none."""
    return {
        path.relative_to(PACKAGE).as_posix()
        for path in files(*MEASURING)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if matches(node)
    }


def test_code_that_measures_does_not_know_which_gpu_it_has():
    """Rule 8 of docs/architecture.md."""
    kinds = {"cuda", "virtual", "accelerator", "xpu", "mps"}
    assert not with_code(
        lambda node: (
            isinstance(node, ast.Compare)
            and any(isinstance(it, ast.Constant) and it.value in kinds for it in ast.walk(node))
        )
    )
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


OF_COMPILERS = {"meter/compile_watch.py"}  # their memory is no step's


def test_it_has_no_word_of_operators_and_compilers():
    words = re.compile(r"\b(aten|Inductor|Triton)\b|cuDNN")
    found: dict[str, set[str]] = {}
    for path in files(*MEASURING, "plugin"):
        for word in words.finditer(path.read_text(encoding="utf-8")):
            found.setdefault(word[0], set()).add(path.relative_to(PACKAGE).as_posix())
    assert found.pop("cuDNN") == OF_CUDNN
    assert found == {"Inductor": OF_COMPILERS, "aten": {"meter/dropout_state.py"}}
