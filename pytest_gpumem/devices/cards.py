"""GPU models: the properties that CUDA reports, from cards.csv, and the names of cards.

Total memory is ``cudaDeviceProp.totalGlobalMem``, which ``torch.cuda.get_device_properties``
returns as ``total_memory``. It is less than the size on the box, and varies by up to one per cent
with the driver and with ECC. The table has one figure per card, observed on such a card under
Linux: of the records that are exact to the byte, the one with the most recent driver.
``Card.source`` says where that record was published, and which other figures were observed. If the
record is a log outside of any repository or issue, ``source`` names the driver and the tool.

The CUDA context is memory that a process takes before its first allocation. NVIDIA does not
document its size. With lazy module loading (PyTorch's default since 1.13) published measurements
lie between 107 MiB (RTX 4060 Ti) and 555 MiB (RTX PRO 6000 Blackwell), both in
ggml-org/llama.cpp#23604; before lazy loading it was 0.7 to 1.1 GiB. A rule of 2 KiB for each thread
that can be resident on the card, plus 8 MiB, is within 4 per cent of the measurement on 5 of 5
cards (also H100, RTX 3090, RTX 6000 Ada); a T4 showed 41 MiB more. A card whose context was not
measured gets this estimate, and its ``source`` says so.

A TOML file, which ``gpumem cards --here`` prints, describes a card that the table lacks.
"""

from __future__ import annotations

import csv
import difflib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from pytest_gpumem.errors import SpecError
from pytest_gpumem.measurement import DeviceInfo
from pytest_gpumem.sizes import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True)
class ArchLimits:
    """The limits of one compute capability; shared memory in bytes, registers of 32 bits.

    Attributes:
        shared_memory_per_block: limit for a block that does not opt in to more.
        shared_memory_per_block_optin: the maximum that ``cudaFuncSetAttribute`` allows.
        reserved_shared_memory_per_block: shared memory that CUDA itself reserves in each block.
    """

    max_threads_per_sm: int
    max_blocks_per_sm: int
    shared_memory_per_sm: int
    shared_memory_per_block_optin: int
    reserved_shared_memory_per_block: int = KIB
    shared_memory_per_block: int = 48 * KIB
    registers_per_sm: int = 65536


# From the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": CUDA 12's
# guide has 7.0, CUDA 13's the others. From 8.0 on, CUDA reserves 1 KiB of shared memory in each
# block (tuning guides).
LIMITS: Mapping[tuple[int, int], ArchLimits] = MappingProxyType(
    {
        (7, 0): ArchLimits(2048, 32, 96 * KIB, 96 * KIB, 0),
        (7, 5): ArchLimits(1024, 16, 64 * KIB, 64 * KIB, 0),
        (8, 0): ArchLimits(2048, 32, 164 * KIB, 163 * KIB),
        (8, 6): ArchLimits(1536, 16, 100 * KIB, 99 * KIB),
        (8, 9): ArchLimits(1536, 24, 100 * KIB, 99 * KIB),
        (9, 0): ArchLimits(2048, 32, 228 * KIB, 227 * KIB),
        (10, 0): ArchLimits(2048, 32, 228 * KIB, 227 * KIB),
        (12, 0): ArchLimits(1536, 24, 100 * KIB, 99 * KIB),
    }
)


@dataclass(frozen=True, kw_only=True)
class Card:
    """One GPU model, as CUDA reports it.

    Attributes:
        name: the name that users write, such as ``A100-80GB``.
        device_name: ``cudaDeviceProp.name``.
        total_memory: ``cudaDeviceProp.totalGlobalMem``, in bytes.
        capability: compute capability, major and minor.
        sm_count: number of streaming multiprocessors.
        context: bytes that a CUDA context takes before the first allocation.
        l2_cache_size: bytes of the L2 cache.
        memory_bus_width: bits of the memory bus.
        source: where these figures come from.
    """

    name: str
    device_name: str
    total_memory: int
    capability: tuple[int, int]
    sm_count: int
    context: int
    l2_cache_size: int
    memory_bus_width: int
    source: str

    @property
    def usable_memory(self) -> int:
        """Bytes left for allocations once the CUDA context exists."""
        return self.total_memory - self.context

    @property
    def info(self) -> DeviceInfo:
        """The DeviceInfo of a virtual GPU with this card's properties."""
        facts = self.name, self.total_memory, self.capability, self.sm_count, self.context
        return DeviceInfo("virtual", *facts)

    @property
    def limits(self) -> ArchLimits:
        """The limits of this card's compute capability."""
        return LIMITS[self.capability]


# -- the file of a card --

MAX_FILE: Final = 64 * KIB
"""maximum size of a card file in bytes; a real one has a few hundred"""
HOW: Final = (
    "create the file with gpumem cards --here > cards/mine.toml, on a machine with such a GPU"
)

_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 50)]
_Positive = Annotated[int, msgspec.Meta(gt=0, lt=1 << 50)]
_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][-.\w]{0,63}$")]


class CardFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of a card's file; see :class:`Card`."""

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
    """Return the bytes of a CUDA context, estimated by the rule in this module's docstring."""
    return 2 * KIB * LIMITS[capability].max_threads_per_sm * sm_count + 8 * MIB


