"""Cache the metadata of installed packages in this process.

At the beginning of each session pytest reads the entry points of every package, and the files,
names and versions of its plugins: a third of the time of a small session.
"""

import sys
from importlib.metadata import PathDistribution


def read_once():
    """Cache the metadata of this environment's packages, not of packages in other folders."""
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
