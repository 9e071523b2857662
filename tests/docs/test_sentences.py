"""Sentences of the documentation are short: its readers may have another first language."""

import re

import pytest
from helpers.paths import ROOT

MAX_WORDS = 25
MAX_WORDS_ELSEWHERE = 30
PAGES = ("README.md", "CHANGELOG.md", "docs/tutorial/gate-in-ci.md")
OTHER_PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
    if path.name != "gate-in-ci.md"
)
"""all but the tutorial"""


def sentences(text):
    """The sentences of a page in Markdown, without code, tables, headings and pictures."""
    text = re.sub(r"```.*?```", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"^(#|\||:::|\[!\[|!\[).*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"^\s*- ", "\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        yield from re.split(r"(?<=[.!?:])[\s*]+(?=[A-Z`*\"\d])", " ".join(paragraph.split()))


@pytest.mark.parametrize("page", PAGES)
def test_no_sentence_is_longer_than_twenty_five_words(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    long = [one for one in sentences(text) if len(one.split()) > MAX_WORDS]
    assert long == []


@pytest.mark.parametrize("page", OTHER_PAGES)
def test_no_sentence_of_other_pages_is_longer_than_thirty_words(page):
    """A list of names, which has no verb, is no sentence."""
    text = (ROOT / page).read_text(encoding="utf-8")
    long = [one for one in sentences(text) if len(one.split()) > MAX_WORDS_ELSEWHERE]
    assert [one for one in long if any(word.islower() for word in one.split())] == []


MAX_PAGES, MAX_README = 25_000, 700
"""words: who reads more than an hour before a first test does not write one"""


def test_the_documentation_is_short():
    """What nobody acts on is data: beside the results, or in tests/tables."""
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")]
    assert sum(len(page.split()) for page in pages) <= MAX_PAGES
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= MAX_README


FIRST = re.compile(r"# .+\n+(This (page|guide) |In this tutorial )")
"""a page's title, and the words that say what the page is for"""
INCLUDED = {"docs/changelog.md", "docs/contributing.md", "docs/index.md"}
"""pages that are other files of the repository, and the one that shows a test at once"""


PURPOSEFUL = sorted(page for page in {*PAGES, *OTHER_PAGES} - INCLUDED if page.startswith("docs/"))


@pytest.mark.parametrize("page", PURPOSEFUL)
def test_the_first_sentence_says_what_the_page_is_for(page):
    assert FIRST.match((ROOT / page).read_text(encoding="utf-8"))


def test_a_longer_one_is_seen():
    words = "Word" + " word" * (MAX_WORDS - 1)
    found = list(sentences(f"# Head\nShort. {words} word.\n\n| {words} |\n"))
    assert [len(one.split()) for one in found if one] == [1, MAX_WORDS + 1]
