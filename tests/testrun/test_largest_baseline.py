"""The largest value that fits, with a baseline: fewer than before is a regression."""

from __future__ import annotations

import json

import pytest

SOURCE = """
@pytest.mark.gpu_memory(max_gib=1)
def test_it(gpu_memory):
    largest = gpu_memory.largest(lambda size: mib(SIZE * size), ARGS)
    print("FOUND", largest.value)
    with pytest.raises(torch.OutOfMemoryError):  # max_gib holds again
        mib(1025)
"""


def source(size, arguments='baseline="batch"'):
    return SOURCE.replace("SIZE", str(size)).replace("ARGS", arguments)


def test_fewer_than_before_is_a_regression_and_more_an_improvement(suite):
    session = suite.run("-v", "--gpumem-update-baselines", source=source(20))
    assert session.outcomes == {"passed": 1}
    assert session.verdicts()["test_it (batch)"] == "recorded"
    (content,) = map(json.loads, suite.baselines().values())
    assert content["tests"]["test_it"]["parts"]["batch"]["largest"] == 51
    assert suite.run("-v").verdicts()["test_it (batch)"] == "ok"
    session = suite.run("--gpumem-json=a.json", source=source(21))
    assert session.outcomes == {"failed": 1}
    assert (
        "part batch: regressed: the largest value that fits changed from 51 to 48" in session.flat
    )
    assert "if this is intended, run" in session.flat
    result = json.loads((suite.path / "a.json").read_text())["results"][-1]
    assert (result["measurement"]["largest"], result["baseline"]["largest"]) == (48, 51)
    session = suite.run("-v", source=source(10))
    assert session.outcomes == {"passed": 1}
    assert session.verdicts()["test_it (batch)"] == "improved"
    assert suite.run("--gpumem-shrinkage=fail").outcomes == {"failed": 1}
    part = """
    @pytest.mark.gpu_memory(max_gib=1)
    def test_it(gpu_memory):
        with gpu_memory.measure("batch"):
            mib(20)
    """
    session = suite.run("-v", source=part)
    assert session.verdicts()["test_it (batch)"] == "incomparable"
    assert (
        "largest value changed from 51 to none" in suite.run("--gpumem-missing-baseline=fail").flat
    )


def test_headroom_stays_free(suite):
    for headroom, value in (("5%", 48), ("200 MiB", 41), ("5%, 200MiB", 41)):
        session = suite.run("-s", source=source(20, f"headroom={headroom!r}"))
        assert session.outcomes == {"passed": 1}
        assert f"FOUND {value}\n" in session.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ('baseline=" "', "this name is empty, or a part of the test has it"),
        ('headroom="100%"', "this headroom leaves nothing of 1024.00 MiB"),
        ('headroom="some"', "neither a percentage nor a size"),
    ],
)
def test_a_mistake_is_said(suite, arguments, words):
    session = suite.run(source=source(20, arguments))
    assert session.outcomes == {"failed": 1}
    assert words in session.flat
