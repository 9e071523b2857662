"""Tests outside of pytest's root folder: pytest gives two of them one nodeid."""

from __future__ import annotations

SOURCE = """
import pytest, torch

@pytest.mark.gpu_memory
def test_it():
    kept = torch.empty(SIZE << 20, dtype=torch.uint8, device="cuda")
"""


def test_each_has_a_result_and_a_baseline_of_its_own(suite):
    suite.write("root/pytest.ini", "[pytest]")
    suite.write("one/test_x.py", SOURCE.replace("SIZE", "10"))
    suite.write("two/test_x.py", SOURCE.replace("SIZE", "30"))
    options = ("--rootdir=root", "-c", "root/pytest.ini", "--import-mode=importlib", "one", "two")
    session = suite.run("--gpumem-update-baselines", *options)
    assert session.outcomes == {"passed": 2}
    assert "gpumem: baselines: 2 created" in session.flat
    peaks = {name: allocated for name, (allocated, _) in suite.baselined("root/baselines").items()}
    assert peaks == {"../one/test_x.py::test_it": 10, "../two/test_x.py::test_it": 30}
    for path in suite.baselines("root/baselines"):
        assert path.startswith("virtual-H100/%2E%2E/")
    session = suite.run(*options)
    assert "gpumem: 2 ok" in session.flat
    assert "the test is outside pytest's root folder: its baseline is" in session.flat
    assert "%2E%2E/one/test_x.json" in session.out.replace("\n", "").replace(" ", "")
