"""The pytest plugin, an entry point of the package; it may import all packages but cli and explain.

pytest loads this package by the entry point ``gpumem``, and with ``-p pytest_gpumem.plugin``, so
its hooks must be names of this module.
"""

from pytest_gpumem.plugin.entry import (
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
