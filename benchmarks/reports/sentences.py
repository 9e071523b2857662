"""The sentences of messages that changed since an earlier commit, each beside the one of today.

    python -m benchmarks.reports.sentences a9ad581

A sentence is a text of four words or more in the package's code: an error, a note, a hint, a help.
What an f-string puts in is an ellipsis. A sentence of the earlier commit that is gone stands beside
the new one that shares most of its words; where none shares a third of them, it is counted alone:
its message is new, or gone. Docstrings and pages are not in the list: git has them.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tarfile
from typing import TYPE_CHECKING

from benchmarks.harness import ROOT, line, publish

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = "pytest_gpumem"
MIN_WORDS = 4
SHARED = 1 / 3
"""part of two sentences' words that they share at least, to be one sentence in two wordings"""


def texts(source: str) -> Iterator[str]:
    """Yield the texts of a module but its docstrings."""
    tree = ast.parse(source)
    passed = set()
    for node in ast.walk(tree):
        for statement in getattr(node, "body", None) or [] if not is_lambda(node) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                passed.add(id(statement.value))
        if isinstance(node, ast.JoinedStr):
            passed.update(id(part) for part in ast.walk(node) if part is not node)
    for node in ast.walk(tree):
        if id(node) in passed:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = (it.value if isinstance(it, ast.Constant) else "\u2026" for it in node.values)
            yield "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def is_lambda(node: ast.AST) -> bool:
    """Return whether a node's body is an expression."""
    return isinstance(node, (ast.Lambda, ast.IfExp))


def sentences(sources: dict[str, str]) -> set[str]:
    """Return the sentences of modules."""
    found = set()
    for source in sources.values():
        for text in texts(source):
            flat = " ".join(text.split())
            letters = sum(it.isalpha() or it == " " for it in flat)
            if len(words(flat)) >= MIN_WORDS and letters * 10 > len(flat) * 7:
                found.add(flat)
    return found


def words(sentence: str) -> set[str]:
    """Return the words of a sentence."""
    return set(re.findall(r"[\w.'-]{2,}", sentence.lower()))


def earlier(commit: str) -> dict[str, str]:
    """Return the modules of the package at a commit."""
    command = ["git", "-C", str(ROOT), "archive", commit, PACKAGE]
    done = subprocess.run(command, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        return {
            member.name: archive.extractfile(member).read().decode()
            for member in archive
            if member.name.endswith(".py")
        }


def pairs(gone: set[str], new: set[str]) -> dict[str, str]:
    """Return the sentences that are gone, each with the new one that shares most of its words."""
    shares = sorted(
        (
            (len(words(old) & words(today)) / len(words(old) | words(today)), old, today)
            for old in gone
            for today in new
        ),
        reverse=True,
    )
    found: dict[str, str] = {}
    for share, old, today in shares:
        if share >= SHARED and old not in found and today not in found.values():
            found[old] = today
    return found


def main() -> None:
    """Compare, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("commit", help="the earlier commit")
    commit = parser.parse_args().commit
    before = sentences(earlier(commit))
    modules = (ROOT / PACKAGE).rglob("*.py")
    today = sentences({str(path): path.read_text(encoding="utf-8") for path in modules})
    changed = pairs(before - today, today - before)
    listed = [f"- {old}\n+ {new}" for old, new in sorted(changed.items())]
    publish(
        "sentences",
        f"Sentences of messages that changed since commit {commit}\n{line()}\n\n"
        f"{len(before)} sentences then, {len(today)} now: {len(before & today)} are the same, "
        f"{len(changed)} have other words,\n{len(before - today) - len(changed)} are gone, and "
        f"{len(today - before) - len(changed)} are new.\n\n" + "\n\n".join(listed),
    )


if __name__ == "__main__":
    main()
