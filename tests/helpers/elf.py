"""Read the symbols that shared libraries define and need, from 64-bit little-endian ELF files."""

from __future__ import annotations

import mmap
import struct
from typing import NamedTuple

DYNSYM = 11  # SHT_DYNSYM
VERNEED = 0x6FFFFFFE  # SHT_GNU_verneed
MACHINES = {"x86_64": 62, "aarch64": 183}  # EM_X86_64, EM_AARCH64
FUNCTION_OR_UNKNOWN = {0, 2, 10}  # STT_NOTYPE, STT_FUNC, STT_GNU_IFUNC
UNDEFINED, LOCAL, WEAK = 0, 0, 2


class Symbols(NamedTuple):
    """Names of functions, and of symbols without a type, as undefined functions may be."""

    wanted: frozenset[str]
    given: frozenset[str]
    weak: frozenset[str] = frozenset()
    """those of ``given`` that are weak: another library's definition would replace them"""


def symbols(path):
    """Read which symbols a library needs from others, and which ones it defines."""
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


class Needs(NamedTuple):
    """The machine that a library was built for, and the symbol versions that it needs."""

    machine: int
    versions: frozenset[str]
    """from .gnu.version_r, such as "GLIBC_2.17" """


def needs(path):
    """Read what a library requires of the system that loads it."""
    raw = path.read_bytes()
    assert raw[:6] == b"\x7fELF\x02\x01", f"{path} is no 64-bit library"
    table, count = struct.unpack_from("<Q", raw, 40)[0], struct.unpack_from("<H", raw, 60)[0]
    sections = [struct.unpack_from("<IIQQQQIIQQ", raw, table + 64 * i) for i in range(count)]
    versions = set()
    for _, kind, _, _, offset, _, link, number, *_ in sections:
        if kind != VERNEED:
            continue
        names, at_entry = sections[link][4], offset
        for _ in range(number):  # Elf64_Verneed, each with a chain of Elf64_Vernaux
            _, auxiliaries, _, first, following = struct.unpack_from("<HHIII", raw, at_entry)
            at = at_entry + first
            for _ in range(auxiliaries):
                _, _, _, name, after = struct.unpack_from("<IHHII", raw, at)
                start = names + name
                versions.add(raw[start : raw.index(b"\0", start)].decode())
                at += after
            at_entry += following
    return Needs(struct.unpack_from("<H", raw, 18)[0], frozenset(versions))


def _sorted_out(table, names):
    wanted, given, weak = set(), set(), set()
    for name, info, _, section, _, _ in struct.iter_unpack("<IBBHQQ", table):
        if info >> 4 == LOCAL or info & 15 not in FUNCTION_OR_UNKNOWN or not name:
            continue
        text = names[name : names.index(b"\0", name)].decode()
        (wanted if section == UNDEFINED else given).add(text)
        if section != UNDEFINED and info >> 4 == WEAK:
            weak.add(text)
    return Symbols(*map(frozenset, (wanted, given, weak)))
