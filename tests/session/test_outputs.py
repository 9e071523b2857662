"""``--gpumem-json`` and ``--gpumem-markdown``: the files of a whole session."""

from __future__ import annotations

import errno
import os
from pkgutil import resolve_name

import pytest
from helpers.pages import blocks
from helpers.sources import TWO_TESTS as TWO

from pytest_gpumem.judge.verdict import Kind
from pytest_gpumem.report.json_report import read_report
from pytest_gpumem.session.settings import OPTIONS, OUTPUTS

FILES = {"json": "JSON report", "markdown": "Markdown report", "html": "page"}
NODEIDS = ["test_it.py::test_fits", "test_it.py::test_too_much[1]", "test_it.py::test_too_much[1]"]


def has_results(path):
    """Whether a report of any form has both tests."""
    if path.suffix == ".json":
        return [it.nodeid for it in read_report(path).results] == NODEIDS
    text = path.read_text(encoding="utf-8")
    return all(f"`{nodeid}`" in text for nodeid in NODEIDS)


# -- files --


def test_all_reports_of_one_session_agree(suite):
    arguments = [f"--gpumem-{name}=out/report.{name}" for name in FILES]
    session = suite.run(*arguments, "--gpumem-card=T4", source=TWO)
    assert session.outcomes == {"passed": 2, "failed": 1}
    for name, what in FILES.items():
        assert f"gpumem: {what} written to {suite.path}/out/report.{name}" in session.out
    assert {it.name for it in (suite.path / "out").iterdir()} == {f"report.{it}" for it in FILES}
    read = read_report(suite.path / "out/report.json")
    assert [it.verdict.kind for it in read.results] == [
        Kind.NO_BASELINE,
        Kind.OVER_BUDGET,
        Kind.NO_BASELINE,
    ]
    assert [it.part for it in read.results] == ["", "", "part"]
    assert read.results[0].measurement.peaks[0].allocated == 100 * 2**20
    assert read.results[0].batch_size == 4
    assert "virtual GPU T4" in read.report.device
    assert read.report.options == {"--gpumem-card": "T4"}
    text = (suite.path / "out/report.markdown").read_text()
    assert "1 of 3 failed" in text
    assert read.results[1].verdict.headline.split(" over ")[0] in text
    assert "virtual GPU T4" in text
    assert "--gpumem-card=T4" in text


def test_the_cards_that_were_asked_for_are_told(suite):
    suite.run("--gpumem-json=it.json", "--gpumem-cards=T4,l4", source=TWO)
    assert read_report(suite.path / "it.json").report.options == {"--gpumem-cards": "T4,L4"}


def test_without_options_nothing_is_written(suite):
    before = set(suite.path.rglob("*"))
    session = suite.run("-p", "no:cacheprovider", source=TWO)
    assert "gpumem: JSON" not in session.out
    assert "written to" not in session.out
    names = {it.name for it in set(suite.path.rglob("*")) - before}
    assert {it for it in names if not it.endswith(".pyc")} - {"__pycache__"} == {"test_it.py"}


@pytest.mark.parametrize("name", ["json", "markdown"])
def test_the_ini_file_names_it_from_the_root_folder(suite, monkeypatch, name):
    suite.write("pytest.ini", f"[pytest]\ngpumem_{name} = out/report.json")
    suite.write("test_it.py", TWO)
    (suite.path / "inner").mkdir()
    monkeypatch.chdir(suite.path / "inner")
    session = suite.run("..")
    assert f"{FILES[name]} written to {suite.path}/out/report.json" in session.out
    session = suite.run("..", f"--gpumem-{name}=mine.json")
    assert f"{FILES[name]} written to {suite.path}/inner/mine.json" in session.out


@pytest.mark.parametrize("name", ["json", "markdown"])
@pytest.mark.parametrize("given", ["", "out/", "."])
def test_a_folder_or_nothing_is_refused_at_once(suite, name, given):
    session = suite.run_warm(f"--gpumem-{name}={given}", source=TWO)
    assert session.ret == pytest.ExitCode.USAGE_ERROR
    ending = {"json": "json", "markdown": "md"}[name]
    message = f"--gpumem-{name}={given}: this is not a file; write --gpumem-{name}=gpumem.{ending}"
    assert message in session.err


@pytest.mark.parametrize("again", ["a.x", "./a.x", "x/../a.x"])
def test_one_file_for_two_reports_is_refused(suite, again):
    session = suite.run_warm("--gpumem-json=a.x", f"--gpumem-markdown={again}", source=TWO)
    assert session.ret == pytest.ExitCode.USAGE_ERROR
    assert "--gpumem-json names the same file; name two different files" in session.err


@pytest.mark.parametrize("name", ["json", "markdown"])
def test_a_file_that_cannot_be_written_fails_the_session(suite, name):
    suite.write("file", "no folder")
    blocked = f"--gpumem-{name}=file/report"
    session = suite.run(blocked, source="def test_plain(): pass")
    assert session.ret == pytest.ExitCode.TESTS_FAILED
    assert f"gpumem: no {FILES[name]} written to {suite.path}/file/report: " in session.out
    assert (suite.path / "file").read_text() == "no folder\n"


OLD = {"json": '{"format": 1, "gpumem": "0.1", "created": 1}', "markdown": "## GPU memory: old"}


@pytest.mark.parametrize("name", OLD)
def test_a_full_disk_leaves_the_old_file_as_it_was(suite, monkeypatch, name):
    old = suite.write("report", OLD[name])

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    session = suite.run(f"--gpumem-{name}=report", source="def test_plain(): pass")
    assert session.ret == pytest.ExitCode.TESTS_FAILED
    assert f"no {FILES[name]} written to {old}: No space left on device" in session.out
    assert old.read_text() == f"{OLD[name]}\n"
    assert not [it for it in suite.path.iterdir() if it.name.startswith(".gpumem")]


