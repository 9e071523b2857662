"""``--gpumem-json``, ``--gpumem-markdown``, ``--gpumem-github``, and figures in others' reports."""

from __future__ import annotations

import errno
import json
import os
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from pytest_gpumem.report.json_report import read_report
from pytest_gpumem.verdict import Kind

TWO = """
@pytest.mark.gpu_memory(batch_size=4)
def test_fits():
    mib(100)

@pytest.mark.parametrize("x", [1])
@pytest.mark.gpu_memory(max_allocated_gib=0.1)
def test_too_much(gpu_memory, x):
    with gpu_memory.measure("part"):
        mib(300)

def test_unmarked():
    pass
"""
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
    session = suite.run_apart(f"--gpumem-{name}={given}", source=TWO)
    assert session.ret == pytest.ExitCode.USAGE_ERROR
    ending = {"json": "json", "markdown": "md"}[name]
    message = f"--gpumem-{name}={given}: this is no file; write --gpumem-{name}=gpumem.{ending}"
    assert message in session.err


def test_one_file_for_two_reports_is_refused(suite):
    session = suite.run_apart("--gpumem-json=a.x", "--gpumem-markdown=a.x", source=TWO)
    assert session.ret == pytest.ExitCode.USAGE_ERROR
    assert "this is the file of --gpumem-json as well; name two files" in session.err


@pytest.mark.parametrize("name", ["json", "markdown"])
def test_a_file_that_cannot_be_written_fails_the_session(suite, name):
    suite.write("file", "no folder")
    blocked = f"--gpumem-{name}=file/report"
    session = suite.run(blocked, source="def test_plain(): pass")
    assert session.ret == pytest.ExitCode.TESTS_FAILED
    assert f"gpumem: no {FILES[name]} written to {suite.path}/file/report: " in session.out
    assert (suite.path / "file").read_text() == "no folder\n"


@pytest.mark.parametrize("name", ["json", "markdown"])
def test_a_full_disk_leaves_the_old_file_as_it_was(suite, monkeypatch, name):
    old = suite.write("report", "old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    session = suite.run(f"--gpumem-{name}=report", source="def test_plain(): pass")
    assert session.ret == pytest.ExitCode.TESTS_FAILED
    assert f"no {FILES[name]} written to {old}: No space left on device" in session.out
    assert old.read_text() == "old\n"
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
    old = suite.write("a.json", "old")
    session = suite.run("--gpumem-json=a.json", "-k", "fits", source=TWO)
    assert session.ret == pytest.ExitCode.TESTS_FAILED
    assert "the result of test_it.py::test_fits: cannot be written: Expected `int` >= 0" in (
        session.flat
    )
    assert old.read_text() == "old\n"


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
    session = suite.run_apart(f"--gpumem-{name}=a.{ending}", "-n", "2", source=TWO)
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
    session = suite.run_apart("--gpumem-json=a.json", "--gpumem-markdown=a.md", *arguments)
    if not arguments:
        assert session.ret == pytest.ExitCode.INTERRUPTED
    assert session.out.count("report written") == 2
    for path in (suite.path / "a.json", suite.path / "a.md", summary):
        assert has_results(path)


# -- GitHub --


@pytest.fixture
def github(suite, monkeypatch):
    """The file that GitHub shows as the step's summary, under GitHub Actions."""
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(suite.path))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(suite.path / "summary.md"))
    return suite.path / "summary.md"


def annotated(session):
    return [line for line in session.out.splitlines() if line.startswith("::")]


def test_the_summary_is_added_to_what_is_there(suite, github):
    github.write_text("# Mine", encoding="utf-8")
    suite.run(source=TWO)
    text = github.read_text(encoding="utf-8")
    assert text.startswith("# Mine\n## GPU memory: 1 of 3 failed\n")
    assert has_results(github)


def test_the_summary_needs_nothing_but_its_variable(suite, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(suite.path / "summary.md"))
    session = suite.run(source=TWO)
    assert has_results(suite.path / "summary.md")
    assert annotated(session) == []


@pytest.mark.parametrize("by", ["option", "ini"])
def test_github_can_be_left_alone(suite, github, by):
    if by == "ini":
        suite.write("pytest.ini", "[pytest]\ngpumem_github = off")
    session = suite.run(*(["--gpumem-github=off"] if by == "option" else []), source=TWO)
    assert not github.exists()
    assert annotated(session) == []


