"""Makes a folder of links to an environment's torch and what it requires, and to nothing else.

python release/lend_torch.py SITE_PACKAGES FOLDER
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path


def required(known: dict[str, Distribution], name: str) -> set[str]:
    """Return the names of a distribution and of all that it needs and that is there."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        one = plain(waiting.pop())
        if one in found or one not in known:
            continue
        found.add(one)
        for requirement in known[one].requires or ():
            wanted = re.match(r"[\w.-]+", requirement)
            if wanted and "extra ==" not in requirement:
                waiting.append(wanted[0])
    return found


def plain(name: str) -> str:
    """Return a distribution's name as it is compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    """Make the links."""
    source, folder = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    known = {plain(it.metadata["Name"]): it for it in distributions(path=[str(source)])}
    folder.mkdir(exist_ok=True)
    for name in required(known, "torch"):
        for file in known[name].files or ():
            top = file.parts[0]
            if top not in {"..", "__pycache__"} and not (folder / top).exists():
                (folder / top).symlink_to(source / top)


if __name__ == "__main__":
    main()
