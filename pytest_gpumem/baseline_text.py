"""The text of a baseline file as JSON, strictly; what is wrong with one that is none."""

from __future__ import annotations

import json
import re
from typing import Any, Final, NoReturn

from pytest_gpumem.errors import BaselineError

RESTORE: Final = (
    "restore it from version control, or delete it and run with --gpumem-update-baselines"
)


def parse_json(given: str, content: bytes) -> Any:  # noqa: ANN401 - JSON
    """Return what a file has.

    Raises:
        BaselineError: it is no JSON, or a name is there twice.
    """
    try:
        text = content.decode("utf-8-sig")
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 text: byte {error.object[error.start]:#04x} at {error.start}"
        remedy = f"save it as UTF-8, or {RESTORE}"
    except RecursionError:
        problem, remedy = "is nested too deeply for a baseline", RESTORE
    except json.JSONDecodeError as error:
        problem, remedy = _explain(text, error)
    except ValueError as error:
        problem, remedy = f"is not a baseline: {error}", RESTORE
    raise BaselineError(given, problem, remedy) from None


def _explain(text: str, error: json.JSONDecodeError) -> tuple[str, str]:
    """What is wrong with a text that is not JSON, and what to do."""
    if not text.strip():
        return "is empty", RESTORE
    if conflict := re.search(r"^([<=>|])\1{6}(?=\s|$)", text, re.MULTILINE):
        line = text.count("\n", 0, conflict.start()) + 1
        return (
            f"has a merge-conflict marker ({conflict[0]}) in line {line}",
            "take one side (git checkout --ours or --theirs) and run --gpumem-update-baselines",
        )
    return f"is not JSON: {error.msg} in line {error.lineno}, column {error.colno}", RESTORE


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{json.dumps(twice)} is there twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of bytes")
