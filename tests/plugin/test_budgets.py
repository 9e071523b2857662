"""Budgets: running out of memory for real, plain limits, cards."""

from __future__ import annotations

import pytest

from pytest_gpumem.devices.cards import find_card
from pytest_gpumem.sizes import MIB

STEP = """
def step(count=5):
    return [mib(300) for _ in range(count)]
"""


def test_running_out_of_memory_is_a_verdict_with_its_figures_and_no_traceback(suite):
    session = suite.run(
        source=STEP
        + """
@pytest.mark.gpu_memory(max_gib=1, batch_size=64)
def test_it():
    print("said", "once")
    step()
"""
    )
    assert session.outcomes == {"failed": 1}
    assert (
        "out of memory: batch size 64 does not fit in max_gib=1 (1024.00 MiB): it asked for "
        "300.00 MiB more when 900.00 MiB were allocated, 900.00 MiB reserved; it needs 1500.00 MiB"
    ) in session.flat
    assert "at test_it.py:" in session.flat
    assert "declare max_gib=1.47" in session.flat
    assert "Traceback" not in session.out
    assert "def test_it" not in session.out
    assert session.out.count("said once") == 1  # what the second run prints is not shown
    assert "FAILED test_it.py::test_it - out of memory: needs 1500.00 MiB, does not" in session.flat
    assert "emptied its cache" not in session.out
    assert session.table["test_it"] == {
        "allocated": "1500.00",
        "reserved": "1500.00",
        "change": "n/a",
        "budget": "147%",
        "verdict": "out of memory",
    }


def test_a_step_that_just_fits_passes_and_one_more_block_does_not(suite):
    session = suite.run(
        source="""
        @pytest.mark.gpu_memory(max_gib=1)
        def test_fits():
            mib(1024)

        @pytest.mark.gpu_memory(max_gib=1)
        def test_does_not():
            mib(1026)
        """
    )
    assert session.outcomes == {"passed": 1, "failed": 1}
    assert session.figures() == {"test_fits": (1024, 1024), "test_does_not": (1026, 1026)}
    assert session.verdicts()["test_does_not"] == "out of memory"


FIXTURES = """
log = []

@pytest.fixture(scope="module")
def wide():
    log.append("+wide")
    yield mib(200)
    log.append("-wide")

@pytest.fixture
def outer():
    log.append("+outer")
    yield
    log.append("-outer")

@pytest.fixture
def inner(outer):
    log.append("+inner")
    yield mib(600)
    log.append("-inner")
"""


def test_memory_made_in_fixtures_counts_and_the_second_run_tears_everything_down(suite):
    session = suite.run(
        "-s",
        source=FIXTURES
        + """
@pytest.mark.gpu_memory(max_gib=1)
def test_call(wide, inner):
    log.append("call")
    mib(600)

def test_log():
    print("LOG", *log)
""",
    )
    assert session.outcomes == {"failed": 1, "passed": 1}
    assert "it needs 1400.00 MiB" in session.flat
    once = "+outer +inner call -inner -outer"
    assert f"LOG +wide {once} {once}" in session.out


def test_running_out_of_memory_in_a_fixture_is_the_same_verdict(suite):
    session = suite.run(
        "-s",
        source=FIXTURES
        + """
@pytest.mark.gpu_memory(max_gib=0.5, batch_size=4)
def test_setup(wide, inner):
    log.append("call")

def test_log():
    print("LOG", *log)
""",
    )
    assert session.outcomes == {"errors": 1, "passed": 1}
    assert "batch size 4 does not fit in max_gib=0.5" in session.flat
    assert "it needs 800.00 MiB" in session.flat
    assert "LOG +wide +outer +inner -outer +outer +inner call -inner -outer" in session.out