def test_the_command_line_wins_over_the_ini_file(suite, github):
    suite.write("pytest.ini", "[pytest]\ngpumem_github = off")
    session = suite.run("--gpumem-github=auto", source=TWO)
    assert has_results(github)
    assert len(annotated(session)) == 1


def test_another_choice_is_refused(suite):
    session = suite.run_apart("--gpumem-github=on", source=TWO)
    assert session.ret == pytest.ExitCode.USAGE_ERROR
    assert "write --gpumem-github=auto or --gpumem-github=off" in session.err


def test_sessions_without_marked_tests_leave_github_alone(suite, github):
    session = suite.run(source="def test_plain(): assert 0")
    assert not github.exists()
    assert annotated(session) == []


def test_a_summary_that_is_full_is_said_and_fails_nothing(suite, github):
    github.write_bytes(b"x" * (2**20 - 100))
    session = suite.run("-k", "fits", source=TWO)
    assert session.ret == 0
    assert "gpumem: nothing added to GITHUB_STEP_SUMMARY: GitHub takes 1 MiB" in session.flat
    assert github.stat().st_size == 2**20 - 100


def test_a_summary_keeps_githubs_limit(suite, github):
    github.write_bytes(b"x" * (2**20 - 1500))
    suite.run(source=TWO)
    text = github.read_text(encoding="utf-8").lstrip("x")
    assert "1 of 3 failed" in text
    assert "This report was shortened" in text
    assert github.stat().st_size <= 2**20


def test_a_summary_that_cannot_be_written_is_said_and_fails_nothing(suite, github):
    github.mkdir()
    session = suite.run("-k", "fits", source=TWO)
    assert session.ret == 0
    assert "gpumem: nothing added to GITHUB_STEP_SUMMARY: Is a directory" in session.out


def test_failures_are_annotated_on_the_markers_line(suite, github):
    suite.write("inner/test_it.py", f"import pytest, torch\n{TWO}".replace("mib(", "mib_("))
    text = (suite.path / "inner/test_it.py").read_text()
    helper = "\ndef mib_(n):\n    return torch.empty(n * 2**20, dtype=torch.uint8, device='cuda')\n"
    (suite.path / "inner/test_it.py").write_text(text + helper)
    line = text.splitlines().index("@pytest.mark.gpu_memory(max_allocated_gib=0.1)") + 1
    suite.write("inner/pytest.ini", "[pytest]")
    session = suite.run("inner")
    (found,) = annotated(session)
    place = f"::error file=inner/test_it.py,line={line},title=GPU memory%3A test_it.py%3A%3A"
    assert found.startswith(f"{place}test_too_much[1]::over budget: peak allocated of 300.00 MiB")


@pytest.mark.parametrize("quiet", ["-q", "-qq", "--no-summary"])
def test_quiet_sessions_annotate_as_well(suite, github, quiet):
    session = suite.run(quiet, source=TWO)
    assert len(annotated(session)) == 1
    assert has_results(github)


def test_expected_failures_are_not_annotated(suite, github):
    session = suite.run(
        source=f"{TWO}".replace("@pytest.mark.param", "@pytest.mark.xfail\n@pytest.mark.param")
    )
    assert session.outcomes == {"passed": 2, "xfailed": 1}
    assert annotated(session) == []


def test_under_xdist_github_is_told_once(suite, github):
    pytest.importorskip("xdist")
    session = suite.run_apart("-n", "2", source=TWO)
    assert len(annotated(session)) == 1
    assert github.read_text().count("## GPU memory: ") == 1


# -- the reports of others --

EXPECTED = {
    "test_fits": {
        "gpumem_device": "virtual-T4",
        "gpumem_batch_size": 4,
        "gpumem_verdict": "no baseline",
        "gpumem_peak_allocated": 100 * 2**20,
        "gpumem_peak_reserved": 100 * 2**20,
    },
    "test_too_much[1]": {
        "gpumem_device": "virtual-T4",
        "gpumem_verdict": "over budget",
        "gpumem_peak_allocated": 300 * 2**20,
        "gpumem_peak_reserved": 300 * 2**20,
        "gpumem_verdict[part]": "no baseline",
        "gpumem_peak_allocated[part]": 300 * 2**20,
        "gpumem_peak_reserved[part]": 300 * 2**20,
    },
    "test_unmarked": {},
}


def junit(path):
    """Properties of each test in a JUnit file, names that are there twice refused."""
    found = {}
    for case in ET.parse(path).iter("testcase"):
        pairs = [(it.get("name"), it.get("value")) for it in case.iter("property")]
        assert len(pairs) == len(dict(pairs))
        found[case.get("name")] = dict(pairs)
    return found


