"""``--gpumem-html``: the page of a whole session, whatever becomes of its tests."""

from __future__ import annotations

import json
import os
import re
import warnings

import pytest
from helpers.html_pages import Page, keys_of
from helpers.sources import HELPER, program

from pytest_gpumem.cli import main
from pytest_gpumem.report.page import html

TWO = """
@pytest.mark.gpu_memory(batch_size=4)
def test_fits():
    mib(100)

@pytest.mark.gpu_memory(max_allocated_gib=0.1)
def test_too_much(gpu_memory):
    with gpu_memory.measure("part"):
        mib(300)

def test_unmarked():
    pass
"""
OPTION = "--gpumem-html=report/page.html"
WRITTEN = "gpumem: page written to {}"


def page_of(suite, name="report/page.html"):
    return Page((suite.path / name).read_text(encoding="utf-8"))


def rows(parsed):
    """Test and verdict of every row."""
    names = [re.sub(r"^.*::", "", name) for name in parsed.texts("a", class_="name")]
    return dict(zip(names, parsed.texts("td", class_="verdict"), strict=True))


ROWS = {
    "test_too_much": "✕ over budget",
    "test_fits": "○ no baseline",
    "test_too_much (part)": "○ no baseline",
}


def test_the_page_has_every_result_and_the_terminal_says_where_it_is(suite):
    session = suite.run(OPTION, "--gpumem-card=T4", source=TWO)
    assert session.outcomes == {"passed": 2, "failed": 1}
    assert session.out.count("gpumem: page written") == 1
    assert WRITTEN.format(suite.path / "report/page.html") in session.out
    parsed = page_of(suite)
    assert rows(parsed) == ROWS
    (head,) = parsed.texts("header", class_="page")
    assert "virtual GPU T4 (14.57 GiB" in head
    assert "--gpumem-card=T4" in head
    assert re.search(r"20\d\d-\d\d-\d\d \d\d:\d\d UTC", head)
    assert [keys[3] for keys in keys_of(parsed)] == [300, 100, 300]
    assert list((suite.path / "report").iterdir()) == [suite.path / "report/page.html"]


def test_a_page_of_too_many_results_links_the_json_report(suite):
    parts = """
@pytest.mark.gpu_memory
def test_it(gpu_memory):
    for number in range(500):
        with gpu_memory.measure(str(number)):
            mib(1)
"""
    suite.run(OPTION, "--gpumem-json=all.json", "--gpumem-attribution=off", source=parts)
    parsed = page_of(suite)
    assert len(rows(parsed)) == html.MAX_RESULTS == 500
    assert parsed.texts("a", href="../all.json") == ["../all.json"]
    merging = ["report", "all.json", "--html=report/merged.html", "--json=report/b.json"]
    assert main.main(merging) == 0
    assert page_of(suite, "report/merged.html").texts("a", href="b.json") == ["b.json"]


def test_without_the_option_there_is_no_page(suite):
    session = suite.run(source=TWO)
    assert "gpumem: page" not in session.out
    assert list(suite.path.rglob("*.html")) == []


def test_the_ini_file_names_it_from_the_root_folder(suite, monkeypatch):
    suite.write("pytest.ini", "[pytest]\ngpumem_html = out/page.html")
    suite.write("test_it.py", TWO)
    inner = suite.path / "inner"
    inner.mkdir()
    monkeypatch.chdir(inner)
    session = suite.run("..")
    assert WRITTEN.format(suite.path / "out/page.html") in session.out


def test_the_command_line_names_it_from_the_working_folder(suite, monkeypatch):
    suite.write("pytest.ini", "[pytest]\ngpumem_html = out/page.html")
    suite.write("test_it.py", TWO)
    inner = suite.path / "inner"
    inner.mkdir()
    monkeypatch.chdir(inner)
    session = suite.run("..", "--gpumem-html=page.html")
    assert WRITTEN.format(inner / "page.html") in session.out
    assert not (suite.path / "out").exists()


def test_a_page_replaces_an_earlier_one_and_keeps_its_mode(suite):
    suite.run(OPTION, source="def test_plain(): pass")
    (suite.path / "report/page.html").chmod(0o640)
    suite.run(OPTION, source=TWO)
    path = suite.path / "report/page.html"
    assert rows(page_of(suite)) == ROWS
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_page_is_written_where_no_test_is_marked(suite):
    session = suite.run(OPTION, source="def test_plain(): pass")
    assert WRITTEN.format(suite.path / "report/page.html") in session.out
    assert "No test was measured." in page_of(suite).texts("main")[0]


