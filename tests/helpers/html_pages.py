"""What tests ask of a page's text: its elements, and what lies packed in it."""

from __future__ import annotations

import base64
import json
import zlib
from html.parser import HTMLParser
from typing import NamedTuple

VOID = {"br", "hr", "img", "input", "link", "meta", "wbr"}
BLOCKS = {"td", "th", "dt", "dd", "li", "p", "h3", "h4", "code"}
"""elements whose text stands apart from what follows"""


class Element(NamedTuple):
    tag: str
    attributes: dict
    text: list


class Page(HTMLParser):
    """A page's elements; refuses one whose elements are not nested as they should be."""

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
        """The elements of a tag with these attributes; a class need only be one of several."""
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


def unpacked(text):
    """What packed letters hold."""
    return json.loads(zlib.decompress(base64.b64decode(json.loads(text))))


def index_of(page):
    """What the page's script knows of every row."""
    (index,) = page.all("script", id="index")
    return unpacked("".join(index.text))


def sections_of(page):
    """Every section's HTML, by its id: the packed ones, and None for those in the page."""
    found = {it.attributes["id"]: None for it in page.all("section", class_="result")}
    for pack in page.all("script", class_="pack"):
        sections = unpacked("".join(pack.text))
        assert not set(sections) & set(found)
        found.update(sections)
    return found
