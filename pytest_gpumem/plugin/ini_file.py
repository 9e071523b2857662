"""Values of pytest's configuration file, in each form that pytest reads.

pytest.ini, tox.ini and setup.cfg have text, and ``[tool.pytest.ini_options]`` makes text of all but
lists. Since pytest 9, ``[tool.pytest]`` and pytest.toml have TOML's own types, and pytest takes one
type for each setting: a setting that may be true or a list is then read from the file here.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


def read_ini(config: pytest.Config, name: str) -> object:
    """Return a setting of the configuration file or of "-o"; its default where neither has one.

    Raises:
        UsageError: a value that pytest cannot read.
    """
    try:
        return config.getini(name)
    except (pytest.UsageError, TypeError, ValueError, Warning) as error:
        overridden = any(
            setting.partition("=")[0] == name
            for setting in getattr(config.known_args_namespace, "override_ini", None) or ()
        )
        value = None if overridden or config.inipath is None else _of_toml(config.inipath, name)
        if value is None:
            raise pytest.UsageError(str(error)) from error
        return value


def _of_toml(path: Path, name: str) -> object:
    """Return a setting as a TOML file has it; None: the file has none."""
    if path.suffix != ".toml":
        return None
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # which pytest needs

    document = tomllib.loads(path.read_text("utf-8"))
    table = document.get("tool", {}).get("pytest", {})
    for settings in (table, table.get("ini_options", {}), document.get("pytest", {})):
        if name in settings:
            return settings[name]
    return None


def as_text(value: object) -> str:
    """Return a setting's value as on the command line: a list with commas, true in lower case."""
    if isinstance(value, list):
        return ",".join(map(as_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