def test_skipped_tests_are_told(suite):
    session = suite.run(OPTION, "--gpumem-device=none", source=TWO)
    assert session.outcomes == {"passed": 1, "skipped": 2}
    (head,) = page_of(suite).texts("header", class_="page")
    assert "2 skipped: " in head


def test_updated_baselines_are_told_and_then_compared_with(suite):
    suite.run(OPTION, "--gpumem-update-baselines", "-k", "fits", source=TWO)
    (head,) = page_of(suite).texts("header", class_="page")
    assert "baselines: 1 created" in head
    suite.run(OPTION)
    assert rows(page_of(suite))["test_fits"] == "✓ ok"


def test_listing_tests_writes_nothing(suite):
    session = suite.run(OPTION, "--collect-only", source=TWO)
    assert "page" not in session.out.replace("report/page.html", "")
    assert not (suite.path / "report").exists()


@pytest.mark.parametrize("option", ["-x", "-q"])
def test_the_page_is_written_after_a_stop_and_quietly_too(suite, option):
    source = TWO.replace("def test_fits", "def test_a_failure(): assert 0\n\ndef test_fits")
    source = source.replace("@pytest.mark.gpu_memory(batch_size=4)", "", 1)
    suite.run(OPTION, option, source=source)
    found = page_of(suite)
    if option == "-x":
        assert "No test was measured." in found.texts("main")[0]
    else:
        assert "test_too_much" in rows(found)


def test_quiet_sessions_do_not_say_where(suite):
    assert "gpumem: page" not in suite.run(OPTION, "-q", source=TWO).out


def test_it_is_written_by_the_controller_alone_under_xdist(suite):
    pytest.importorskip("xdist")
    session = suite.run_warm(OPTION, "-n", "2", source=TWO)
    assert session.out.count("gpumem: page written") == 1
    assert rows(page_of(suite)) == ROWS


def test_it_is_written_after_an_interruption(suite):
    source = TWO.replace("def test_unmarked():", "def test_unmarked():\n    interrupt()")
    source = (
        f"import pytest, torch\n{HELPER}\n\ndef interrupt():\n    raise KeyboardInterrupt\n"
        + source
    )
    suite.write("test_it.py", source)
    session = suite.run_warm(OPTION)
    assert session.ret == pytest.ExitCode.INTERRUPTED
    assert rows(page_of(suite)) == ROWS
    assert "gpumem: page written" in session.out


@pytest.mark.parametrize("given", ["", "  ", "report/", "."])
def test_a_folder_or_nothing_is_refused_at_once(suite, given):
    session = suite.run_warm(f"--gpumem-html={given}", source=TWO)
    assert session.ret == pytest.ExitCode.USAGE_ERROR
    message = f"--gpumem-html={given}: this is not a file; write --gpumem-html=gpumem.html"
    assert message in session.err


@pytest.mark.parametrize("missing", ["jinja2"])
def test_a_missing_library_is_said_before_any_test_runs(suite, monkeypatch, missing):
    suite.write("absent.py", f"import sys; sys.modules[{missing!r}] = None")
    monkeypatch.setenv("PYTHONPATH", str(suite.path), prepend=os.pathsep)
    session = suite.run_warm("-p", "absent", "-p", "no:html", OPTION, source=TWO)  # not pytest-html
    assert session.ret == pytest.ExitCode.USAGE_ERROR
    assert f"needs {missing}, which is not installed; run pip install" in session.err
    assert "'pytest-gpumem[html]'" in session.err


def test_a_path_that_cannot_be_written_is_said_and_fails_the_session(suite):
    suite.write("taken", "a file, no folder")
    session = suite.run("--gpumem-html=taken/page.html", "-k", "fits", source=TWO)
    assert session.outcomes == {"passed": 1, "deselected": 2}
    path = suite.path / "taken/page.html"
    assert f"gpumem: no page written to {path}: File exists" in session.out
    assert "INTERNALERROR" not in session.out
    assert session.ret == pytest.ExitCode.TESTS_FAILED


