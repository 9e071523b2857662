"""Cards that the table lacks: a TOML file describes one, as ``gpumem cards --here`` prints it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from pytest_gpumem.devices.card_limits import LIMITS
from pytest_gpumem.errors import SpecError
from pytest_gpumem.sizes import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MAX_FILE: Final = 64 * KIB
"""bytes: a description has a few hundred"""
HOW: Final = (
    "create the file with gpumem cards --here > cards/mine.toml, on a machine with such a GPU"
)

_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 50)]
_Positive = Annotated[int, msgspec.Meta(gt=0, lt=1 << 50)]
_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][-.\w]{0,63}$")]


class CardFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The file's form; :class:`~pytest_gpumem.devices.cards.Card` says what each field is."""

    device_name: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    total_memory: _Positive
    capability: tuple[int, int]
    sm_count: _Positive
    name: _Name = ""
    context: _Size | None = None
    l2_cache_size: _Size = 0
    memory_bus_width: _Size = 0
    source: str = ""


def estimated_context(capability: tuple[int, int], sm_count: int) -> int:
    """Return the bytes of a CUDA context by :mod:`~pytest_gpumem.devices.cards`' rule."""
    return 2 * KIB * LIMITS[capability].max_threads_per_sm * sm_count + 8 * MIB


def read_card_file(path: Path) -> dict[str, Any]:
    """Return the fields of a card from its file; its name is the file's unless that says another.

    Raises:
        SpecError: the file cannot be read, or does not describe a card.
    """
    subject = f"card {str(path)!r}"
    try:
        content = path.read_bytes() if path.stat().st_size <= MAX_FILE else None
    except OSError as error:
        raise SpecError(subject, f"cannot be read ({error.strerror})", HOW) from error
    if content is None:
        raise SpecError(subject, "the file is too large for a card file", HOW)
    try:
        fields = msgspec.toml.decode(content, type=CardFields)
        fields.name = fields.name or msgspec.convert(path.stem, _Name)
    except (msgspec.MsgspecError, ValueError) as error:  # tomllib's, and of bytes that are no text
        raise SpecError(subject, f"does not describe a card ({error})", HOW) from error
    if fields.capability not in LIMITS:
        capabilities = ", ".join(f"[{major}, {minor}]" for major, minor in LIMITS)
        problem = f"the virtual GPU does not support capability = {[*fields.capability]}"
        raise SpecError(subject, problem, f"it supports {capabilities}")
    fields.source = fields.source or path.name
    if fields.context is None:
        fields.context = estimated_context(fields.capability, fields.sm_count)
    if fields.context >= fields.total_memory:
        raise SpecError(subject, "context is larger than total_memory", HOW)
    return msgspec.structs.asdict(fields)


def card_file_text(fields: Mapping[str, Any]) -> str:
    """Return the text of a file that :func:`read_card_file` reads.

    JSON's texts, numbers and lists are TOML's as well.
    """
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items()]
    return "\n".join(["# for card = FILE, to make the virtual GPU this GPU", *lines])
