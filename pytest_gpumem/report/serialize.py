"""Serialize results, to send them on pytest's test reports, through xdist and torchrun.

The text is a JSON list, in pure ASCII if a name is not valid Unicode. A session keeps thousands of
reports: a text is one object to free, while plain data are hundreds.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import msgspec

from pytest_gpumem.errors import GpuMemError
from pytest_gpumem.judge.result import Result

if TYPE_CHECKING:
    from collections.abc import Sequence

_DECODER: Final = msgspec.json.Decoder(list[Result])


def to_text(results: Sequence[Result]) -> str:
    """Serialize results to JSON, timelines included."""
    try:
        return msgspec.json.encode(results).decode()
    except (UnicodeEncodeError, OverflowError):  # a lone surrogate, or an integer beyond 64 bits
        return json.dumps(msgspec.to_builtins(results))


def from_text(content: object) -> list[Result]:
    """Parse what :func:`to_text` of this version wrote, or raise a GpuMemError."""
    try:
        if not isinstance(content, str):
            raise TypeError(f"they are not text but of type {type(content).__name__}")  # noqa: TRY301
        try:
            return _DECODER.decode(content)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:  # msgspec rejects lone surrogates, json does not
            return msgspec.convert(json.loads(content), list[Result])
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        remedy = "run the same version of pytest-gpumem in every process of the session"
        raise GpuMemError("results of tests", f"cannot be read: {error}", remedy) from error
