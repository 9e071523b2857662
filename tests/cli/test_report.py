"""``gpumem report``: a JSON report as Markdown, and as trackers read it."""

from __future__ import annotations

import json

import pytest
from helpers.sample_report import sample

from pytest_gpumem.report.json_report import dumps
from pytest_gpumem.report.markdown import markdown


@pytest.fixture
def saved(here):
    (here / "r.json").write_text(dumps(sample(), created="2026-11-22T10:00:00Z"))


def test_the_markdown_is_that_of_the_session(saved, gpumem):
    status, out, err = gpumem("report", "r.json")
    assert (status, err) == (0, "")
    assert out == markdown(sample(), when="2026-11-22 10:00:00 UTC")


def test_it_can_be_shortened_to_what_a_comment_takes(saved, gpumem):
    out = gpumem("report", "r.json", "--limit", "5000")[1]
    assert len(out.encode()) <= 5000
    assert "*This report was shortened" in out


@pytest.mark.parametrize("form", ["bencher", "github-action-benchmark"])
def test_trackers_have_their_form(saved, gpumem, form):
    assert "test_gpt2_step" in str(json.loads(gpumem("report", "r.json", "--format", form)[1]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.json"], "none.json: cannot be read: No such file or directory; name a file"),
        (["r.json", "--limit=20"], "--limit=20: no report is that short; write --limit=1000"),
        (["r.json", "--limit=9", "--format=bencher"], "--limit=9: only Markdown can be shortened"),
    ],
)
def test_bad_input_is_named(saved, gpumem, arguments, message):
    status, out, err = gpumem("report", *arguments)
    assert (status, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("form", ["markdown", "bencher", "github-action-benchmark"])
@pytest.mark.parametrize("option", ["json", "markdown", "html"])
def test_a_file_of_others_is_not_replaced(saved, here, gpumem, option, form):
    (here / "mine").write_text("mine")
    status, _, err = gpumem("report", "r.json", f"--{option}=mine", f"--format={form}")
    assert status == 2
    assert f"--{option}=mine: this file exists, and was not written by this option; name" in err
    assert (here / "mine").read_text() == "mine"
    for _ in range(2):  # a report of its kind is
        assert gpumem("report", "r.json", f"--{option}=own", f"--format={form}")[0] == 0