def test_a_wide_fixture_that_did_not_fit_is_set_up_anew_for_the_next_test(suite):
    """pytest would raise the first test's error in every other test that uses the fixture."""
    session = suite.run(
        source="""
        @pytest.fixture(scope="module")
        def wide():
            return mib(20_000)

        @pytest.mark.gpu_memory(card="T4")
        def test_too_small(wide): pass

        @pytest.mark.gpu_memory(card="H100")
        def test_enough(wide): pass

        @pytest.mark.gpu_memory(card="T4")
        def test_too_small_again(): mib(100)
        """
    )
    assert session.outcomes == {"errors": 1, "passed": 2}
    assert "it needs 19.53 GiB" in session.flat
    assert session.verdicts() == {
        "test_too_small": "out of memory",
        "test_enough": "no baseline",
        "test_too_small_again": "no baseline",
    }
    assert session.figures()["test_enough"] == (20_000, 20_000)
    assert session.figures()["test_too_small_again"] == (100, 100)


def test_out_of_memory_that_is_expected_or_handled(suite):
    session = suite.run(
        "-rA",
        source=STEP
        + """
class Mine(Exception): pass

@pytest.mark.xfail(raises=torch.OutOfMemoryError, strict=True)
@pytest.mark.gpu_memory(max_gib=1)
def test_expected():
    step()

@pytest.mark.xfail(raises=Mine, strict=True)
@pytest.mark.gpu_memory(max_gib=1)
def test_expected_wrapped():
    try:
        step()
    except torch.OutOfMemoryError as error:
        raise Mine("my words") from error

@pytest.mark.gpu_memory(max_gib=1)
def test_raises():
    with pytest.raises(torch.OutOfMemoryError):
        step()

@pytest.mark.gpu_memory(max_gib=1)
def test_skips():
    try:
        step()
    except torch.OutOfMemoryError:
        pytest.skip("too small for this")

@pytest.mark.gpu_memory(max_gib=1)
def test_xfails():
    try:
        step()
    except torch.OutOfMemoryError:
        pytest.xfail("known")
""",
    )
    assert session.outcomes == {"xfailed": 3, "passed": 1, "skipped": 1}
    assert "too small for this" in session.out
    assert "caught 1 out-of-memory error" in session.flat
    assert session.verdicts() == {
        "test_expected": "out of memory (xfail)",
        "test_expected_wrapped": "out of memory (xfail)",
        "test_raises": "no baseline",
    }
    assert "2 out of memory (2 as expected)" in session.out


def test_out_of_memory_behind_another_error_or_in_a_testcase(suite):
    session = suite.run(
        source=STEP
        + """
import unittest

@pytest.mark.gpu_memory(max_gib=1)
def test_wrapped():
    try:
        step()
    except torch.OutOfMemoryError as error:
        raise ValueError("my own words") from error

@pytest.mark.gpu_memory(max_gib=1)
class TestCase(unittest.TestCase):
    def setUp(self):
        self.kept = mib(10)

    def test_case(self):
        step()

    def test_good(self):
        mib(40)

@pytest.mark.gpu_memory(max_gib=1)
class TestPlain:
    def test_kept_in_self(self):
        self.kept = mib(600)
        self.more = mib(500)
"""
    )
    assert session.outcomes == {"failed": 3, "passed": 1}
    assert session.verdicts() == {
        "test_wrapped": "out of memory",
        "TestCase::test_case": "out of memory",
        "TestCase::test_good": "no baseline",
        "TestPlain::test_kept_in_self": "out of memory",
    }
    assert session.figures() == {
        "test_wrapped": (1500, 1500),
        "TestCase::test_case": (1510, 1510),
        "TestCase::test_good": (50, 50),
        "TestPlain::test_kept_in_self": (1100, 1100),
    }
    assert "the test turned the out-of-memory error into ValueError: my own words" in session.flat
    # unittest keeps the error by itself, and would show PyTorch's.
    assert "TestCase::test_case - out of memory: needs 1510.00 MiB" in session.flat


def test_out_of_memory_with_no_budget_is_a_verdict(suite):
    session = suite.run(
        "--gpumem-card=T4",
        source="""
        @pytest.mark.gpu_memory(batch_size=8)
        def test_it():
            kept = [mib(5000) for _ in range(4)]
        """,
    )
    assert session.outcomes == {"failed": 1}
    assert "batch size 8 does not fit on T4 (14.44 GiB)" in session.flat
    assert "it needs 19.53 GiB" in session.flat


