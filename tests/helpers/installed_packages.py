"""Metadata of installed packages, read once a process.

pytest asks every package for its entry points, and its plugins for their files, names and versions,
at the beginning of each session: a third of the time of a small one.
"""

import sys
from importlib.metadata import PathDistribution


def read_once():
    """Let the packages of this environment be read once; those of other folders are as ever."""
    for name in ("metadata", "entry_points", "files"):
        setattr(PathDistribution, name, property(_once(getattr(PathDistribution, name).fget)))


def _once(read):
    results = {}

    def read_or_remembered(distribution):
        path = str(distribution._path)
        if not path.startswith(sys.prefix):
            return read(distribution)
        if path not in results:
            results[path] = read(distribution)
        return results[path]

    return read_or_remembered
