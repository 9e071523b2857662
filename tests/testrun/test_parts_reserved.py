"""What a part has reserved: the allocator keeps what the code before the part took."""

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


@pytest.mark.parametrize(
    ("second", "limit"),
    [
        (["mib(700)"], "max_allocated_gib=0.25"),
        (["mib(700)"], "max_gib=0.25"),  # it runs out of memory
        (
            ["mib(50)", "with gpu_memory.measure('second'):", "    mib(900)"],
            "max_reserved_gib=0.25",
        ),
    ],
)
def test_a_part_that_takes_memory_is_told_nothing_of_that(suite, second, limit):
    session = parts(suite, *second, limit=limit)
    assert session.outcomes == {"failed": 1}
    assert "before the part began" not in session.flat
