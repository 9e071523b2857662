"""``--gpumem-github``: the step's summary and annotations, under GitHub Actions."""

from __future__ import annotations

import pytest
from helpers.sources import TWO_TESTS as TWO


def has_results(path):
    text = path.read_text(encoding="utf-8")
    return all(f"`test_it.py::{name}`" in text for name in ("test_fits", "test_too_much[1]"))


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


def test_without_the_variable_nothing_is_added(suite):
    assert "GITHUB_STEP_SUMMARY" not in suite.run("--gpumem-json=a.json", source=TWO).out


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
    session = suite.run_warm("--gpumem-github=on", source=TWO)
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
    assert "gpumem: nothing added to GITHUB_STEP_SUMMARY: GitHub accepts 1 MiB" in session.flat
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
    session = suite.run_warm("-n", "2", source=TWO)
    assert len(annotated(session)) == 1
    assert github.read_text().count("## GPU memory: ") == 1
