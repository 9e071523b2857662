"""The lead of a failure: one sentence, the same in every format and at every verbosity."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from html import unescape

import pytest
from helpers.pages import flat

UPDATE = "--gpumem-update-baselines"
STEP = """
LOG = []

def make(width):
    return torch.nn.Linear(512, width, device="cuda")

@pytest.mark.gpu_memory
def test_step():
    LOG.clear()
    model = make(1024)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    for _ in range(2):
        out = model(torch.ones(8192, 512, device="cuda"))
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        LOG.append(None)
"""
PLANTED = {
    "a wider layer": (
        "nn.Linear(512, width,",
        "nn.Linear(512, width * 16,",
        "test_it.py:9 changed: width -> width * 16 (other edits are not known)",
    ),
    "outputs that are kept": (
        "LOG.append(None)",
        "LOG.append(out)",
        r"activations \+\d+\.\d\d MiB at test_it.py:17 \(test_step\), kept by global variable LOG",
    ),
    "a line that is new": (
        "        optimizer.step()\n",
        "        optimizer.step()\n        more = torch.ones(64 << 20, device='cuda')\n",
        r"other \+\d+\.\d\d MiB at test_it.py:20 \(test_step\), kept by local variable more",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_every_format_begins_with_one_sentence(suite, monkeypatch, name):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("COLUMNS", "300")
    suite.run(UPDATE, source=STEP)
    old, new, pattern = PLANTED[name]
    assert STEP.count(old) == 1
    suite.write("test_it.py", STEP.replace(old, new))
    files = ("--junitxml=r.xml", "--gpumem-markdown=r.md", "--gpumem-json=r.json")
    sessions = [suite.run("-q"), suite.run(*files, "--gpumem-html=r.html"), suite.run("-vv")]
    (result,) = json.loads((suite.path / "r.json").read_text())["results"]
    lead, headline = result["verdict"]["lead"]["sentence"], result["verdict"]["headline"]
    assert re.fullmatch(pattern if "\\" in pattern else re.escape(pattern), lead)
    assert headline.startswith(f"regressed: {lead}; peak allocated grew by ")
    failure = ET.parse(suite.path / "r.xml").find(".//failure")
    assert flat(failure.text).startswith(headline)
    assert failure.get("message").endswith(f": {lead}")
    markdown = flat((suite.path / "r.md").read_text()).replace("\\", "")
    assert f"**virtual-H100**: {headline}" in markdown
    page = flat(re.sub(r"<[^>]+>", "", unescape((suite.path / "r.html").read_text())))
    assert headline in page
    place = f"file=test_it.py,line={result['verdict']['lead']['line']},"
    for session in sessions:
        _, _, failures = session.out.partition(" test_step _")
        lines = failures.splitlines()[1:]
        assert flat(" ".join(lines[:4])).startswith(headline)
        # The lines that grew stand below it, in one order.
        assert amounts(failures) == amounts(sessions[0].out)
        assert f"::warning {place}" in session.out
        annotations = session.out.replace("%25", "%")  # GitHub's encoding
        assert re.search(rf"^::error .*{re.escape(headline)}", annotations, re.MULTILINE)
        assert f"FAILED test_it.py::test_step - +{result_change(headline)}" in session.flat


def test_one_blank_line_stands_below_the_title_of_the_table(suite):
    session = suite.run(UPDATE, source=STEP)
    assert session.outcomes == {"passed": 1}
    assert re.search(r"^Peak memory in MiB .*\n\ntest ", session.out, re.MULTILINE)


def amounts(text):
    """The source lines that a failure begins with."""
    return re.findall(r"^ +\+[\d.]+ MiB  [a-z ]+  (\S+:\d+)", text, re.MULTILINE)


def result_change(headline):
    """The growth in a headline: "96.00 MiB (+31.2%)"."""
    return re.search(r"grew by ([\d.]+ MiB \([^)]+\))", headline)[1]
