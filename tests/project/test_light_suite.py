"""The record of this project's own tests without NVIDIA's packages."""

import sys

import pytest
from helpers.paths import ROOT

sys.path.append(str(ROOT))  # benchmarks are not installed

from benchmarks.fidelity import light_suite

ROWS = ["devices", "devices/.", "devices/test_a.py", "devices/sharing", "devices/virtual/test_b.py"]
OUTPUT = """
....F.s
SKIPPED [2] tests/devices/test_a.py:7: needs Triton
SKIPPED [1] tests/helpers/left_out.py:40: needs Triton
FAILED tests/devices/test_a.py::test_one[a-b] - assert 1 == 2
ERROR tests/devices/test_a.py::test_two
==== 1 failed, 5 passed, 3 skipped, 1 error in 2.51s (0:00:02) ====
"""


def test_what_failed_and_why_others_were_skipped_is_told():
    assert light_suite.came_of(OUTPUT) == [
        "1 failed, 5 passed, 3 skipped, 1 error",
        "  failed: tests/devices/test_a.py::test_one[a-b]",
        "  failed: tests/devices/test_a.py::test_two",
        "  3 skipped: needs Triton",
    ]
    assert light_suite.came_of("Segmentation fault") == ["did not come to an end"]


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
def test_a_folder_s_run_replaces_the_rows_of_what_is_in_it(folder, replaced):
    assert [name for name in ROWS if light_suite.holds(folder, name)] == replaced
