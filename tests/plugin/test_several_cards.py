"""One test on several cards, and as several ranks."""

from __future__ import annotations

import pytest

STEP = """
@pytest.mark.gpu_memory(card=["T4", "l4", "A100-80GB"])
@pytest.mark.parametrize("gib", [8, 18])
def test_it(gib):
    mib(gib * 1024)
"""


def test_it_is_a_test_on_each_card_and_a_table_says_who_fits_where(suite):
    session = suite.run(source=STEP)
    assert session.outcomes == {"passed": 5, "failed": 1}
    assert "test_it.py::test_it[18-T4] - out of memory: needs " in session.out
    lines = [line for line in session.out.splitlines() if "GiB left on each card" in line]
    start = session.out.splitlines().index(lines[0])
    table = [line.rstrip() for line in session.out.splitlines()[start : start + 4]]
    assert table == [
        "GiB left on each card                 T4     L4  A100-80GB",
        "-----------------------  ---------------  -----  ---------",
        "test_it.py::test_it[8]              6.44  13.77      70.82",
        "test_it.py::test_it[18]  no, needs 18.00   3.77      60.82",
    ]


def test_each_card_has_its_own_baselines(suite):
    suite.run("--gpumem-update-baselines", "-k", "8 and not 18", source=STEP)
    found = sorted(path.parent.name for path in suite.path.glob("baselines/*/test_it.json"))
    assert found == ["virtual-A100-80GB", "virtual-L4", "virtual-T4"]


def test_the_option_runs_every_marked_test_on_each_card(suite):
    source = """
@pytest.mark.gpu_memory(card="T4")
def test_marked():
    mib(1024)

def test_by_its_fixture(gpu_memory):
    assert gpu_memory.card in {"L4", "H100"}
    mib(1)

def test_unmarked():
    pass
"""
    session = suite.run("--gpumem-cards=L4, h100", source=source)
    assert session.outcomes == {"passed": 5}
    assert "GiB left on each card" in session.out
    suite.pytester.makeini("[pytest]\ngpumem_cards = L4,H100\n")
    assert suite.run(source=source).outcomes == {"passed": 5}


def test_its_baselines_and_those_without_it_are_of_tests_that_are_there(suite):
    source = STEP.replace('(card=["T4", "l4", "A100-80GB"])', "").replace("[8, 18]", "[8]")
    assert suite.run("--gpumem-update-baselines", source=source).ret == 0
    assert suite.run("--gpumem-update-baselines", "--gpumem-cards=L4,H100").ret == 0
    for arguments in ([], ["--gpumem-cards=T4,L4"]):
        session = suite.run("--gpumem-stale=fail", *arguments)
        assert session.ret == 0
        assert "no test any more" not in session.out
        assert "that is gone" not in session.out


def test_a_card_that_nobody_knows(suite):
    session = suite.run(source=STEP.replace("l4", "Voodoo").replace("[8, 18]", "[8]"))
    assert session.outcomes == {"errors": 3}
    assert "no card has this name" in session.flat
    result = suite.pytester.runpytest_inprocess("--gpumem-cards=T4,Voodoo")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*--gpumem-cards=T4,Voodoo: no card has this name*"])


def test_in_a_unittest_test_case_it_is_refused(suite):
    session = suite.run(
        source="""
import unittest

@pytest.mark.gpu_memory(card=["T4", "L4"])
class TestIt(unittest.TestCase):
    def test_it(self):
        pass
"""
    )
    assert session.outcomes == {"errors": 1}
    assert "a method of a unittest.TestCase cannot run as several tests" in session.flat


RANKS = """
@pytest.mark.gpu_memory(world_size=4, ranks={ranks})
def test_it(gpu_memory):
    assert gpu_memory.world_size == 4
    mib(10 * (1 + gpu_memory.rank))
"""


def test_it_is_a_test_as_each_rank(suite):
    session = suite.run(source=RANKS.format(ranks='"all"'))
    assert session.figures() == {
        f"test_it[rank{rank}]": (10 * (1 + rank), 10 * (1 + rank)) for rank in range(4)
    }
    session = suite.run(source=RANKS.format(ranks="[3, 0]"))
    assert list(session.figures()) == ["test_it[rank3]", "test_it[rank0]"]
    session = suite.run(source=RANKS.format(ranks="[4]"))
    assert "rank must be below world_size (4)" in session.flat


def test_ranks_of_a_class_and_of_parameters(suite):
    session = suite.run(
        source="""
@pytest.mark.gpu_memory(world_size=2, ranks="all")
class TestIt:
    @pytest.mark.parametrize("x", ["a"])
    def test_it(self, x, gpu_memory):
        mib(2 + 2 * gpu_memory.rank)

    @pytest.mark.gpu_memory(ranks=None, rank=1)
    def test_one(self, gpu_memory):
        assert gpu_memory.rank == 1
"""
    )
    assert session.outcomes == {"passed": 3}
    assert "TestIt::test_it[a-rank1]" in session.out


def test_workers_split_them(suite):
    session = suite.run_warm("-n2", "--gpumem-cards=T4,L4", source=RANKS.format(ranks="[0, 1]"))
    assert session.outcomes == {"passed": 4}
    assert "GiB left on each card" in session.out


@pytest.mark.parametrize(
    ("first", "second", "head"),
    [
        ("card='T4'", "card='T4'", "gpumem: virtual GPU T4 (14.57 GiB, capability 7.5, 40 SMs)\n"),
        ("card='T4'", "card='L4'", "capability 8.9, 58 SMs); other tests name T4\n"),
        ("card='T4'", "", "gpumem: virtual GPU H100 ("),
        ("card='nonsense'", "", "gpumem: virtual GPU H100 ("),
    ],
)
def test_the_head_names_the_card_that_the_tests_name(suite, first, second, head):
    source = f"""
        @pytest.mark.gpu_memory({first})
        def test_a():
            mib(1)

        @pytest.mark.gpu_memory({second})
        def test_b():
            mib(1)
    """
    assert head in suite.run("--collect-only", source=source).out
