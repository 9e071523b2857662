"""Hypothesis strategies for JSON files that are read strictly: any value, any place, any damage."""

from __future__ import annotations

import json

from hypothesis import strategies as st

ANY_TEXT = st.text(st.characters(), max_size=8)  # lone surrogates too
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(ANY_TEXT, inner),
    max_leaves=6,
)


DEPTHS = (10, 900, 1000, 5_000, 100_000)
"""numbers of brackets: any reader accepts 10, Python's stack ends at about 1000"""


def nested(text, place, depth, *, bracket="["):
    """Return the document with one value replaced by ``depth`` nested brackets."""
    marker = "the place of the brackets"
    opening, closing = {"[": ("[", "]"), "{": ('{"a": ', "}")}[bracket]
    inner = "0" if bracket == "{" else ""
    brackets = opening * depth + inner + closing * depth
    return with_value(text, marker, place).replace(json.dumps(marker), brackets)


def damages(length):
    """Return a strategy for replacements in ``length`` bytes: (position, length, new bytes)."""
    piece = st.tuples(st.integers(0, length), st.integers(0, 4), st.binary(max_size=4))
    return st.lists(piece)


def damaged(content, pieces):
    """Return content after the replacements of :func:`damages`."""
    for at, length, replacement in pieces:
        content = content[:at] + replacement + content[at + length :]
    return content


def places(document, at=()):
    """Yield every place in a JSON document, as the keys that lead there."""
    yield at
    if isinstance(document, (dict, list)):
        names = document if isinstance(document, dict) else range(len(document))
        for name in names:
            yield from places(document[name], (*at, name))


def with_value(text, value, place):
    """Return the document with one value replaced, or removed if ``value`` is ``...``."""
    if not place:
        return json.dumps(value)
    document = json.loads(text)
    *before, last = place
    inner = document
    for name in before:
        inner = inner[name]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return json.dumps(document)
