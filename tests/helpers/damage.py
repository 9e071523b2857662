"""What hypothesis does to files that are to be read strictly: any JSON, any place, any damage."""

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
"""of brackets: what every reader takes, about what Python's stack takes, and far beyond"""


def nested(text, place, depth, *, bracket="["):
    """The document with one value of it inside of so many brackets."""
    marker = "the place of the brackets"
    opening, closing = {"[": ("[", "]"), "{": ('{"a": ', "}")}[bracket]
    inner = "0" if bracket == "{" else ""
    brackets = opening * depth + inner + closing * depth
    return with_value(text, marker, place).replace(json.dumps(marker), brackets)


def damages(length):
    """Some pieces of a text of so many bytes, each with others in its place."""
    piece = st.tuples(st.integers(0, length), st.integers(0, 4), st.binary(max_size=4))
    return st.lists(piece)


def damaged(content, pieces):
    """Bytes with the damages done to them."""
    for at, length, replacement in pieces:
        content = content[:at] + replacement + content[at + length :]
    return content


def places(document, at=()):
    """Every place of a JSON document: the keys that lead there."""
    yield at
    if isinstance(document, (dict, list)):
        names = document if isinstance(document, dict) else range(len(document))
        for name in names:
            yield from places(document[name], (*at, name))


def with_value(text, value, place):
    """The document with one value of it replaced; with ``...``, taken away."""
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
