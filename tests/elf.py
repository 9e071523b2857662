"""The dynamic symbols of a shared library: a small reader of 64-bit little-endian ELF files."""

from __future__ import annotations

import mmap
import struct
from typing import NamedTuple

DYNSYM = 11  # SHT_DYNSYM
FUNCTION_OR_UNKNOWN = {0, 2, 10}  # STT_NOTYPE, STT_FUNC, STT_GNU_IFUNC
UNDEFINED, LOCAL = 0, 0


class Symbols(NamedTuple):
    """Names of functions (and of what has no type, as undefined symbols may)."""

    wanted: frozenset[str]
    given: frozenset[str]


def symbols(path):
    """Read which symbols a library wants of others and which ones it gives."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
        if raw[:6] != b"\x7fELF\x02\x01":
            return Symbols(frozenset(), frozenset())
        table, count = struct.unpack_from("<Q", raw, 40)[0], struct.unpack_from("<H", raw, 60)[0]
        sections = [struct.unpack_from("<IIQQQQIIQQ", raw, table + 64 * i) for i in range(count)]
        for _, kind, _, _, offset, size, link, *_ in sections:
            if kind == DYNSYM:
                names = raw[sections[link][4] : sections[link][4] + sections[link][5]]
                return _sorted_out(raw[offset : offset + size], names)
    return Symbols(frozenset(), frozenset())


def _sorted_out(table, names):
    wanted, given = set(), set()
    for name, info, _, section, _, _ in struct.iter_unpack("<IBBHQQ", table):
        if info >> 4 == LOCAL or info & 15 not in FUNCTION_OR_UNKNOWN or not name:
            continue
        text = names[name : names.index(b"\0", name)].decode()
        (wanted if section == UNDEFINED else given).add(text)
    return Symbols(frozenset(wanted), frozenset(given))
