"""The line that names the card, put into the file that pytest reads its settings from."""

from __future__ import annotations

import configparser
import re
import sys
from copy import deepcopy
from pathlib import Path  # noqa: TC003 - of a NamedTuple
from typing import Any, Final, NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it there

OPTION: Final = "gpumem_card"


class NewFile(NamedTuple):
    """A file as it is to be."""

    path: Path
    content: str | None
    """None: it cannot be made, and ``note`` says why"""
    note: str = ""
    edited: bool = False
    """whether it is the old content with lines added: that needs no question"""


def with_card(root: Path, card: str) -> NewFile:
    """Return the file of pytest's settings with the card in it.

    It is the file that pytest takes its settings from, or else pyproject.toml. Comments and all
    other lines stay as they are.

    Args:
        root: the project's folder.
        card: its canonical name.
    """
    for name in ("pytest.ini", ".pytest.ini"):  # pytest reads nothing else where one is there
        if (root / name).is_file():
            return _ini_with_card(root / name, card, "pytest")
    toml = root / "pyproject.toml"
    content = _text(toml)
    tables = (_parsed(content) or {}).get("tool", {})
    if "pytest" not in tables:
        for name, section in (("tox.ini", "pytest"), ("setup.cfg", "tool:pytest")):
            path = root / name
            if path.is_file() and f"[{section}]" in _text(path):
                return _ini_with_card(path, card, section)
    return _toml_with_card(toml, content, card)


def _text(path: Path) -> str:
    """Return a file's text; "" if the file does not exist."""
    return path.read_bytes().decode("utf-8", "surrogateescape") if path.is_file() else ""


def _parsed(content: str) -> dict[str, Any] | None:
    """Return the tables of a TOML file; None where it is none."""
    try:
        return tomllib.loads(content.replace("\r\n", "\n"))
    except (tomllib.TOMLDecodeError, UnicodeError, RecursionError):
        return None


def _toml_with_card(path: Path, content: str, card: str) -> NewFile:
    line = f'{OPTION} = "{card}"'
    old = _parsed(content)
    if old is None:
        return NewFile(path, None, f"this file is not valid TOML; add {line} yourself")
    pytest_table = old.get("tool", {}).get("pytest", {})
    # pytest 9 reads [tool.pytest] as well, and refuses a file with both tables.
    native = bool(pytest_table) and "ini_options" not in pytest_table
    table = "tool.pytest" if native else "tool.pytest.ini_options"
    settings = pytest_table if native else pytest_table.get("ini_options", {})
    if OPTION in settings:
        return NewFile(path, content, edited=True)
    new = _with_line(content, table, line)
    expected = deepcopy(old)
    tables = expected.setdefault("tool", {}).setdefault("pytest", {})
    (tables if native else tables.setdefault("ini_options", {}))[OPTION] = card
    if _parsed(new) != expected:  # the table is written in another way: inline, or with dots
        return NewFile(path, None, f"its table {table} is not on separate lines; add {line}")
    return NewFile(path, new, line, edited=True)


def _ini_with_card(path: Path, card: str, section: str) -> NewFile:
    content, line = _text(path), f"{OPTION} = {card}"
    if content.strip() and f"[{section}]" not in content:
        return NewFile(
            path, None, f"this file has no section [{section}]; add this section with {line}"
        )
    if re.search(rf"^{OPTION}\s*[=:]", content, re.MULTILINE):
        return NewFile(path, content, edited=True)
    new = _with_line(content, section, line)
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string(new)
    except configparser.Error as error:
        return NewFile(
            path, None, f"this file cannot be read ({error.message}); add {line} yourself"
        )
    return NewFile(path, new, line, edited=True)


def _with_line(content: str, table: str, line: str) -> str:
    """Return a file's text with a line more at the beginning of a table, which is made if need be.

    Args:
        content: the file's.
        table: its name, without brackets.
        line: without its end.
    """
    ending = "\r\n" if "\r\n" in content else "\n"
    if content and not content.endswith("\n"):
        content += ending
    head = re.search(rf"^\[{re.escape(table)}\][ \t]*(?:[#;].*)?\r?\n", content, re.MULTILINE)
    if head is None:
        gap = ending if content else ""
        return f"{content}{gap}[{table}]{ending}{line}{ending}"
    return f"{content[: head.end()]}{line}{ending}{content[head.end() :]}"
