"""Addresses that open a source line in the reader's editor."""

from __future__ import annotations

import sysconfig
from os.path import normpath
from pathlib import Path
from typing import Final
from urllib.parse import quote

EDITORS: Final = {
    "vscode": "vscode://file{path}:{line}",
    "cursor": "cursor://file{path}:{line}",
    "zed": "zed://file{path}:{line}",
    "pycharm": "pycharm://open?file={path}&line={line}",
}
"""the addresses that editors answer, by their names: {path} is absolute"""


def editor_address(editor: str, name: str, line: int, root: str) -> str:
    """Return the address that opens a source line; "" where the file does not exist.

    Args:
        editor: the address, with {path} and {line}.
        name: the file: absolute, or relative to the root or to the installed packages.
        line: from 1.
        root: an absolute folder.
    """
    for folder in (root, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        path = Path(folder, name)
        if path.is_file():
            return editor.format(path=quote(normpath(path)), line=line)
    return ""
