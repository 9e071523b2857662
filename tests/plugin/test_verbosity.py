"""What a session shows, with each verbosity, and that every option is read from both places."""

from __future__ import annotations

import pytest

from pytest_gpumem.report.terminal.summary_table import FEW_ROWS
from pytest_gpumem.session.settings import OPTIONS

SOURCE = """
import os

@pytest.mark.gpu_memory(max_gib=4, batch_size=8)
def test_good():
    mib(100)

@pytest.mark.gpu_memory(max_allocated_gib=0.05)
def test_bad():
    with pytest.raises(torch.OutOfMemoryError):
        mib(200_000)
    mib(100)
"""
HEAD = "gpumem: virtual GPU H100 (79.19 GiB, capability 9.0, 132 SMs)"
PLAIN = "gpumem: memory is predicted; kernels do not run"


def test_the_report_by_verbosity(suite):
    suite.run("--gpumem-update-baselines", source=SOURCE)
    outs = {flag: suite.run(*filter(None, [flag])).out for flag in ("-q", "", "-v", "-vv")}
    for flag in ("", "-v", "-vv"):
        assert HEAD in outs[flag]
        assert PLAIN in outs[flag]
        assert "Peak memory in MiB on virtual-H100, test_it.py" in outs[flag]
        assert "gpumem: 1 ok, 1 over budget" in outs[flag]
    assert "made with: torch" in outs["-vv"]
    assert "made with: torch" not in outs["-v"]
    for text in (HEAD, "gpumem: 1 ok", "GPU memory", "test_good"):
        assert text not in outs["-q"]
    assert outs["-q"].count("gpumem: 1 over budget\n") == 1
    assert "Peak memory" not in outs["-q"]
    for out in outs.values():
        assert "over budget: peak allocated of 100.00 MiB" in out
        assert "step: max_allocated_gib=0.05, on virtual-H100" in out
        assert "note: the step caught 1 out-of-memory error(s) itself" in out


def test_many_results_show_those_that_are_not_within(suite):
    source = f"""
    @pytest.mark.gpu_memory(baseline=False)
    @pytest.mark.parametrize("n", range({FEW_ROWS}))
    def test_many(n): pass
    """
    assert len(suite.run(source=source).table) == FEW_ROWS
    suite.write("test_more.py", "@pytest.mark.gpu_memory\ndef test_new(): pass\n")
    assert list(suite.run().table) == ["test_new"]
    assert len(suite.run("-v").table) == FEW_ROWS + 1


def test_a_session_without_marked_tests_shows_nothing(suite):
    session = suite.run("-v", source="def test_plain(): pass")
    assert session.outcomes == {"passed": 1}
    assert "gpumem:" not in session.out
    assert "GPU memory" not in session.out


@pytest.mark.parametrize("arguments", [("--co",), ("--co", "-q"), ("--fixtures",)])
def test_looking_only_runs_nothing(suite, arguments):
    session = suite.run(*arguments, source=SOURCE)
    assert session.ret == 0
    assert "GPU memory" not in session.out
    if arguments == ("--fixtures",):
        assert "gpu_memory" in session.out


def test_setup_show(suite):
    session = suite.run("--setup-show", source="def test_it(gpu_memory): mib(40)")
    assert session.outcomes == {"passed": 1}
    assert session.figures() == {"test_it": (40, 40)}


# An option that nobody reads fails here: each has a value, and what shows that it was read.
EFFECTS = {
    "device": ("none", {"skipped": 2}, "switched off by --gpumem-device=none"),
    "card": ("t4", {"passed": 1, "failed": 1}, "gpumem: virtual GPU T4 (14.57 GiB"),
    "update_baselines": (True, {"passed": 1, "failed": 1}, "baselines: 1 created"),
    "baseline_dir": ("there", {"failed": 2}, "there/virtual-H100/test_it.json: is not"),
    "missing_baseline": ("fail", {"failed": 2}, "no baseline: 100.00 MiB allocated"),
    "shrinkage": ("fail", {"failed": 2}, "improved: peak allocated shrank by 100.00 MiB"),
    "tolerance": ("300MiB", {"passed": 1, "failed": 1}, "gpumem: 1 ok, 1 over budget"),
    "html": ("page.html", {"passed": 1, "failed": 1}, "gpumem: page written to"),
    "against": ("virtual:T4", {"passed": 1, "failed": 1}, "recorded on virtual-H100 only"),
    "json": ("a.json", {"passed": 1, "failed": 1}, "gpumem: JSON report written to"),
    "markdown": ("a.md", {"passed": 1, "failed": 1}, "gpumem: Markdown report written to"),
}


