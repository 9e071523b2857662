"""A part's peak that stands on what the code before the part allocated or reserved."""

import pytest
from helpers.marked_sessions import one_test

EARLIER = ["with gpu_memory.measure('first'):", "    x = [mib(100) for _ in range(6)]; del x"]


TOLD = "the allocator had reserved 600.00 MiB before the part began, and the part took no more"


def parts(suite, *second, limit="max_gib=0.25", **more):
    """A session of a test whose second part comes after one that reserved 600 MiB."""
    body = [*EARLIER, f"with gpu_memory.measure('second', {limit}):", *map("    {}".format, second)]
    mark = more.pop("mark", "baseline=False")
    return one_test(suite, *body, fixtures="gpu_memory", mark=mark, **more)


def test_a_part_that_took_nothing_is_told_whose_memory_its_limit_met(suite):
    session = parts(suite, "mib(50)")
    assert session.outcomes == {"failed": 1}
    assert TOLD in session.flat
    assert "fragmented" not in session.flat


def test_a_part_that_grew_by_the_memory_of_earlier_code_is_told_so(suite):
    few = parts(suite, "mib(50)", limit="", mark="", args=["--gpumem-update-baselines"])
    assert few.outcomes == {"passed": 1}
    source = (suite.path / "test_it.py").read_text(encoding="utf-8")
    session = suite.run(source=source.replace("range(6)", "range(9)"))
    assert session.outcomes == {"failed": 1}
    assert TOLD.replace("600", "900") in session.flat


LIMIT = "max_reserved_gib=0.25"


@pytest.mark.parametrize(
    ("second", "limit"),
    [
        (["mib(700)"], "max_allocated_gib=0.25"),
        (["mib(700)"], "max_gib=0.25"),  # it runs out of memory
        (
            [
                "mib(50)",
                "with gpu_memory.measure('second', max_reserved_gib=0.25):",
                "    mib(900)",
            ],
            "max_reserved_gib=0.25",
        ),
    ],
)
def test_a_part_that_takes_memory_is_told_nothing_of_that(suite, second, limit):
    session = parts(suite, *second, limit=limit)
    assert session.outcomes == {"failed": 1}
    assert "before the part began" not in session.flat


BEFORE = """
@pytest.fixture(scope="module")
def loaded():
    yield mib(80)

@pytest.mark.gpu_memory(baseline=False)
def test_it(gpu_memory{fixture}):
    kept = mib(256)
    with gpu_memory.measure("a") as a:
        mib(256)
    with gpu_memory.measure("b", {limit}):
        {body}
"""


def before(suite, limit, body="mib(64)", fixture=""):
    return suite.run(source=BEFORE.format(limit=limit, body=body, fixture=fixture))


@pytest.mark.parametrize("limit", ["less_than='0.6 * a'", "at_most='300MiB'"])
def test_memory_allocated_before_a_part_is_named_with_its_line(suite, limit):
    """An emptied cache would not lower it."""
    session = before(suite, limit)
    assert session.outcomes == {"failed": 1}
    sentence = "256.00 MiB of the peak were allocated when the part began: 256.00 MiB at"
    assert f"{sentence} test_it.py:" in session.flat
    assert "empty_cache" not in session.flat


def test_memory_of_a_fixture_counts_as_allocated_before_a_part(suite):
    session = before(suite, "at_most='300MiB'", fixture=", loaded")
    assert "336.00 MiB of the peak were allocated when the part began" in session.flat


@pytest.mark.parametrize(
    ("limit", "body"),
    [
        ("at_most='300MiB'", "del kept; mib(320)"),  # it was freed before the peak
        ("at_most='200MiB'", "del kept; mib(512)"),
        ("at_most='100MiB'", "mib(512)"),  # the part is over the limit without it
        ("at_most='before + 32MiB'", "mib(64)"),
    ],
)
def test_memory_from_before_a_part_that_is_no_reason_is_not_named(suite, limit, body):
    session = before(suite, limit, body)
    assert session.outcomes == {"failed": 1}
    assert "when the part began" not in session.flat
