"""The pytest plugin: a door. It may import every room but cli.

pytest loads this package by the entry point ``gpumem``, and for ``-p pytest_gpumem.plugin``: its
hooks have to be names in here.
"""

from pytest_gpumem.plugin import plain_imports  # noqa: F401 - before all others
from pytest_gpumem.plugin.entry import (
    _card,
    _rank,
    gpu_memory_fixture,
    pytest_addhooks,
    pytest_addoption,
    pytest_configure,
    pytest_generate_tests,
    pytest_load_initial_conftests,
)

__all__ = [
    "_card",
    "_rank",
    "gpu_memory_fixture",
    "pytest_addhooks",
    "pytest_addoption",
    "pytest_configure",
    "pytest_generate_tests",
    "pytest_load_initial_conftests",
]
