"""Leaks: what a test still holds once it is torn down."""

from __future__ import annotations

import json
import re

import pytest
from helpers.marked_sessions import LEAKS, leaked


def test_what_a_global_list_keeps_is_a_leak_with_its_line_and_its_holder(suite):
    session = suite.run(source=LEAKS)
    assert session.outcomes == {"passed": 2, "errors": 1}
    assert session.verdicts() == {"test_leaks": "leaked", "test_after": "no baseline"}
    written = (suite.path / "test_it.py").read_text().splitlines()
    line = next(i for i, it in enumerate(written, 1) if "CACHE.append" in it)
    assert (
        f"leaked: 80.00 MiB still allocated after the test, of which test_it.py:{line} "
        "(test_leaks) 80.00 MiB in 5 blocks"
    ) in session.flat
    assert (
        "note: held by global variable CACHE of test_it.py (list of 5): 80.00 MiB in 5 blocks"
    ) in session.flat
    assert "note: a second run leaked 80.00 MiB more" in session.flat
    assert "ERROR test_it.py::test_leaks - leaked: 80.00 MiB still allocated" in session.flat


def test_a_leak_is_no_baseline(suite):
    session = suite.run("--gpumem-update-baselines", source=LEAKS)
    assert set(suite.baselined()) == {"test_it.py::test_after"}
    assert session.ret == 1


def test_workers_say_so_as_well(suite):
    pytest.importorskip("xdist")
    session = suite.run_warm("-n", "1", source=LEAKS)
    assert session.verdicts()["test_leaks"] == "leaked"


def test_as_much_as_is_declared_is_no_leak(suite):
    body = "KEPT.append(mib(8))"
    assert leaked(suite, body, head="KEPT = []", mark="max_leak_mib=8").outcomes == {"passed": 1}
    session = leaked(suite, body, head="KEPT = []", mark="max_leak_mib=7.5")
    assert session.outcomes == {"passed": 1, "errors": 1}
    assert "8.00 MiB still allocated after the test, max_leak_mib=7.5" in session.flat
    assert "write warmup=1 or max_leak_mib=8" in session.flat


def test_without_the_field_nothing_is_judged(suite):
    session = leaked(suite, "KEPT.append(mib(8))", head="KEPT = []", mark="")
    assert session.outcomes == {"passed": 1}


NO_LEAKS = {
    "context": ["torch.cuda.synchronize()"],
    "cublas_workspaces": ["x = torch.zeros(500, 500, device='cuda')", "x @ x"],
    "cudnn": ["torch.nn.Conv2d(3, 8, 3).cuda()(torch.zeros(2, 3, 32, 32, device='cuda'))"],
    "cached_blocks": ["del [mib(n) for n in (1, 30, 300)][:]"],
    "returned_loss": ["return torch.nn.Linear(500, 500).cuda()(torch.zeros(9, 500).cuda()).sum()"],
    "reference_cycle": ["class C: pass", "c = C()", "c.me, c.big = c, mib(40)"],
    "caught_error": [
        "def fails():",
        "    kept = mib(30)",
        "    raise ValueError",
        "with pytest.raises(ValueError):",
        "    fails()",
    ],
    "training": [
        "model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.ReLU()).cuda()",
        "adam = torch.optim.Adam(model.parameters())",
        "for _ in range(3):",
        "    model(torch.zeros(9, 300, device='cuda')).sum().backward()",
        "    adam.step()",
    ],
    "freed_afterwards": ["OLD.clear()", "kept = mib(3)"],
}


@pytest.mark.parametrize("name", NO_LEAKS)
@pytest.mark.filterwarnings("ignore")
def test_what_is_no_leak(suite, name):
    session = leaked(
        suite, *NO_LEAKS[name], head="pytestmark = pytest.mark.filterwarnings('ignore')\nOLD = []"
    )
    assert session.outcomes.pop("passed") == 1
    assert "errors" not in session.outcomes
    assert session.figures()["test_it"][0] > 0 or name == "context"


def test_neither_are_fixtures_nor_the_tests_own_instance(suite):
    session = suite.run(
        source="""
        @pytest.fixture
        def model():
            return torch.nn.Linear(500, 500).cuda()

        @pytest.fixture
        def dropped():
            kept = mib(7)
            yield kept

        @pytest.fixture(scope="module")
        def wide():
            return mib(70)

        @pytest.fixture(scope="session")
        def wider():
            return mib(30)

        @pytest.mark.gpu_memory(max_leak_mib=0)
        class TestIt:
            @pytest.fixture(autouse=True)
            def made(self):
                self.made = mib(12)

            def setup_method(self):
                self.held = mib(5)

            def test_fixtures(self, model, wide, wider, dropped):
                model(torch.zeros(9, 500, device="cuda")).sum().backward()
                self.kept = mib(20)

            def test_again(self, wide, request):
                request.getfixturevalue("wider")
                self.kept = mib(20)

        @pytest.mark.gpu_memory(max_leak_mib=0)
        def test_last(wide, wider):
            mib(4)
        """
    )
    assert session.outcomes == {"passed": 3}


