"""Rank the lines edited since a baseline's commit by how close they are to a growth.

Lines that allocate or keep the growth come first, then lines that make a module whose memory grew,
then lines through which the grown line is called. Other edits are not linked to the growth: of
these, edits in a function on the call stacks of the growth's allocations, or in the class of such a
function, are named first. This does not prove which of several edits is the cause: ``gpumem blame``
runs the tests without each of them.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from pytest_gpumem.breakdowns import site_rows
from pytest_gpumem.explain.causes import MADE, line_growths, uniformly_grown_lines
from pytest_gpumem.explain.lead import edit_words
from pytest_gpumem.explain.source_changes import Edits, changed_lines
from pytest_gpumem.judge.verdict import Kind
from pytest_gpumem.source_lines import is_users, qualified, shown_path, statement_lines

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_gpumem.explain.hints import AnalyzedPeak
    from pytest_gpumem.explain.source_changes import Edit
    from pytest_gpumem.judge.result import Result

MAX_BLOCKS: Final = 500
"""maximum number of blocks whose call stacks are read, the largest first"""
_NAME: Final = re.compile(r"[A-Za-z_]\w*")
MAX_NAMED: Final = 3
"""maximum number of edits that a note names"""
_COMMON: Final = frozenset({"self", "torch", "list", "dict", "tuple", "set", "for", "in", "of"})
"""names that are too common to link a line to a growth"""
_MADE: Final = {"parameters", "buffers", "gradients", "optimizer state"}
"""categories of memory that exists because modules were made"""

CodeLine = tuple[str, int]
"""file and line"""


class _Growth:
    """The growth of a figure, with the places that show how close an edit is to it."""

    def __init__(self, result: Result, analyzed: AnalyzedPeak, device: int, root: Path) -> None:
        from pytest_gpumem.explain.attributor import origin_of

        assert result.measurement is not None  # noqa: S101 - for the type checker
        causes = result.verdict.causes
        current = result.measurement.attributions[device].breakdown
        baseline = result.breakdowns_before[device]
        self._root = root
        self._lines: Counter[CodeLine] = Counter()
        """by source line: by how many bytes more it allocates than in the baseline"""
        for cause in causes:
            if cause.site is not None and cause.site.path:
                self._lines[cause.site.path, cause.site.line] += cause.nbytes
        # Add the lines whose own peak grew: a cause may be the line of a backward pass, which
        # allocates for the lines of its forward.
        for line in line_growths(current.lines, baseline.lines):
            if line.nbytes > 0:
                self._lines[line.peak.path, line.peak.line] += line.nbytes
        self._calls: Counter[CodeLine] = Counter()
        """bytes that these lines allocate, by each line on the call stacks of the allocations"""
        self._modules: Counter[str] = Counter()
        """bytes that modules own, by each name on the module's path: those of ``encoder.norm``
        count for ``encoder`` and for ``norm``"""
        categories = {cause.category for cause in causes}
        self._files = {path for path, _ in self._lines}
        """files on the call stacks of the test's allocations"""
        for block in sorted(analyzed.blocks, key=lambda block: -block.size)[:MAX_BLOCKS]:
            origin = origin_of(analyzed.device, block)
            path = shown_path(origin.filename, root) if origin.filename else ""
            frames = [frame for frame in block.frames if is_users(frame["filename"])]
            self._files |= {path, *(shown_path(frame["filename"], root) for frame in frames)}
            if (path, origin.line) not in self._lines:
                continue
            if origin.category in categories & _MADE or origin.category not in _MADE:
                names = [origin.module, *(tag.name for tag in block.tags)]
                for name in set(".".join(names).split(".")):
                    self._modules[name] += block.size
            for frame in frames:
                self._calls[shown_path(frame["filename"], root), frame["line"]] += block.size
        self._functions = {
            (path, qualified(str(root / path), line)) for path, line in (*self._lines, *self._calls)
        }
        """functions that allocate the growth, or are on the call stacks of its allocations"""
        owners = {(path, name.rpartition(".")[0]) for path, name in self._functions}
        self._classes = {(path, owner) for path, owner in owners if owner}
        """the classes of these functions"""
        # A model keeps its parameters and buffers, whatever was edited: ignore their keepers.
        first = [cause for cause in causes[:1] if cause.category not in MADE]
        texts = [keeper.text for cause in first for keeper in cause.keepers]
        self._keepers = {name for text in texts for name in _NAME.findall(text)} - _COMMON
        """words in the names of the memory's keepers"""
        self._together = uniformly_grown_lines(site_rows(current, baseline))
        """lines that grew by one common factor: none of them is the cause"""

    def rank(self, edit: Edit) -> tuple[int, int] | None:
        """Return a key that sorts edits, the closest to the growth first; None if not linked."""
        file = str(self._root / edit.path)
        code = edit.new or edit.old
        if edit.path not in self._files:
            return None
        own = statement_lines(file, edit.line) if edit.new else ()
        places = [(edit.path, line) for line in own]
        names = frozenset(_NAME.findall(code)) - _COMMON
        if self._together.intersection(places):
            return None
        modules = re.findall(r"(?:\bself\.|^)(\w+)\b(?!\()", code)  # no method calls
        closeness = (
            (0, sum(self._lines[place] for place in places)),
            (0, len(names & self._keepers)),
            (1, max((self._modules[name] for name in modules), default=0)),
            (2, max((self._calls[place] for place in places), default=0)),
        )
        return next(((rank, -amount) for rank, amount in closeness if amount), None)

    def distance(self, edit: Edit) -> int:
        """Return how far an edit is from the growth, from 0 to 3.

        0: in a function on the call stacks of the growth's allocations. 1: in another method of
        such a function's class. 2: elsewhere in a file on the call stacks of the test's
        allocations. 3: in another file.
        """
        if edit.path not in self._files:
            return 3
        function = qualified(str(self._root / edit.path), edit.line)
        if (edit.path, function) in self._functions:
            return 0
        return 1 if (edit.path, function.rpartition(".")[0]) in self._classes else 2


