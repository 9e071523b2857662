"""JSON as baselines and reports are read: strictly, and what is wrong with a text that is none."""

from __future__ import annotations

import json
import re
from typing import Any, Final, NoReturn

CONFLICT: Final = re.compile(r"^([<=>|])\1{6}(?=\s|$)", re.MULTILINE)
"""a marker that git leaves in a file"""


class JsonProblem(ValueError):  # noqa: N818 - each reader makes an error of its own of it
    """What is wrong with a text, to follow a file's name: "is empty"."""

    def __init__(self, problem: str, *, encoding: bool = False, conflict: bool = False) -> None:
        super().__init__(problem)
        self.encoding = encoding
        """whether it is the text's encoding"""
        self.conflict = conflict
        """whether it is a merge-conflict marker"""


def parse_json(content: str | bytes, kind: str) -> Any:  # noqa: ANN401 - JSON
    """Return what a text has.

    Args:
        content: of a file; bytes are UTF-8, with or without a byte order mark.
        kind: what it should be: "a baseline".

    Raises:
        JsonProblem: it is no JSON, a name is there twice, or a number is none.
    """
    text = ""
    try:
        text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 text: byte {error.object[error.start]:#04x} at {error.start}"
        raise JsonProblem(problem, encoding=True) from None
    except RecursionError:
        raise JsonProblem(f"is nested too deeply for {kind}") from None
    except json.JSONDecodeError as error:
        raise _explained(text, error) from None
    except ValueError as error:
        raise JsonProblem(f"is not {kind}: {error}") from None


def _explained(text: str, error: json.JSONDecodeError) -> JsonProblem:
    """What is wrong with a text that is not JSON."""
    if not text.strip():
        return JsonProblem("is empty")
    if conflict := CONFLICT.search(text):
        line = text.count("\n", 0, conflict.start()) + 1
        problem = f"has a merge-conflict marker ({conflict[0]}) in line {line}"
        return JsonProblem(problem, conflict=True)
    where = f"line {error.lineno}, column {error.colno}"
    return JsonProblem(f"is not JSON: {error.msg} in {where}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{json.dumps(twice)} is there twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of bytes")
