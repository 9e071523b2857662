"""Results as text and back: they travel on pytest's test reports, through xdist and torchrun too.

The text is JSON, a list of results, and of ASCII where a name is no valid Unicode. A session keeps
thousands of reports: a text is one object to free, plain data are hundreds.
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
    """Return results as JSON, timelines included."""
    try:
        return msgspec.json.encode(results).decode()
    except (UnicodeEncodeError, OverflowError):  # half a surrogate pair, or beyond 64 bits
        return json.dumps(msgspec.to_builtins(results))


def from_text(content: object) -> list[Result]:
    """Return the results that :func:`to_text` of this version wrote, or raise a GpuMemError."""
    try:
        if not isinstance(content, str):
            raise TypeError(f"they are not text but of type {type(content).__name__}")  # noqa: TRY301
        try:
            return _DECODER.decode(content)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:  # msgspec knows no half of a surrogate pair
            return msgspec.convert(json.loads(content), list[Result])
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        remedy = "run the same version of pytest-gpumem in every process of the session"
        raise GpuMemError("results of tests", f"cannot be read: {error}", remedy) from error
