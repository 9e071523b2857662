"""Parse a page's HTML: its elements, and the keys of its rows."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import NamedTuple

VOID = {"br", "hr", "img", "input", "link", "meta", "wbr"}
BLOCKS = {"td", "th", "dt", "dd", "li", "p", "h3", "h4", "code"}
"""elements whose text is separated from the following text"""


class Element(NamedTuple):
    tag: str
    attributes: dict
    text: list


class Page(HTMLParser):
    """A page's elements; fails if they are not nested correctly."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.source = text
        self.elements = []
        self._open = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), (tag, attrs)
        element = Element(tag, dict(attrs), [])
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag):
        assert self._open, tag
        assert self._open.pop().tag == tag
        if tag in BLOCKS:
            self.handle_data(" ")

    def handle_data(self, data):
        for element in self._open:
            element.text.append(data)

    def all(self, tag, **attributes):
        """Return a tag's elements with these attributes; a class may be one of several."""
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}
        return [it for it in self.elements if it.tag == tag and _has(it, wanted)]

    def texts(self, tag, **attributes):
        return [" ".join("".join(it.text).split()) for it in self.all(tag, **attributes)]

    @property
    def ids(self):
        return [it.attributes["id"] for it in self.elements if "id" in it.attributes]


def _has(element, wanted):
    have = element.attributes
    return all(
        value in (have.get(name) or "").split() if name == "class" else have.get(name) == value
        for name, value in wanted.items()
    )


def rows_of(page):
    """Return the attributes of each test's row, by which the page's script sorts and filters."""
    rows = (it.attributes for it in page.all("tr", role="row"))
    return [row for row in rows if "data-keys" in row]


def keys_of(page):
    """Return the keys by which the page's script sorts each row."""
    return [json.loads(row["data-keys"]) for row in rows_of(page)]
