"""Tests selected by the card that their baselines fit."""

from __future__ import annotations

import re

SOURCE = """
def test_plain(): pass

@pytest.mark.gpu_memory
def test_small(): mib(100)

@pytest.mark.gpu_memory
def test_large(): mib(20 * 1024)

@pytest.mark.gpu_memory
def test_middle(): mib(200)
"""
NEW = "\n@pytest.mark.gpu_memory\ndef test_new(): mib(1)\n"


def passed(session):
    return re.findall(r"::test_(\w+) PASSED", session.out)


def test_the_selection_goes_by_baselines(suite):
    assert suite.run("--gpumem-update-baselines", source=SOURCE).ret == 0
    suite.write("test_it.py", SOURCE + NEW)
    session = suite.run("--gpumem-select-fits=t4", "-v")
    assert session.outcomes == {"passed": 2, "deselected": 3}
    assert passed(session) == ["small", "middle"]
    sentence = (
        "gpumem: 2 of 4 marked tests fit a T4 according to their baselines; 1 without baseline "
        "left out"
    )
    assert sentence in session.out
    suite.write("pytest.ini", "[pytest]\ngpumem_select_fits = L40S")
    session = suite.run("-v")
    assert passed(session) == ["small", "large", "middle"]
    listed = suite.run("--co", "-q", "--gpumem-select-fits=T4").out
    assert "test_large" not in listed
    assert listed.index("test_small") < listed.index("test_middle")
