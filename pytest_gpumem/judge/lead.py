"""The lead of a report on a growth: the one sentence on its cause that every format begins with.

A change leads: a line that was edited and that allocates the memory; a version of the
toolchain; a line that was edited elsewhere. Else it is the line that grew most. Pure.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from pytest_gpumem.judge.breakdown_diff import site_name
from pytest_gpumem.judge.causes import SEGMENTS
from pytest_gpumem.judge.toolchain_change import toolchain_text
from pytest_gpumem.judge.verdict import Edit, Lead
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.judge.verdict import Cause, LeadKind
    from pytest_gpumem.measurement import Provenance

_TOKEN: Final = re.compile(r"[\w.]+|\S")
_ENDS: Final = frozenset("()[]{},=:")
"""tokens at which an argument ends: a change is shown as whole arguments"""
MAX_ARGUMENT_LENGTH: Final = 60
"""characters of a changed argument; a longer change is shown as the whole line"""


def lead_of(
    causes: Sequence[Cause],
    edits: Sequence[Edit] = (),
    toolchain: tuple[Provenance, Provenance] | None = None,
    *,
    growth: int,
) -> Lead | None:
    """Return the lead on a growth; None where nothing is known of its cause.

    A line that grew by more than ``growth``, the peak's bytes, explains no more than that.
    """
    if causes and causes[0].old_code and causes[0].site is not None:
        site = causes[0].site
        return _edit_lead(Edit(site.path, site.line, causes[0].old_code, site.code))
    if edits and edits[0].grows:
        return _edit_lead(edits[0])
    if toolchain is not None:
        old, new = toolchain
        # A driver by itself changes nothing that PyTorch allocates; with others it is named.
        if replace(old, driver=new.driver) != new:
            versions = toolchain_text(old, new)
            return Lead("toolchain", versions, place=versions)
    if edits:
        return _edit_lead(edits[0])
    return _growth_lead(causes[0], growth) if causes else None


def _growth_lead(cause: Cause, growth: int) -> Lead:
    """Return the lead that names the line, or the category, that grew most."""
    words = f"{cause.category} {format_size(min(cause.nbytes, growth), signed=True)}"
    site = cause.site
    if site is None or not site.path:
        return Lead("category", ", ".join([words, *cause.reasons]), place=cause.category)
    place = site_name(site)
    names = ", ".join(dict.fromkeys(keeper.name for keeper in cause.keepers))
    keepers = f", kept by {names}" if names else ""
    kind: LeadKind = "segment" if cause.category == SEGMENTS else "line"
    return Lead(kind, f"{words} at {place}{keepers}", site.path, site.line, place)


def _edit_lead(edit: Edit) -> Lead:
    sentence = f"{edit.path}:{edit.line} {edit_words(edit.old, edit.new)}"
    return Lead("edit", sentence, edit.path, edit.line, sentence)


def edit_words(old: str, new: str) -> str:
    """Return an edit of a line in words: "changed: 4096 -> 16384", "is new: x = f(x)"."""
    if not old:
        return f"is new: {new}"
    if not new:
        return f"is gone: {old}"
    old_argument, new_argument = _changed_arguments(old, new)
    if max(len(old_argument), len(new_argument)) > MAX_ARGUMENT_LENGTH:
        return f"changed: {old} -> {new}"
    if not old_argument:
        return f"changed: {new_argument} was added"
    if not new_argument:
        return f"changed: {old_argument} was removed"
    return f"changed: {old_argument} -> {new_argument}"


def _changed_arguments(old: str, new: str) -> tuple[str, str]:
    """Return the stretch of two lines in which they differ, from an argument's start to its end."""
    sides = list(_TOKEN.finditer(old)), list(_TOKEN.finditer(new))
    words = [[token[0] for token in side] for side in sides]
    shortest = min(map(len, words))
    first = next((i for i in range(shortest) if words[0][i] != words[1][i]), shortest)
    room = shortest - first
    last = next((i for i in range(room) if words[0][-1 - i] != words[1][-1 - i]), room)
    # Both ends move outwards to the end of an argument; what they pass is the same on both sides.
    starts = {side[first] for side in words if first < len(side) - last}
    while first and not starts & _ENDS and words[0][first - 1] not in _ENDS:
        first -= 1
    while last and words[0][-last] not in _ENDS:
        last -= 1
    stretches = []
    for code, tokens in zip((old, new), sides, strict=True):
        inner = tokens[first : len(tokens) - last]
        stretches.append(code[inner[0].start() : inner[-1].end()] if inner else "")
    old_argument, new_argument = (stretch.strip(", ") for stretch in stretches)
    return old_argument, new_argument