def test_one_report_that_fails_keeps_no_other_from_being_written(suite):
    suite.write("file", "no folder")
    session = suite.run("--gpumem-json=file/a", "--gpumem-markdown=b.md", source=TWO)
    assert "no JSON report written" in session.out
    assert has_results(suite.path / "b.md")


def test_a_hook_that_gives_figures_that_are_none_is_named(suite):
    suite.write(
        "conftest.py",
        """
        import dataclasses

        def pytest_gpumem_measured(item, part, measurement):
            return dataclasses.replace(measurement, segments=-1)
        """,
    )
    old = suite.write("a.json", OLD["json"])
    session = suite.run("--gpumem-json=a.json", "-k", "fits", source=TWO)
    assert session.ret == pytest.ExitCode.TESTS_FAILED
    assert "the result of test_it.py::test_fits: cannot be written: Expected `int` >= 0" in (
        session.flat
    )
    assert old.read_text() == f"{OLD['json']}\n"


def test_updated_baselines_are_told(suite):
    suite.run("--gpumem-json=a.json", "--gpumem-markdown=a.md", "--gpumem-update-baselines",
              "-k", "fits", source=TWO)  # fmt: skip
    updates = read_report(suite.path / "a.json").report.updates
    assert [it.test for it in updates.created] == ["test_fits"]
    assert "### Baselines\n\n```text\n1 created\n" in (suite.path / "a.md").read_text()


def test_skipped_tests_are_told(suite):
    session = suite.run("--gpumem-json=a.json", "--gpumem-device=none", source=TWO)
    assert session.outcomes == {"passed": 1, "skipped": 2}
    (remark,) = read_report(suite.path / "a.json").report.remarks
    assert remark.startswith("2 skipped: ")


@pytest.mark.parametrize("option", ["--collect-only", "--fixtures"])
def test_listing_writes_nothing(suite, option):
    suite.run("--gpumem-json=a.json", option, source=TWO)
    assert not (suite.path / "a.json").exists()


@pytest.mark.parametrize("ending", ["json", "md"])
def test_under_xdist_the_controller_alone_writes(suite, ending):
    pytest.importorskip("xdist")
    name = {"json": "json", "md": "markdown"}[ending]
    session = suite.run_warm(f"--gpumem-{name}=a.{ending}", "-n", "2", source=TWO)
    assert session.out.count("report written") == 1
    if ending == "json":
        found = read_report(suite.path / "a.json").results
        assert sorted(it.nodeid for it in found) == NODEIDS
    else:
        assert has_results(suite.path / "a.md")


INTERRUPTED = """
import pytest, torch

def test_stop():
    raise KeyboardInterrupt
"""


@pytest.mark.parametrize("arguments", [["-x"], []])
def test_what_was_measured_before_a_stop_is_written(suite, monkeypatch, arguments):
    suite.write("test_it.py", TWO)
    suite.write("test_stop.py", INTERRUPTED.strip())
    summary = suite.path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    session = suite.run_warm("--gpumem-json=a.json", "--gpumem-markdown=a.md", *arguments)
    if not arguments:
        assert session.ret == pytest.ExitCode.INTERRUPTED
    assert session.out.count("report written") == 2
    for path in (suite.path / "a.json", suite.path / "a.md", summary):
        assert has_results(path)


def test_a_report_of_another_form_is_written_by_a_hook(suite):
    """As CONTRIBUTING shows it: no change of this package."""
    (program,) = (text for text in blocks("CONTRIBUTING.md", "python") if "csv" in text)
    suite.write("conftest.py", program)
    session = suite.run("--csv=out.csv", "--gpumem-card=T4", source=TWO)
    assert session.outcomes == {"passed": 2, "failed": 1}
    lines = (suite.path / "out.csv").read_text().splitlines()
    assert lines[0] == "test_it.py::test_fits,no baseline,104857600"
    assert [line.split(",")[0] for line in lines] == NODEIDS
    (suite.path / "out.csv").unlink()
    suite.run("--gpumem-card=T4")
    assert not (suite.path / "out.csv").exists()


def test_each_output_is_an_option_with_a_renderer():
    options = {option.name: option for option in OPTIONS}
    for output in OUTPUTS:
        assert options[output.name].metavar == "PATH"
        assert FILES[output.name] == output.title
        assert callable(resolve_name(f"pytest_gpumem.{output.renderer}"))


# -- files of others --


@pytest.mark.parametrize("option", FILES)
def test_a_file_of_others_is_refused_before_any_test_runs(suite, option):
    mine = suite.path / "mine.py"
    mine.write_text("A = 1\n")
    session = suite.run(f"--gpumem-{option}=mine.py", source=TWO)
    assert not session.outcomes
    assert f"--gpumem-{option}=mine.py: this file exists, and was not written by" in session.err
    assert mine.read_text() == "A = 1\n"


@pytest.mark.parametrize("option", FILES)
def test_a_file_that_a_test_writes_at_the_place_of_a_report_is_kept(suite, option):
    source = """
        from pathlib import Path

        def test_it():
            Path("taken").write_text("mine")
    """
    session = suite.run(f"--gpumem-{option}=taken", source=source)
    assert (suite.path / "taken").read_text() == "mine"
    assert f"no {FILES[option]} written to {suite.path}/taken: this file exists" in session.out
    assert session.ret == 1


@pytest.mark.parametrize("option", FILES)
def test_a_report_replaces_the_last_one(suite, option):
    for _ in range(2):
        session = suite.run(f"--gpumem-{option}=it", "--gpumem-card=T4", source=TWO)
        assert f"gpumem: {FILES[option]} written to {suite.path}/it" in session.out
