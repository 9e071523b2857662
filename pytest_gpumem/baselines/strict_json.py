"""Strict reading of JSON, for baselines and reports, with clear words about a broken text."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any, Final, NoReturn

CONFLICT: Final = re.compile(r"^([<=>|])\1{6}(?=\s|$)", re.MULTILINE)
"""a marker that git leaves in a file"""


class JsonProblem(ValueError):  # noqa: N818 - each reader makes an error of its own of it
    """The fault of a text, to follow a file's name: "is empty"."""

    def __init__(self, problem: str, *, encoding: bool = False, conflict: bool = False) -> None:
        super().__init__(problem)
        self.encoding = encoding
        """whether it is the text's encoding"""
        self.conflict = conflict
        """whether it is a merge-conflict marker"""


def parse_json(content: str | bytes, kind: str) -> Any:  # noqa: ANN401 - JSON
    """Return the value of a JSON text.

    Bytes are UTF-8, with or without a byte order mark; ``kind`` names the file in messages.

    Raises:
        JsonProblem: it is not JSON, has a name twice in an object, or NaN or infinity.
    """
    decoded = ""
    try:
        decoded = content.decode("utf-8-sig") if isinstance(content, bytes) else content
        texts: dict[str, str] = {}
        return json.loads(
            decoded,
            object_pairs_hook=lambda pairs: _unique(pairs, texts),
            parse_constant=_refuse_constant,
        )
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 text: byte {error.object[error.start]:#04x} at {error.start}"
        raise JsonProblem(problem, encoding=True) from None
    except RecursionError:
        raise JsonProblem(f"is nested too deeply for {kind}") from None
    except json.JSONDecodeError as error:
        if not decoded.strip():
            raise JsonProblem("is empty") from None
        if conflict := CONFLICT.search(decoded):
            line = decoded.count("\n", 0, conflict.start()) + 1
            problem = f"has a merge-conflict marker ({conflict[0]}) in line {line}"
            raise JsonProblem(problem, conflict=True) from None
        problem = f"is not JSON: {error.msg} in line {error.lineno}, column {error.colno}"
        raise JsonProblem(problem) from None
    except ValueError as error:
        raise JsonProblem(f"is not {kind}: {error}") from None


def _unique(pairs: list[tuple[str, Any]], texts: dict[str, str]) -> dict[str, Any]:
    """Return an object's fields, equal texts of a file as one: a suite's results share many."""
    fields = {
        name: texts.setdefault(value, value) if type(value) is str else value
        for name, value in pairs
    }
    if len(fields) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{json.dumps(name)} occurs twice in one object")
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of bytes")