def test_a_fault_of_the_page_does_not_hide_the_results(suite, monkeypatch):
    from pytest_gpumem.report.page import html

    def broken(*_, **__):
        raise ValueError("no such page")

    monkeypatch.setattr(html, "page", broken)
    session = suite.run(OPTION, source=TWO)
    assert "INTERNALERROR" not in session.out
    assert "no page written" in session.out
    assert "ValueError: no such page" in session.out
    assert session.verdicts()["test_fits"] == "no baseline"


def test_a_warning_of_the_pages_libraries_is_no_error_of_the_suite(suite, monkeypatch):
    from pytest_gpumem.report.page import html

    made = html.page

    def warning(*arguments, **named):
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        return made(*arguments, **named)

    monkeypatch.setattr(html, "page", warning)
    suite.write("pytest.ini", "[pytest]\nfilterwarnings = error")
    session = suite.run(OPTION, source=TWO)
    assert "gpumem: page written" in session.out
    assert "old" not in session.out


def test_a_baseline_travels_with_its_result(suite):
    """So that the page can set a breakdown beside the baseline's."""
    suite.run("--gpumem-update-baselines", "-k", "fits", source=TWO)
    suite.write(
        "conftest.py",
        """
        def pytest_gpumem_judged(item, result):
            entry = result.baseline_entry
            print("ENTRY", item.name, entry and entry.peaks[0].allocated >> 20)
        """,
    )
    out = suite.run("-s").out
    assert "ENTRY test_fits 100" in out
    assert "ENTRY test_too_much None" in out


STEPS = """
import os

@pytest.mark.gpu_memory(card="T4")
def test_trains():
    kept = []
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8))).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(3):
        loss = model(torch.zeros(int(os.environ.get("ROWS", "4096")), 256, device="cuda")).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_the_baselines_course_is_recorded_the_same_each_time_and_drawn(suite, monkeypatch):
    folders = [f"--gpumem-baseline-dir={name}" for name in ("first", "second")]
    for option in folders:
        suite.run("--gpumem-update-baselines", option, source=STEPS)
    (content,) = suite.baselines("first").values()
    assert list(suite.baselines("second").values()) == [content]
    (course,) = re.findall(r'^ +"course": (\[.*\]),$', content, re.MULTILINE)
    assert len(json.loads(course)) == 40
    (peak,) = json.loads(content)["tests"]["test_trains"]["peak_allocated"]
    assert max(json.loads(course)) == peak
    suite.run(OPTION, folders[0])
    assert 'class="ghost"' not in page_of(suite).source  # it is the same
    monkeypatch.setenv("ROWS", "8192")
    suite.run(OPTION, folders[0])
    assert page_of(suite).source.count('class="ghost"') == 1
    path = next((suite.path / "first").rglob("*.json"))
    path.write_text(re.sub(r'^ +"course": .*\n', "", content, flags=re.MULTILINE))
    session = suite.run(OPTION, folders[0])
    assert "1 regressed" in session.out
    assert 'class="ghost"' not in page_of(suite).source


OWN = program("every_outcome.py")


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["here", "xdist"])
def test_every_marked_test_is_listed_however_it_ended(suite, workers):
    how = suite.run_warm if workers else suite.run
    how(OPTION, *workers, source=OWN)
    parsed = page_of(suite)
    names = [re.sub(r"^.*::", "", name) for name in parsed.texts("a", class_="name")]
    listed = sorted(zip(names, parsed.texts("td", class_="verdict"), strict=True))
    assert listed == [
        ("test_fits", "○ no baseline"),
        ("test_misdeclared", "✕ error"),
        ("test_not_yet", "✕ xfailed"),
        ("test_slow", "○ skipped"),
        ("test_too_much", "✕ over budget"),
        ("test_untidy", "○ no baseline"),
        ("test_untidy", "✕ error"),
        ("test_without_its_fixture", "✕ error"),
        ("test_wrong", "✕ failed"),
    ]
    causes = parsed.texts("span", class_="why")
    assert "assert (1 + 1) == 3" in causes
    assert "ValueError: no such file" in causes
    assert "too slow" in causes
    assert any(cause.startswith("@pytest.mark.gpu_memory(max_gib='many'): ") for cause in causes)