def as_text(expected):
    return {name: {k: str(v) for k, v in it.items()} for name, it in expected.items()}


@pytest.mark.parametrize("apart", [False, True])
def test_junit_has_the_figures(suite, apart):
    arguments = ["--junitxml=junit.xml", "--gpumem-card=T4"]
    if apart:
        pytest.importorskip("xdist")
        session = suite.run_apart(*arguments, "-n", "2", source=TWO)
    else:
        session = suite.run(*arguments, source=TWO)
    assert "gpumem_peak" not in session.out
    assert junit(suite.path / "junit.xml") == as_text(EXPECTED)


def test_a_rerun_has_the_last_runs_figures_once(suite):
    pytest.importorskip("pytest_rerunfailures")
    source = """
        import itertools
        sizes = itertools.count(100, 100)

        @pytest.mark.gpu_memory
        def test_at_last():
            n = next(sizes)
            mib(n)
            assert n > 200

        @pytest.mark.gpu_memory(max_allocated_gib=0.15)
        def test_smaller_at_last(gpu_memory):
            mib(next(shrinking))

        shrinking = iter([200, 120])
    """
    options = ("--reruns=3", "--junitxml=junit.xml", "--gpumem-attribution=off")
    session = suite.run(*options, source=source)
    assert session.outcomes["passed"] == 2
    found = junit(suite.path / "junit.xml")
    assert found["test_at_last"]["gpumem_peak_allocated"] == str(300 * 2**20)
    assert found["test_smaller_at_last"]["gpumem_peak_allocated"] == str(120 * 2**20)
    assert found["test_smaller_at_last"]["gpumem_verdict"] == "no baseline"


def test_out_of_memory_in_junit(suite):
    source = """
        @pytest.mark.gpu_memory(max_gib=0.25)
        def test_too_large():
            mib(500)
    """
    suite.run("--junitxml=junit.xml", source=source)
    (found,) = junit(suite.path / "junit.xml").values()
    assert found["gpumem_verdict"] == "out of memory"
    assert found["gpumem_needed_allocated"] == str(500 * 2**20)


def test_the_properties_of_tests_stay(suite):
    source = """
        @pytest.mark.gpu_memory
        def test_it(record_property):
            record_property("mine", 1)
            mib(1)
    """
    suite.run("--junitxml=junit.xml", "-o", "junit_family=xunit1", source=source)
    (found,) = junit(suite.path / "junit.xml").values()
    assert found["mine"] == "1"
    assert found["gpumem_peak_allocated"] == str(2**20)


@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_pytest_json_report_has_the_figures(suite, workers):
    pytest.importorskip("pytest_jsonreport")
    suite.run_apart(
        "--json-report", "--json-report-file=r.json", "--gpumem-card=T4", *workers, source=TWO
    )
    tests = json.loads((suite.path / "r.json").read_text())["tests"]
    found = {
        it["nodeid"].partition("::")[2]: {
            name: value for pair in it.get("user_properties", []) for name, value in pair.items()
        }
        for it in tests
    }
    assert found == EXPECTED


@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_pytest_html_shows_the_figures(suite, workers):
    pytest.importorskip("pytest_html")
    suite.write("pytest.ini", "[pytest]\nfilterwarnings = error")
    source = TWO.replace('"part"', '"<b>part"')
    suite.run_apart("--html=r.html", "--gpumem-card=T4", *workers, source=source)
    data = html_data(suite.path / "r.html")
    (fits,), (too_much,), (unmarked,) = (
        [it["log"] for test, (it,) in data.items() if name in test]
        for name in ("test_fits", "test_too_much", "test_unmarked")
    )
    assert "GPU memory\ngpumem_device: virtual-T4\n" in fits
    assert "gpumem_peak_allocated: 104857600 (100.00 MiB)" in fits
    assert "gpumem_verdict: over budget" in too_much
    assert "gpumem_peak_allocated[&lt;b&gt;part]: 314572800 (300.00 MiB)" in too_much
    assert "gpumem" not in unmarked
    assert "GPU memory" not in unmarked


def html_data(path):
    """The tests in pytest-html's report: its page has them as JSON in an attribute."""

    class Finder(HTMLParser):
        found = None

        def handle_starttag(self, tag, attrs):
            if "data-jsonblob" in dict(attrs):
                self.found = json.loads(dict(attrs)["data-jsonblob"])

    finder = Finder()
    finder.feed(path.read_text(encoding="utf-8"))
    return finder.found["tests"]