@pytest.fixture
def prepared(suite):
    """Baselines of 200 MiB; a folder where another file is expected."""
    suite.run("--gpumem-update-baselines", source=SOURCE.replace("mib(100)", "mib(200)"))
    (suite.path / "there/virtual-H100/test_it.json").mkdir(parents=True)
    suite.write("test_it.py", SOURCE)
    return suite


# test_plugin_attribution.py, _snapshots.py, _outputs.py, _against.py, _provenance.py, _stale.py,
# _cards.py, _visible.py, _values.py, _all.py, _html.py, _too_large.py, test_policies.py,
# ../cli/test_accept.py, ../meter/test_host_memory.py
ELSEWHERE = {
    *("all", "attribution", "snapshots", "github"),
    *("artifact", "skip_too_large"),
    *(
        "provenance",
        "stale",
        "cards",
        "visible",
        "values",
        "guard",
    ),
}


@pytest.mark.parametrize(
    "option", [it for it in OPTIONS if it.name not in ELSEWHERE], ids=lambda option: option.name
)
def test_every_option_is_read_from_the_command_line_and_from_the_ini_file(prepared, option):
    value, outcomes, words = EFFECTS[option.name]
    if option.name in {"missing_baseline", "update_baselines"}:
        (prepared.path / "baselines/virtual-H100/test_it.json").unlink()
    without = prepared.run("-rs")
    assert words not in without.flat
    given = option.flag if value is True else f"{option.flag}={value}"
    session = prepared.run("-rs", given)
    assert session.outcomes == outcomes
    assert words in session.flat

    if option.name == "update_baselines":
        (prepared.path / "baselines/virtual-H100/test_it.json").unlink()
    prepared.write("pytest.ini", f"[pytest]\n{option.ini} = {str(value).lower()}")
    session = prepared.run("-rs")
    assert session.outcomes == outcomes
    assert words in session.flat


def test_options_are_named_alike():
    assert all(option.flag == f"--{option.ini.replace('_', '-')}" for option in OPTIONS)
    assert set(EFFECTS) | ELSEWHERE == {option.name for option in OPTIONS}


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--gpumem-card=T5", "--gpumem-card=T5: "),
        (
            "--gpumem-card=H100,T4",
            "to run every marked test on each of them, write --gpumem-cards=H100,T4",
        ),
        ("--gpumem-device=cuda0", "write --gpumem-device=auto or --gpumem-device=cuda or"),
        ("--gpumem-missing-baseline=ignore", "write --gpumem-missing-baseline=auto or"),
        ("--gpumem-shrinkage=no", "write --gpumem-shrinkage=note or --gpumem-shrinkage=fail"),
        ("--gpumem-tolerance=lots", "--gpumem-tolerance=lots: "),
        ("--gpumem-baseline-dir=", "write --gpumem-baseline-dir=baselines"),
        ("--gpumem-against=L4", "is not a device; write virtual:L4, or cuda:NVIDIA L4"),
        ("--gpumem-against=virtual:T5", "--gpumem-against=virtual:T5: "),
        ("--gpumem-against=cuda:", "is not a device; write virtual:L4"),
    ],
)
def test_a_bad_value_is_a_usage_error_of_one_line(suite, argument, words):
    name, _, value = argument.removeprefix("--").partition("=")
    session = suite.run(argument, source=SOURCE)
    assert session.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = session.err.strip().splitlines()
    assert line.startswith("ERROR: ")
    assert words in line
    if value:
        ini = name.replace("-", "_")
        suite.write("pytest.ini", f"[pytest]\n{ini} = {value}")
        session = suite.run()
        assert session.ret == pytest.ExitCode.USAGE_ERROR
        assert len(session.err.strip().splitlines()) == 1


THREE = """
@pytest.mark.gpu_memory
@pytest.mark.parametrize("n", range(3))
def test_it(n):
    mib(1)
"""
CONFTEST = """
import gc

import pytest

from pytest_gpumem.judge.result import Result


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish():
    gc.collect()
    print("RESULTS", sum(type(it) is Result for it in gc.get_objects()))
"""


def test_a_session_keeps_texts_of_results_until_its_end(suite):
    """Thousands of tests' objects would cost more than measuring them."""
    suite.write("conftest.py", CONFTEST)
    source = (
        "@pytest.mark.gpu_memory\n@pytest.mark.parametrize('n', range(3))\ndef test_it(n): mib(1)"
    )
    session = suite.run_warm("-s", source=source)
    assert session.outcomes == {"passed": 3}
    assert "RESULTS 0" in session.out
    assert "test_it.py::test_it[2]" in session.out.partition("RESULTS 0")[2]