def test_nor_is_what_a_failed_test_or_a_unittest_had(suite):
    session = suite.run(
        source="""
        import unittest

        @pytest.mark.gpu_memory(max_leak_mib=0)
        def test_fails():
            kept = mib(50)
            raise ValueError

        @pytest.mark.gpu_memory(max_leak_mib=0)
        def test_after():
            mib(3)

        @pytest.mark.gpu_memory(max_leak_mib=0)
        class TestCase(unittest.TestCase):
            def setUp(self):
                self.x = mib(11)

            def test_method(self):
                self.y = mib(12)
        """
    )
    assert session.outcomes == {"failed": 1, "passed": 2}


def test_a_wide_fixture_that_a_test_puts_something_in_is_one_in_any_order(suite):
    suite.write(
        "test_it.py",
        """
        @pytest.fixture(scope="module")
        def wide():
            return [mib(70)]

        @pytest.mark.gpu_memory(max_leak_mib=0)
        def test_puts(wide):
            wide.append(mib(6))

        @pytest.mark.gpu_memory
        def test_other(wide):
            pass
        """,
    )
    names = ["test_it.py::test_puts", "test_it.py::test_other"]
    for order in (names, names[::-1]):
        session = suite.run(*order)
        assert session.outcomes == {"passed": 2, "errors": 1}
        assert "leaked: 6.00 MiB still allocated" in session.flat


def test_a_cache_that_is_filled_once_is_said_and_left_out_after_a_warm_up(suite):
    head = "CACHE = {}\nLOG = []"
    body = ["if 'mask' not in CACHE:", "    CACHE['mask'] = mib(24)", "x = mib(3)"]
    session = leaked(suite, *body, head=head)
    assert "a second run leaked nothing more: the memory is kept once, like a cache" in session.flat
    session = leaked(suite, *body, head=head, mark="max_leak_mib=0, warmup=1")
    assert session.outcomes == {"passed": 1}
    session = leaked(suite, *body, "LOG.append(mib(2))", head=head, mark="max_leak_mib=0, warmup=1")
    assert session.outcomes == {"passed": 1, "errors": 1}
    assert "leaked: 2.00 MiB still allocated after the test" in session.flat
    assert re.search(r"of which test_it.py:\d+ \(mib\) 2.00 MiB in 1 block", session.flat)


def test_a_second_run_that_fails_leaves_the_warm_ups_share_in_it(suite):
    session = leaked(
        suite,
        "KEPT.append(mib(2))",
        "assert len(KEPT) < 3",
        head="KEPT = []",
        mark="max_leak_mib=0, warmup=1",
    )
    assert "leaked: 4.00 MiB still allocated after the test" in session.flat
    assert (
        "note: this includes the memory that the warm-up left: a second run did not pass"
        in session.flat
    )


def test_nothing_of_the_look_keeps_it_alive(suite):
    session = suite.run(
        source="""
        import gc
        CACHE = []

        @pytest.mark.gpu_memory(max_leak_mib=0)
        def test_leaks():
            CACHE.append(mib(16))

        def test_free():
            CACHE.clear()
            gc.collect()

        @pytest.mark.gpu_memory
        def test_after():
            mib(1)
        """
    )
    assert session.outcomes == {"passed": 3, "errors": 1}
    assert "left behind are not counted" not in session.flat


def test_each_device_is_judged(suite):
    session = leaked(
        suite,
        "KEPT.append(mib(3, 'cuda:1'))",
        "x = mib(30)",
        head="KEPT = []",
        mark="max_leak_mib=0, devices=2",
    )
    assert "leaked: 3.00 MiB on device 1 still allocated after the test" in session.flat


def test_fixtures_errors_at_tear_down_are_theirs_and_the_next_test_runs(suite):
    session = suite.run(
        source="""
        KEPT = []

        @pytest.fixture
        def breaks():
            yield
            raise RuntimeError("mine")

        @pytest.fixture(scope="module")
        def wide():
            yield
            print("WIDE ENDS")

        @pytest.mark.gpu_memory(max_leak_mib=0)
        def test_breaks(breaks, wide):
            KEPT.append(mib(1))

        @pytest.mark.gpu_memory(max_leak_mib=0)
        def test_leaks(wide):
            KEPT.append(mib(1))
        """
    )
    assert session.outcomes == {"passed": 2, "errors": 2}
    assert "RuntimeError: mine" in session.out
    assert "leaked: 1.00 MiB" in session.out
    assert "WIDE ENDS" in session.out


def test_an_expected_leak_is_marked_so(suite):
    """The call passes, and says so: only the tear-down is as expected."""
    session = suite.run(
        "-p", "no:cacheprovider", source=LEAKS.replace("@", "@pytest.mark.xfail\n@", 1)
    )
    assert session.outcomes == {"passed": 1, "xpassed": 1, "xfailed": 1}
    assert session.verdicts()["test_leaks"] == "leaked (xfail)"


