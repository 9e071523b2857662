"""Run pytest with replaced sources: ``python -m pytest_gpumem.cli.bisect.undone``.

The arguments are a JSON file that maps paths to sources, and pytest's arguments. No file is
changed.
"""

from __future__ import annotations

import json
import linecache
import os
import runpy
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import CodeType


def main() -> None:
    """Run pytest with the replaced sources; pytest ends the process."""
    sources: dict[str, str] = json.loads(Path(sys.argv[1]).read_bytes())
    for path, source in sources.items():
        _cache_lines(path, source)
    get_code = SourceFileLoader.get_code

    def code_of(loader: SourceFileLoader, name: str) -> CodeType | None:
        source = sources.get(os.path.realpath(loader.path))
        if source is None:
            return get_code(loader, name)
        _cache_lines(loader.path, source)  # the path may be a symbolic link
        return compile(source, loader.path, "exec", dont_inherit=True)

    SourceFileLoader.get_code = code_of  # type: ignore[assignment, method-assign]
    sys.argv = ["pytest", *sys.argv[2:]]
    runpy.run_module("pytest", run_name="__main__", alter_sys=True)


def _cache_lines(path: str, source: str) -> None:
    # inspect reads sources from this cache; an entry without a time is never invalidated.
    linecache.cache[path] = len(source), None, source.splitlines(keepends=True), path


if __name__ == "__main__":
    main()
