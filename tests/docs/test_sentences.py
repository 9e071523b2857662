"""Sentences of the first pages are short: their readers may have another first language."""

import re

import pytest
from helpers.paths import ROOT

MAX_WORDS = 25
PAGES = ("README.md", "docs/tutorial/gate-in-ci.md")


def sentences(text):
    """The sentences of a page in Markdown, without code, tables, headings and pictures."""
    text = re.sub(r"```.*?```", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"^(#|\||:::|\[!\[|!\[).*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        yield from re.split(r"(?<=[.!?:])[\s*]+(?=[A-Z`*\"\d])", " ".join(paragraph.split()))


@pytest.mark.parametrize("page", PAGES)
def test_no_sentence_is_longer_than_twenty_five_words(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    long = [one for one in sentences(text) if len(one.split()) > MAX_WORDS]
    assert long == []


def test_a_longer_one_is_seen():
    words = "Word" + " word" * (MAX_WORDS - 1)
    found = list(sentences(f"# Head\nShort. {words} word.\n\n| {words} |\n"))
    assert [len(one.split()) for one in found if one] == [1, MAX_WORDS + 1]