def test_what_cannot_run_again_still_has_its_verdict(suite):
    session = suite.run(
        source="""
        runs = []

        @pytest.mark.gpu_memory(max_gib=1)
        def test_it():
            runs.append(1)
            assert len(runs) == 1, "not a second time"
            mib(1500)
        """
    )
    assert session.outcomes == {"failed": 1}
    assert "0 B were allocated, 0 B reserved" in session.flat
    assert "needs" not in session.flat
    assert "not a second time" not in session.flat
    assert session.table["test_it"]["budget"] == ">100%"


@pytest.mark.parametrize("limit", ["max_allocated_gib", "max_reserved_gib"])
def test_a_plain_limit_is_judged_after_the_test_and_holds_at_its_boundary(suite, limit):
    session = suite.run(
        source=f"""
        @pytest.mark.gpu_memory({limit}=0.5)
        def test_at_it():
            mib(512)

        @pytest.mark.gpu_memory({limit}=0.5)
        def test_above():
            mib(514)
            print("went on")
        """
    )
    assert session.outcomes == {"passed": 1, "failed": 1}
    assert session.verdicts() == {"test_at_it": "no baseline", "test_above": "over budget"}
    peak = limit.split("_")[1]
    assert (
        f"over budget: peak {peak} of 514.00 MiB is 2.00 MiB over {limit}=0.5 (512.00 MiB)"
        in session.flat
    )
    assert "went on" in session.out


def usable(card):
    """MiB that a card has for a step, in whole segments of 2 MiB."""
    return find_card(card).usable_memory // (2 * MIB) * 2


@pytest.mark.parametrize(("card", "other"), [("H100", "T4"), ("T4", "H100")])
def test_a_card_is_enforced_whatever_the_session_has(suite, card, other):
    session = suite.run(
        f"--gpumem-card={card}",
        source=f"""
        @pytest.mark.gpu_memory(card="{other}")
        def test_fits(gpu_memory):
            assert gpu_memory.card == "{other}"
            mib({usable(other)})

        @pytest.mark.gpu_memory(card="{other}")
        def test_does_not():
            mib({usable(other) + 2})

        @pytest.mark.gpu_memory
        def test_of_the_session(gpu_memory):
            assert gpu_memory.card == "{card}"
            mib({usable(card)})
        """,
    )
    assert session.outcomes == {"passed": 2, "failed": 1}
    assert session.verdicts()["test_does_not"] == "out of memory"
    assert f"does not fit in card='{other}'" in session.flat
    assert session.table["test_of_the_session"]["device"] == f"virtual-{card}"


def test_the_tighter_of_card_and_max_gib_is_enforced(suite):
    session = suite.run(
        source="""
        @pytest.mark.gpu_memory(card="T4", max_gib=1)
        def test_max_gib():
            mib(1500)

        @pytest.mark.gpu_memory(card="T4", max_gib=20)
        def test_card():
            mib(16 * 1024)
        """
    )
    assert session.outcomes == {"failed": 2}
    assert "does not fit in max_gib=1" in session.flat
    assert "does not fit in card='T4'" in session.flat


CARDS = """
from pytest_gpumem.devices.cards import CARDS

@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("card", [
    pytest.param(c, marks=pytest.mark.gpu_memory(card=c)) for c in {cards}
])
def test_it(card, turn):
    model = torch.nn.Linear(1000, 1000, device="cuda")
    model(torch.zeros(8, 1000, device="cuda")).sum().backward()
    assert torch.cuda.get_device_properties(0).total_memory == CARDS[card].total_memory
"""


def test_several_cards_in_one_process_have_the_same_figures_in_any_order(suite):
    there = suite.run("-v", source=CARDS.format(cards=["H100", "T4", "V100-16GB"])).figures()
    back = suite.run("-v", source=CARDS.format(cards=["V100-16GB", "T4", "H100"])).figures()
    assert there == back
    assert len(there) == 6
    assert all(there[f"test_it[{c}-0]"] == there[f"test_it[{c}-1]"] for c in ["H100", "T4"])
    assert there["test_it[H100-0]"] > there["test_it[T4-0]"]  # Hopper's larger workspace