def read_card_file(path: Path) -> dict[str, Any]:
    """Return the fields of a card from its file.

    If the file does not name the card, its name is the file's without the suffix.

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
    except (msgspec.MsgspecError, ValueError) as error:  # ValueError: it is no TOML or no text
        raise SpecError(subject, f"does not describe a card ({error})", HOW) from error
    if fields.capability not in LIMITS:
        capabilities = ", ".join(f"[{major}, {minor}]" for major, minor in LIMITS)
        problem = f"the virtual GPU does not support capability = {[*fields.capability]}"
        raise SpecError(subject, problem, f"it supports {capabilities}")
    fields.source = fields.source or path.name
    if fields.context is None:
        fields.context = estimated_context(fields.capability, fields.sm_count)
    if fields.context >= fields.total_memory:
        raise SpecError(subject, "context leaves nothing of total_memory", HOW)
    return msgspec.structs.asdict(fields)


def card_file_text(fields: Mapping[str, Any]) -> str:
    """Return the text of a card's file with these fields, which :func:`read_card_file` reads.

    Values are written as JSON, whose strings, numbers and lists are valid TOML.
    """
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items()]
    return "\n".join(["# for card = FILE, to make the virtual GPU this GPU", *lines])


# -- the table --


def _read_table() -> Iterator[tuple[Card, list[str]]]:
    """Yield the cards of cards.csv, each with its aliases."""
    path = Path(__file__).with_name("cards.csv")
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            major, _, minor = row["capability"].partition(".")
            card = Card(
                name=row["name"],
                device_name=row["device_name"],
                total_memory=int(row["total_memory"]),
                capability=(int(major), int(minor)),
                sm_count=int(row["sm_count"]),
                context=int(row["context_mib"]) * MIB,
                l2_cache_size=int(row["l2_cache_kib"]) * KIB,
                memory_bus_width=int(row["memory_bus_width"]),
                source=row["source"],
            )
            yield card, [alias for alias in row["aliases"].split("; ") if alias]


_TABLE = tuple(_read_table())
_cards = {card.name: card for card, _ in _TABLE}
CARDS: Mapping[str, Card] = MappingProxyType(_cards)
"""all cards by name: the cards of the table, and cards read from files"""


def card_names() -> tuple[str, ...]:
    """Return the names of the table's cards, in its order."""
    return tuple(card.name for card, _ in _TABLE)


def _key(name: str) -> str:
    """Return the part of a name that identifies a card: without case, separators, maker, series."""
    compact = re.sub(r"[^a-z0-9]", "", name.lower())
    compact = re.sub(r"nvidia|tesla|geforce|rtx|generation", "", compact)
    return re.sub(r"(16|32|40|72|80)gi?b?$", r"\1gb", compact)


# A card's own name takes precedence over another card's CUDA name, and a CUDA name over an alias.
_BY_KEY: Mapping[str, Card] = {
    **{_key(alias): card for card, aliases in _TABLE for alias in aliases},
    **{_key(card.device_name): card for card in CARDS.values()},
    **{_key(card.name): card for card in CARDS.values()},
}


def _card_of_file(path: str) -> Card:
    """Return the card that a file describes, and add it to :data:`CARDS`.

    Raises:
        SpecError: the file does not describe a card, or another card has its name.
    """
    card = Card(**read_card_file(Path(path)))
    if card.name in card_names() or _cards.get(card.name, card) != card:
        raise SpecError(
            f"card {path!r}", f"another card has the name {card.name!r}", "give it another name"
        )
    _cards[card.name] = card
    return card


def find_card(name: str) -> Card:
    """Return the card of this name in any spelling: ``a100 80gb``, ``RTX3090``, ``nvidia h100``.

    The name may be the path of a file that describes a card, "cards/mine.toml".

    Raises:
        SpecError: no card has this name, it is ambiguous, or the file does not describe a card.
    """
    name = str.__str__(name)  # plain str: a subclass's own methods may raise
    if name.endswith(".toml"):
        return _card_of_file(name)
    if name in _cards:
        return _cards[name]
    key = _key(name)
    if key in _BY_KEY:
        return _BY_KEY[key]
    # Several cards may match, as "a100" matches two: the error names them in the table's order.
    with_prefix = {
        card.name for card_key, card in _BY_KEY.items() if key and card_key.startswith(key)
    }
    candidates = [card_name for card_name in CARDS if card_name in with_prefix]
    if len(candidates) > 1:
        remedy = f"write {', '.join(candidates[:-1])} or {candidates[-1]}"
        raise SpecError(f"card {name!r}", "this name fits several cards", remedy)
    candidates = candidates or [
        _BY_KEY[similar].name for similar in difflib.get_close_matches(key, _BY_KEY, n=1)
    ]
    names = ", ".join(card_names())
    remedy = f"write one of {names}"
    if candidates:
        remedy = f"did you mean {candidates[0]!r}? The cards are {names}"
    raise SpecError(f"card {name!r}", "no card has this name", remedy)
