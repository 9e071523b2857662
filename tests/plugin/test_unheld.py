"""The session's last lines name the tests that passed with nothing to compare them with."""

from __future__ import annotations

import pytest

SUITE = """
    @pytest.mark.gpu_memory
    @pytest.mark.parametrize("number", range({number}))
    def test_it(number): mib(10)

    @pytest.mark.gpu_memory(max_gib=1)
    def test_limited(): mib(10)

    @pytest.mark.gpu_memory(baseline=False, max_leak_mib=1)
    def test_leak(): mib(10)

    @pytest.mark.gpu_memory
    def test_parts(gpu_memory):
        with gpu_memory.measure("part", max_gib=1):
            mib(10)

    def test_unmarked(): pass
"""


@pytest.mark.parametrize(
    ("number", "line"),
    [
        (1, "1 test held to no baseline and no size limit: test_it.py::test_it[0]"),
        (
            5,
            (
                "5 tests held to no baseline and no size limit: test_it.py::test_it[0], "
                "test_it.py::test_it[1], test_it.py::test_it[2], 2 more"
            ),
        ),
    ],
)
def test_few_are_named_and_of_many_the_first(suite, number, line):
    session = suite.run(source=SUITE.format(number=number))
    assert session.ret == 0
    *_, last, command, _hint = session.flat.split("gpumem: ")
    assert last.strip() == line
    assert command.startswith("to record baselines: pytest")


def test_a_test_with_a_baseline_is_not_named(suite):
    session = suite.run("--gpumem-update-baselines", source=SUITE.format(number=2))
    assert "held to no baseline" not in session.flat
    assert "held to no baseline" not in suite.run().flat


def test_declining_a_baseline_is_named_too(suite):
    session = suite.run(
        "--gpumem-update-baselines",
        source="@pytest.mark.gpu_memory(baseline=False)\ndef test_free(): mib(10)",
    )
    assert "1 test held to no baseline and no size limit: test_it.py::test_free" in session.flat


def test_a_failed_test_is_not_named(suite):
    """Its report says why it failed."""
    session = suite.run("--gpumem-missing-baseline=fail", source=SUITE.format(number=1))
    assert session.ret == 1
    assert "held to no baseline" not in session.flat