class EditFinder:
    """Finds the edits linked to the failures of one session."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._changed: dict[Path, Edits] = {}

    def edits(
        self, result: Result, analyzed_peaks: tuple[AnalyzedPeak, ...], baseline: Path
    ) -> Edits:
        """Return the edits since a baseline's commit; ``lines`` are those linked to a growth.

        There are none if no peak grew, or if the breakdowns of its device are unknown.
        """
        verdict, row = result.verdict, result.leading_comparison
        if verdict.kind is not Kind.REGRESSED or verdict.held_to or row is None:
            return Edits()
        if len(analyzed_peaks) <= row.device or len(result.breakdowns_before) <= row.device:
            return Edits()
        if baseline not in self._changed:
            self._changed[baseline] = changed_lines(self._root, baseline)
        changed = self._changed[baseline]
        if not changed.number:
            return changed
        growth = _Growth(result, analyzed_peaks[row.device], row.device, self._root)
        ranked = [(growth.rank(edit), edit) for edit in changed.lines]
        close = [(rank, edit) for rank, edit in ranked if rank is not None]
        close.sort(key=lambda pair: (*pair[0], pair[1].path, pair[1].line))
        near = [replace(edit, grows=not rank) for (rank, _), edit in close]
        return changed._replace(lines=near, all_lines=sorted(changed.lines, key=growth.distance))


def edited_since(edits: Edits) -> str:
    """Describe the edits since a baseline, those most likely to cause a growth first."""
    hunks: dict[tuple[str, int], list[Edit]] = {}
    for edit in (*edits.lines, *edits.all_lines):
        lines = hunks.setdefault((edit.path, edit.hunk), [])
        if all((edit.line, edit.old, edit.new) != (it.line, it.old, it.new) for it in lines):
            lines.append(edit)
    named = []
    for first, *more in list(hunks.values())[:MAX_NAMED]:
        words = f"{first.path}:{first.line} {edit_words(first.old, first.new)}"
        if len(more) == 1:
            words += f", {more[0].path}:{more[0].line} {edit_words(more[0].old, more[0].new)}"
        elif more:
            words += f", and {len(more)} more lines"
        named.append(words)
    unnamed = len(hunks) - MAX_NAMED
    also = f"; and {unnamed} more edits" if unnamed > 0 else ""
    return f"edited since the baseline: {'; '.join(named)}{also}"
