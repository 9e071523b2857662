"""The record of this project's own tests without NVIDIA's packages."""

import importlib

import pytest
from helpers.paths import ROOT

ROWS = ["devices", "devices/.", "devices/test_a.py", "devices/sharing", "devices/virtual/test_b.py"]
OUTPUT = """
....F.s
SKIPPED [2] tests/devices/test_a.py:7: needs Triton
SKIPPED [1] tests/helpers/left_out.py:40: needs Triton
FAILED tests/devices/test_a.py::test_one[a-b] - assert 1 == 2
ERROR tests/devices/test_a.py::test_two
==== 1 failed, 5 passed, 3 skipped, 1 error in 2.51s (0:00:02) ====
"""


@pytest.fixture
def module(monkeypatch):
    """The module; it is imported in a test alone, as benchmarks are not installed."""
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.fidelity.light_suite")


def test_what_failed_and_why_others_were_skipped_is_told(module):
    assert module.came_of(OUTPUT) == [
        "1 failed, 5 passed, 3 skipped, 1 error",
        "  failed: tests/devices/test_a.py::test_one[a-b]",
        "  failed: tests/devices/test_a.py::test_two",
        "  3 skipped: needs Triton",
    ]
    assert module.came_of("Segmentation fault") == ["did not come to an end"]


@pytest.mark.parametrize(
    ("folder", "replaced"),
    [
        ("devices", ROWS[1:]),
        ("devices/.", ["devices/test_a.py"]),
        ("devices/virtual/.", ["devices/virtual/test_b.py"]),
        ("devices/sharing", []),
        (".", []),
    ],
)
def test_a_folder_s_run_replaces_the_rows_of_what_is_in_it(module, folder, replaced):
    assert [name for name in ROWS if module.holds(folder, name)] == replaced
