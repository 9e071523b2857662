"""The pytest plugin: a door. It may import every room but cli and explain.

pytest loads this package by the entry point ``gpumem``, and for ``-p pytest_gpumem.plugin``: its
hooks have to be names in here.

From here on this package's modules are imported as Python imports them. pytest rewrites the
assertions of every module of a plugin's package. That takes longer than all their imports in each
session that has no cache of it: the first one of a new environment, so each of CI's, and all where
nothing may write one (``PYTHONDONTWRITEBYTECODE``, a read-only environment).
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

PACKAGE: Final = __name__.partition(".")[0]


class PlainImports(MetaPathFinder):
    """Finds this package's modules before pytest's finder does."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module of this package beside the package's other ones."""
        if not fullname.startswith(f"{PACKAGE}."):
            return None
        return PathFinder.find_spec(fullname, path, target)


sys.meta_path.insert(0, PlainImports())

from pytest_gpumem.plugin.entry import (  # noqa: E402 - after the finder
    card_fixture,
    gpu_memory_fixture,
    pytest_addhooks,
    pytest_addoption,
    pytest_configure,
    pytest_generate_tests,
    pytest_load_initial_conftests,
    rank_fixture,
)

__all__ = [
    "card_fixture",
    "gpu_memory_fixture",
    "pytest_addhooks",
    "pytest_addoption",
    "pytest_configure",
    "pytest_generate_tests",
    "pytest_load_initial_conftests",
    "rank_fixture",
]