def test_a_rerun_begins_anew(suite):
    pytest.importorskip("pytest_rerunfailures")
    session = suite.run(
        "--reruns=1",
        source="""
        KEPT = []

        @pytest.mark.gpu_memory(max_leak_mib=0)
        def test_it():
            if len(KEPT) < 2:
                KEPT.append(mib(4))
        """,
    )
    assert session.outcomes == {"passed": 2, "rerun": 1}  # the first call passed, its tear-down not
    assert session.verdicts() == {"test_it": "no baseline"}


def test_a_mistake_in_the_field_is_an_error_of_the_test(suite):
    for value, words in (
        ("-1", "max_leak_mib must be a plain number of MiB, 0 or more"),
        ("'8MiB'", "max_leak_mib must be a plain number of MiB"),
        ("True", "max_leak_mib must be a plain number of MiB"),
    ):
        session = leaked(suite, "pass", mark=f"max_leak_mib={value}")
        assert words in session.flat
    session = leaked(
        suite,
        "with gpu_memory.measure('a', max_leak_mib=1): pass",
        fixtures="gpu_memory",
        mark="",
    )
    assert "max_leak_mib is for the whole test, not for a part" in session.flat


def test_a_passing_test_has_its_baseline(suite):
    suite.run(
        "--gpumem-update-baselines",
        source="@pytest.mark.gpu_memory(max_leak_mib=0)\ndef test_it(): mib(9)",
    )
    (content,) = suite.baselines().values()
    assert json.loads(content)["tests"]["test_it"]["peak_allocated"] == [9 << 20]
    assert suite.run().verdicts() == {"test_it": "ok"}


def test_a_leak_at_the_address_of_memory_that_an_earlier_test_left_is_named(suite):
    """The earlier test's memory has gone back to the GPU, which gives its addresses again."""
    session = suite.run(
        "-v",
        "-p",
        "no:randomly",
        source="""
        LEFT, KEPT = [], []

        @pytest.mark.gpu_memory
        def test_leaves():
            LEFT.append(mib(40))

        @pytest.mark.gpu_memory(max_leak_mib=0)
        def test_leaks():
            LEFT.clear()
            torch.cuda.empty_cache()
            KEPT.append(mib(40))
        """,
    )
    assert session.verdicts()["test_leaks"] == "leaked", session.out
    assert "global variable KEPT" in session.flat, session.out


BASELINED = """
import os

KEPT = []

@pytest.mark.gpu_memory(max_leak_mib=0)
def test_keeps():
    block = mib(9)
    KEPT.extend([block] if "LEAK" in os.environ else [])
"""


def test_a_leak_of_a_test_with_a_baseline_counts_as_compared(suite, monkeypatch):
    assert suite.run("--gpumem-update-baselines", source=BASELINED).outcomes == {"passed": 1}
    monkeypatch.setenv("LEAK", "1")
    session = suite.run("--gpumem-json=report.json", "--gpumem-markdown=report.md")
    assert session.verdicts() == {"test_keeps": "leaked"}
    assert "1 of 1 compared" in (suite.path / "report.md").read_text()
    (result,) = json.loads((suite.path / "report.json").read_text())["results"]
    assert result["verdict"]["uncompared"] == ""


BAD_END = """
KEPT = []

@pytest.fixture
def bad_end():
    own = mib(4)
    yield
    held = mib(5)
    raise ValueError("in the tear-down")

@pytest.mark.gpu_memory(max_leak_mib=0)
def test_keeps(bad_end):
    KEPT.append(mib(9))

@pytest.mark.gpu_memory(max_leak_mib=0)
def test_keeps_nothing(bad_end):
    mib(9)
"""


def test_a_leak_is_judged_though_a_fixture_fails_at_its_tear_down(suite):
    """The error is shown as it would be, with its frames; what these hold is no leak."""
    session = suite.run("--gpumem-json=report.json", "-l", source=BAD_END)
    assert session.outcomes == {"passed": 2, "errors": 2}
    assert session.verdicts() == {"test_keeps": "leaked", "test_keeps_nothing": "no baseline"}
    content = json.loads((suite.path / "report.json").read_text())
    leaks = {result["nodeid"]: result["measurement"]["left"] for result in content["results"]}
    assert leaks["test_it.py::test_keeps"] == [9 << 20]
    assert session.out.count("ValueError: in the tear-down") >= 2
    assert '>       raise ValueError("in the tear-down")' in session.out
    assert re.search(r"^held +=", session.out, re.MULTILINE)
    assert "item_hooks.py" not in session.out
    assert "- GPU memory -" in session.out
    assert "leaked: 9.00 MiB still allocated after the test" in session.flat
    assert "leaked" in suite.run("-q").out


def test_a_wider_fixture_that_lives_on_is_neither_line_nor_holder_of_a_leak(suite):
    session = suite.run(
        source="""
        KEPT = []

        @pytest.fixture(scope="module")
        def weights(): return mib(30)

        @pytest.mark.gpu_memory(max_leak_mib=0)
        def test_leaks(weights): KEPT.append(mib(5))

        def test_last(weights): pass
        """
    )
    assert "of which test_it.py:4 (mib) 5.00 MiB in 1 block" in session.flat
    assert session.flat.count("note: held by ") == 1
    assert "note: held by global variable KEPT of test_it.py (list of 1): 5.00 MiB" in session.flat
