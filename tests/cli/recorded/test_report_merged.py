"""``gpumem report`` of several reports: shards and devices as one, or nothing at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.sample_report import H100, attribution, entry, measured, result

from pytest_gpumem.baselines.paths import Key
from pytest_gpumem.judge.verdict import Lookup
from pytest_gpumem.report.json_report import dumps, read_report
from pytest_gpumem.report.model import Origin, OwnOutcome, Report, Shard

WHEN = "2026-11-23T10:00:00Z"
PLAIN, GROWN = attribution(layers=2), attribution(layers=2, retained=600, scale=1.2)
KNOWN = Lookup(entry(PLAIN))
COMMIT = "a" * 40
ACCEPT = "gpumem accept --run https://github.com/o/r/actions/runs/9 --artifact gpu-{}"
FIRST, SECOND = "tests/test_a.py", "tests/test_b.py"


def write(name, *results, device="virtual T4", options=None, **origin):
    """Write a report of a session."""
    report = Report(
        results,
        device=device,
        options=options or {},
        remarks=("1 skipped: no reason",),
        origins=(Origin(**{"commit": COMMIT, **origin}),),
    )
    Path(name).write_text(dumps(report, created=WHEN))


def failed(test, name, **more):
    one = result(test, measured(GROWN, **more), KNOWN, module=FIRST)
    verdict = replace(one.verdict, accept=ACCEPT.format(name))
    return replace(one, verdict=verdict, outcome="passed")


@pytest.fixture
def shards(here):
    write("1.json", failed("test_x", 1), shard=Shard(1, 3), device="virtual T4")
    write("2.json", result("test_y", measured(PLAIN), KNOWN, module=SECOND), shard=Shard(2, 3))
    write(
        "3.json",
        result("test_y", measured(PLAIN, device=H100), KNOWN, module=SECOND),
        shard=Shard(3, 3),
        device="virtual H100",
    )
    return here


ALL = ("1.json", "2.json", "3.json")


def test_one_page_one_comment_and_one_file_of_all(shards, gpumem):
    arguments = ("--html=all.html", "--json=all.json", "--markdown=all.md")
    status, out, err = gpumem("report", *ALL, *arguments)
    assert (status, err) == (0, "")
    assert out.split() == [
        *("gpumem:", "written:", "all.html"),
        *("gpumem:", "written:", "all.json"),
        *("gpumem:", "written:", "all.md"),
    ]
    text = Path("all.md").read_text()
    assert "## GPU memory: 1 of 3 failed" in text
    assert "virtual T4; virtual H100" in text
    assert "### virtual-T4" in text
    assert "### virtual-H100" in text
    assert text.count("1 skipped: no reason") == 1
    assert "test_y" in Path("all.html").read_text()
    merged = read_report("all.json")
    assert [it.origin for it in merged.results] == [0, 1, 2]
    assert [it.shard.index for it in merged.report.origins] == [1, 2, 3]
    assert merged.created == WHEN


def test_one_report_is_written_as_it_was(shards, gpumem):
    assert gpumem("report", "1.json", "--json=again.json")[0] == 1  # shards 2 and 3 are not here
    assert Path("again.json").read_text() == read_again("1.json")


def read_again(name):
    saved = read_report(name)
    remark = "missing: shards 2, 3 of 3: their measurements are not in this report"
    report = replace(saved.report, remarks=(remark, *saved.report.remarks))
    return dumps(report, created=saved.created)


def test_a_merged_report_is_merged_again_with_others(shards, gpumem):
    gpumem("report", "1.json", "2.json", "--json=two.json")
    assert gpumem("report", *ALL, "--json=three.json")[0] == 0
    assert gpumem("report", "two.json", "3.json", "--json=again.json")[0] == 0
    again, three = read_report("again.json"), read_report("three.json")
    assert again.report.origins == three.report.origins
    assert [it.origin for it in again.results] == [0, 1, 2]


def test_the_command_accepts_all_of_them(shards, gpumem, monkeypatch):
    text = gpumem("report", *ALL)[1]
    assert "gpumem accept 1.json 2.json 3.json" in text
    assert "--artifact" not in text
    gpumem("report", *ALL, "--json=all.json", "--markdown=all.md")
    assert "gpumem accept all.json\n" in Path("all.md").read_text()
    gpumem("report", *ALL, "--markdown=all.md")
    assert "gpumem accept 1.json 2.json 3.json\n" in Path("all.md").read_text()
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://github.com")
    monkeypatch.setenv("GITHUB_REPOSITORY", "o/r")
    monkeypatch.setenv("GITHUB_RUN_ID", "9")
    assert (
        "gpumem accept --run https://github.com/o/r/actions/runs/9\n" in gpumem("report", *ALL)[1]
    )
    gpumem("report", *ALL, "--json=all.json", "--markdown=all.md", "--artifact=gpu-memory")
    assert f"{ACCEPT.format('memory')}\n" in Path("all.md").read_text()


def test_githubs_summary_and_annotations(shards, gpumem, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(shards / "summary.md"))
    status, out, _ = gpumem("report", *ALL, "--github")
    assert status == 0
    assert "::error file=tests/test_a.py,line=28,title=GPU memory%3A tests/test_a.py" in out
    assert "## GPU memory: 1 of 3 failed" in (shards / "summary.md").read_text()
    monkeypatch.delenv("GITHUB_STEP_SUMMARY")
    status, _, err = gpumem("report", *ALL, "--github")
    assert (status, "GITHUB_STEP_SUMMARY is not set" in err) == (2, True)


def test_the_same_test_with_one_figure_is_one_row_and_with_two_an_error(shards, gpumem):
    write("again.json", failed("test_x", 1))
    assert gpumem("report", "1.json", "again.json", "--json=all.json")[0] == 1
    assert len(read_report("all.json").results) == 1
    other = attribution(layers=2, scale=1.3)
    write("other.json", result("test_x", measured(other), KNOWN, module=FIRST))
    Path("all.json").unlink()
    status, out, err = gpumem("report", "1.json", "other.json", "--json=all.json")
    assert (status, out) == (2, "")
    assert "1.json and other.json: have two figures of tests/test_a.py::test_x on virtual-T4" in err
    assert " allocated, " in err
    assert " in other.json; leave out one of these reports" in err
    assert not Path("all.json").exists()


def test_figures_of_two_folders_of_baselines_are_two_rows(shards, gpumem):
    """Of two versions of torch, whose baselines lie in two folders."""
    write("old.json", result("test_x", measured(PLAIN), KNOWN, module=FIRST), folder="b/torch-2.14")
    assert gpumem("report", "1.json", "old.json", "--json=all.json")[0] == 1
    assert len(read_report("all.json").results) == 2


@pytest.mark.parametrize(
    ("origin", "problem"),
    [
        ({"commit": "b" * 40}, "is from commit bbbbbbbbbbbb, and 1.json from aaaaaaaaaaaa"),
        (
            {"root": "packages/x"},
            "is from another project: its root is packages/x, and the root of 1.json",
        ),
    ],
)
def test_reports_of_two_commits_or_projects_are_not_merged(shards, gpumem, origin, problem):
    write("2.json", **origin)
    status, out, err = gpumem("report", *ALL, "--json=all.json", "--html=all.html")
    assert (status, out) == (2, "")
    assert f"2.json: {problem}" in err
    assert not list(shards.glob("all.*"))


@pytest.mark.parametrize("content", ["", "{", '{"format": 99, "gpumem": "9"}', "<html>", "[[[["])
def test_a_bad_report_leaves_nothing(shards, gpumem, content):
    (shards / "2.json").write_text(content)
    status, out, err = gpumem("report", *ALL, "--json=all.json")
    assert (status, out) == (2, "")
    assert err.startswith("gpumem: 2.json: ")
    assert not list(shards.glob("all.*"))


def test_a_report_cannot_ask_for_shards_without_end(shards, gpumem):
    text = Path("1.json").read_text()
    Path("1.json").write_text(text.replace('"count": 3', f'"count": {2**62}'))
    status, _, err = gpumem("report", *ALL)
    assert status == 2
    assert "Expected `int` <= 100000 - at `$.origins[0].shard.count`" in err


def test_missing_shards_are_told(shards, gpumem):
    status, out, err = gpumem("report", "1.json", "3.json")
    assert (status, err) == (1, "gpumem: missing: shard 2 of 3\n")
    assert "missing: shard 2 of 3: their measurements are not in this report" in out
    write("4.json")
    assert gpumem("report", "4.json")[0] == 0
    status, _, err = gpumem("report", "4.json", "--expect=8")
    assert (status, err) == (1, "gpumem: missing: 7 of 8 reports\n")
    assert "--expect=0: this is not a number of reports" in gpumem("report", *ALL, "--expect=0")[2]


def test_a_report_that_is_given_twice_is_one(shards, gpumem):
    """Downloaded twice, or named by two patterns: it does not stand for a missing one."""
    Path("again.json").write_bytes(Path("1.json").read_bytes())
    write("4.json", result("test_x", measured(PLAIN), KNOWN, module=FIRST))
    Path("copy.json").write_bytes(Path("4.json").read_bytes())
    status, _, err = gpumem("report", "4.json", "4.json", "copy.json", "--expect=3")
    assert (status, err) == (1, "gpumem: missing: 2 of 3 reports\n")
    write("none.json")
    write("empty.json")  # of a shard without a test
    assert gpumem("report", "4.json", "none.json", "empty.json", "--expect=3")[0] == 0
    assert gpumem("report", *ALL, "again.json", "--json=all.json")[0] == 0
    assert len(read_report("all.json").report.origins) == len(ALL)


def test_a_session_that_did_not_finish_is_told_with_its_report(shards, gpumem):
    write("2.json", unfinished="it was interrupted", shard=Shard(2, 3))
    assert "2.json: the run did not finish: it was interrupted" in gpumem("report", *ALL)[1]
    gpumem("report", *ALL, "--json=all.json")
    status, _, err = gpumem("accept", "all.json", "--any-commit", "--yes")
    assert (status, "all.json: is from a run that did not finish: it was" in err) == (2, True)


def test_shards_of_two_cards_are_counted_apart(here, gpumem):
    for card in ("T4", "L4"):
        for index in (1, 2):
            write(f"{card}{index}.json", options={"--gpumem-card": card}, shard=Shard(index, 2))
    assert gpumem("report", "T41.json", "T42.json", "L41.json", "L42.json")[0] == 0
    err = gpumem("report", "T41.json", "L41.json", "L42.json")[2]
    assert err == "gpumem: missing: shard 2 of 2 with --gpumem-card=T4\n"


def key(module, test):
    return Key("virtual-T4", module, test)


def test_baselines_are_stale_by_all_shards_only(here, gpumem):
    gone, split, removed = key(FIRST, "test_gone"), key(FIRST, "test_s"), key("c.py", "test_c")
    write("1.json", collected=(FIRST,), unseen=(gone, split, removed))
    write("2.json", collected=(FIRST,), unseen=(gone, removed))
    write("3.json", collected=(SECOND,), unseen=(removed,))
    text = gpumem("report", *ALL)[1]
    assert "2 baselines have no test any more" in text
    assert "test\\_gone on virtual-T4" in text
    assert "test\\_s" not in text
    assert gpumem("report", *ALL, "--stale=fail")[0] == 1
    write("2.json", partial="a file could not be collected")
    write("1.json", partial="a file could not be collected")
    assert "1 baseline has no test any more" in gpumem("report", *ALL)[1]


def test_a_sentence_that_several_devices_have_is_there_once(here, gpumem):
    for card in ("T4", "L4"):
        write(f"{card}.json", device=f"virtual GPU {card}; memory is predicted; no kernel runs")
    text = gpumem("report", "T4.json", "L4.json")[1]
    assert "virtual GPU T4; memory is predicted; no kernel runs; virtual GPU L4\n" in text


def test_tests_that_their_own_code_failed_are_on_the_page_of_all(shards, gpumem):
    wrong = OwnOutcome(f"{FIRST}::test_wrong", "failed", "assert <b>1</b> == 3", "E  assert")
    report = replace(read_report("1.json").report, own_outcomes=(wrong,))
    for name in ("1.json", "4.json"):
        Path(name).write_text(dumps(report, created=WHEN))
    assert gpumem("report", *ALL, "4.json", "--json=all.json", "--html=all.html")[0] == 0
    assert read_report("all.json").report.own_outcomes == (wrong,)
    text = Path("all.html").read_text()
    assert "test_wrong" in text
    assert "assert &lt;b&gt;1&lt;/b&gt; == 3" in text


def test_names_of_markup_stay_text(shards, gpumem):
    """A report from anywhere adds no markup to a page or a comment."""
    evil = result("test_<img src=x>", measured(PLAIN), KNOWN, module=FIRST)
    write("2.json", evil, device="<script>alert(1)</script>", options={"--gpumem-card": "<b>"})
    gpumem("report", *ALL, "--html=all.html", "--markdown=all.md")
    for text in (Path("all.html").read_text(), Path("all.md").read_text()):
        assert "<script>alert(1)" not in text
        assert "<img src=x>" not in text.replace("test_<img src=x>`", "")  # as code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json=x", "--html=x"], "x: two reports cannot be in one file"),
        (["--json=x", "--markdown=./x"], "./x: two reports cannot be in one file"),
        (["--json=folder"], "folder: cannot be written: Is a directory"),
        # "embedded null byte", or since Python 3.13 "lstat: embedded null character in path"
        (["--json=x\0"], "x\\x00: cannot be written: "),
    ],
)
def test_files_that_cannot_be_written_are_named(shards, gpumem, arguments, message):
    (shards / "folder").mkdir()
    status, _, err = gpumem("report", *ALL, *arguments)
    assert status == 2
    assert message in err


def test_where_one_file_cannot_be_made_none_is_written(shards, gpumem):
    (shards / "folder").mkdir()
    old = '{"format": 1, "gpumem": "0.1", "created": "as it was"}'
    Path("all.json").write_text(old)
    names = sorted(path.name for path in shards.iterdir())
    status, _, err = gpumem("report", *ALL, "--json=all.json", "--markdown=m", "--html=folder")
    assert status == 2
    assert "folder: cannot be written" in err
    assert sorted(path.name for path in shards.iterdir()) == names
    assert Path("all.json").read_text() == old


def test_equal_texts_of_a_report_are_one(shards):
    """Of 100,000 results the texts would be most of the memory."""
    saved = [read_report(name).results[0] for name in ("1.json", "2.json")]
    for result_ in saved:
        sites = result_.baseline_entry.breakdowns[0].sites
        repeated = [site.path for site in sites if site.path == "src/model.py"]
        assert len(repeated) > 1
        assert len({id(path) for path in repeated}) == 1
    assert not hasattr(saved[0].measurement, "__dict__")
    assert not hasattr(saved[0].verdict, "__dict__")
