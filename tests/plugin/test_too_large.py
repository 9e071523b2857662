"""Tests that need more memory than the GPU has are skipped, if the option asks for it."""

from __future__ import annotations

import pytest

OPTION = "--gpumem-skip-too-large"
SUITE = """
    @pytest.fixture
    def data():
        print("the fixture ran")

    @pytest.mark.gpu_memory
    def test_small():
        mib(100)

    @pytest.mark.gpu_memory(batch_size=32)
    def test_large(data):
        mib(20 * 1024)

    @pytest.mark.gpu_memory(max_gib=40, baseline=False)
    def test_limited(data):
        mib(30 * 1024)
"""


def test_one_suite_serves_a_t4_and_an_h100(suite):
    """On each card the tests run that fit there."""
    large = suite.run("--gpumem-card=H100", "--gpumem-update-baselines", OPTION, source=SUITE)
    assert large.outcomes == {"passed": 3}

    small = suite.run("--gpumem-card=T4", "-rs", OPTION)
    assert small.outcomes == {"passed": 1, "skipped": 2}
    assert "20.00 GiB by the baseline of virtual-H100: T4 has only 14.44 GiB" in small.flat
    assert "40.00 GiB by max_gib=40: T4 has only 14.44 GiB; run this test on a larger" in small.flat
    assert (
        "2 skipped by --gpumem-skip-too-large: T4 has only 14.44 GiB (pytest -rs shows each need)"
        in small.flat
    )
    assert "the fixture ran" not in suite.run("--gpumem-card=T4", "-s", OPTION).out
    assert suite.run("--gpumem-card=H100", OPTION).outcomes == {"passed": 3}


def test_without_the_option_such_tests_fail(suite):
    suite.run("--gpumem-card=H100", "--gpumem-update-baselines", source=SUITE)
    assert suite.run("--gpumem-card=T4").outcomes == {"passed": 1, "failed": 2}


def test_the_ini_file_has_the_option(suite):
    suite.run("--gpumem-card=H100", "--gpumem-update-baselines", source=SUITE)
    suite.write("pytest.ini", "[pytest]\ngpumem_card = T4\ngpumem_skip_too_large = true\n")
    assert suite.run().outcomes == {"passed": 1, "skipped": 2}


def test_in_ci_a_session_that_skips_all_of_them_fails(suite, monkeypatch):
    suite.run("--gpumem-card=H100", "--gpumem-update-baselines", source=SUITE)
    suite.run("--gpumem-card=T4", "--gpumem-update-baselines", OPTION)
    large = ("--gpumem-card=T4", OPTION, "-k", "large or limited")
    assert suite.run(*large).ret == pytest.ExitCode.OK
    monkeypatch.setenv("CI", "true")
    failed = suite.run(*large)
    assert failed.ret == pytest.ExitCode.TESTS_FAILED
    assert "no test was measured, and CI is set, so the session fails" in failed.flat
    assert "2 skipped" in suite.run(*large, "-q").out
    assert suite.run("--gpumem-card=T4", OPTION).ret == pytest.ExitCode.OK
    workers = suite.run_warm(*large, "-n2")
    assert workers.ret == pytest.ExitCode.TESTS_FAILED
    assert "no test was measured" in workers.flat


def test_a_baseline_of_this_card_comes_first_then_the_smallest(suite):
    suite.run("--gpumem-card=H100", "--gpumem-update-baselines", source=SUITE)
    smaller = SUITE.replace("mib(20 * 1024)", "mib(15 * 1024)")
    for card in ("A100-80GB", "L4"):
        suite.run(
            f"--gpumem-card={card}", "--gpumem-update-baselines", "-k", "large", source=smaller
        )
    on_t4 = suite.run("--gpumem-card=T4", "-rs", OPTION, "-k", "large")
    assert "15.00 GiB by the baseline of virtual-A100-80GB" in on_t4.flat
    assert suite.run("--gpumem-card=L4", OPTION, "-k", "large").outcomes["passed"] == 1
    path = suite.path / "baselines/virtual-L4/test_it.json"
    path.write_text(path.read_text().replace(str(15 << 30), str(23 << 30)))
    on_l4 = suite.run("--gpumem-card=L4", "-rs", OPTION, "-k", "large")
    assert "23.00 GiB by the baseline of virtual-L4: L4 has only" in on_l4.flat


def test_a_baseline_of_another_batch_size_says_nothing(suite):
    suite.run("--gpumem-card=H100", "--gpumem-update-baselines", source=SUITE)
    text = SUITE.replace("batch_size=32", "batch_size=1").replace("mib(20 * 1024)", "mib(640)")
    assert suite.run("--gpumem-card=T4", OPTION, "-k", "large", source=text).outcomes == {
        "passed": 1,
        "deselected": 2,
    }


def test_a_test_that_names_its_card_is_not_skipped(suite):
    text = SUITE.replace("(batch_size=32)", "(card='T4')")
    assert suite.run(OPTION, "-k", "large", source=text).outcomes == {"failed": 1, "deselected": 2}
