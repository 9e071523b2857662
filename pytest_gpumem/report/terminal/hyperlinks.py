"""Links in terminals that have them (OSC 8): a source line opens its file."""

from __future__ import annotations

import re
import socket
from typing import TYPE_CHECKING, Final

from pytest_gpumem.report.editors import editor_address

if TYPE_CHECKING:
    from collections.abc import Mapping

START: Final = "\x1b]8;;{}\x1b\\"
"""begins a link, and without an address ends it: as
https://gist.github.com/egmontkob/eb114294efbcd5adb1944c9f3cb5feda has it"""
PROGRAMS: Final = {"iTerm.app", "WezTerm", "vscode", "ghostty", "Hyper", "rio", "Tabby"}
"""values of TERM_PROGRAM of terminals with links"""
VARIABLES: Final = ("KITTY_WINDOW_ID", "WT_SESSION", "KONSOLE_VERSION", "DOMTERM", "ALACRITTY_LOG")
"""variables that only terminals with links set"""
TERMS: Final = ("xterm-kitty", "xterm-ghostty", "alacritty", "foot", "wezterm")
OLDEST_VTE: Final = 5000
"""the first version of GNOME's terminal with links, as VTE_VERSION has it"""
_PLACE: Final = re.compile(r"(?<![\w/.-])((?:[\w.-]+/|/)*[\w.-]+\.py):(\d+)\b")


def has_links(environ: Mapping[str, str], *, interactive: bool) -> bool:
    """Return whether the terminal shows links; FORCE_HYPERLINK=1 or 0 decides.

    Args:
        environ: the environment.
        interactive: whether the output is a terminal at all.
    """
    forced = environ.get("FORCE_HYPERLINK", "")
    if forced:
        return forced != "0"
    if not interactive or "CI" in environ or environ.get("TERM") == "dumb":
        return False
    vte = environ.get("VTE_VERSION", "")
    return (
        (vte.isdecimal() and int(vte) >= OLDEST_VTE)
        or environ.get("TERM_PROGRAM") in PROGRAMS
        or environ.get("TERM", "").startswith(TERMS)
        or any(name in environ for name in VARIABLES)
    )


def with_links(text: str, root: str, editor: str) -> str:
    """Return text whose source lines are links, where their files are there.

    Args:
        text: for a terminal.
        root: the folder that relative names start from.
        editor: the address that opens a source line, with {path} and {line}; "": the file's own.
    """
    address = editor or f"file://{socket.gethostname()}{{path}}"

    def link(match: re.Match[str]) -> str:
        target = editor_address(address, match[1], int(match[2]), root)
        return f"{START.format(target)}{match[0]}{START.format('')}" if target else match[0]

    return _PLACE.sub(link, text)
