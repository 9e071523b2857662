"""``gpumem report``: a JSON report as Markdown."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.json"], "none.json: cannot be read: No such file or directory; name a file"),
        (["r.json", "--limit=20"], "--limit=20: no report is that short; write --limit=1000"),
    ],
)
def test_bad_input_is_named(saved, gpumem, arguments, message):
    status, out, err = gpumem("report", *arguments)
    assert (status, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("option", ["json", "markdown", "html"])
def test_a_file_of_others_is_not_replaced(saved, here, gpumem, option):
    (here / "mine").write_text("mine")
    status, _, err = gpumem("report", "r.json", f"--{option}=mine")
    assert status == 2
    assert f"--{option}=mine: this file exists, and was not written by this option; name" in err
    assert (here / "mine").read_text() == "mine"
    for _ in range(2):  # a report of its kind is
        assert gpumem("report", "r.json", f"--{option}=own")[0] == 0
