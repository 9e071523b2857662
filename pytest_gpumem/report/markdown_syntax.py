"""Render outside text as Markdown elements: code, sentences, tables, fenced blocks.

A test's name cannot end a table's row or add markup: names go into code spans, sentences are
escaped.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pytest_gpumem.report.text import printable, shortened

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAX_NAME_LENGTH = 300
"""characters of a name to show"""
MAX_SENTENCE_LENGTH = 2000
"""characters of a sentence to show"""

_SPECIAL = re.compile(r"([\\`*_\[\]<>|#~$&{}])")
_LINKS = re.compile(r"(:)(?=//)|(?<=www)(\.)", re.IGNORECASE)
_BACKTICKS = re.compile(r"`+")
_LEFT = {"", "test", "verdict", "device", "peak", "of", "module", "code"}
"""titles of text columns, aligned left; figures are aligned right"""


def code(name: str) -> str:
    """Render a name as code on one line, without any markup in it, also within a table."""
    name = shortened(printable(name), MAX_NAME_LENGTH)
    if not name:
        return ""
    if not set(name) & set("`|\\") and name == name.strip():
        return f"`{name}`"
    # Nothing can be escaped within backticks, and GitHub ends a table row at "|" even there.
    entities = re.sub(r"[^ A-Za-z0-9./]", lambda match: f"&#{ord(match[0])};", name)
    return f"<code>{entities}</code>"


def prose(sentence: str) -> str:
    """Render a sentence on one line, with everything escaped that Markdown treats as markup."""
    sentence = printable(" ".join(sentence.split()))
    if len(sentence) > MAX_SENTENCE_LENGTH:
        sentence = f"{sentence[:MAX_SENTENCE_LENGTH]}…"
    # GitHub also turns bare addresses into links.
    return _LINKS.sub(r"\\\1\2", _SPECIAL.sub(r"\\\1", sentence))


def pipe_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells that are already Markdown, without empty columns; "" without rows."""
    # Not by tabulate: it does not escape cells, and pads them to their column's width, so that one
    # long name makes every row as long (GitHub accepts 1 MiB).
    table = list(rows)
    used = [i for i in range(len(titles)) if any(row[i] for row in table)]
    if not used:
        return ""
    head = [titles[i] for i in used]
    rule = ["---" if title in _LEFT or not n else "---:" for n, title in enumerate(head)]
    lines = [head, rule, *([row[i] for i in used] for row in table)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fenced(content: str, language: str) -> str:
    """Return a code block, fenced with more backticks than the content has in a row."""
    longest = max((len(run) for run in _BACKTICKS.findall(content)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{content}\n{fence}"
