"""Records as plain data and back: results travel on pytest's test reports, through xdist too.

Plain data is dict (with text keys), list, str, int, float, bool and None: what JSON has.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from pytest_gpumem.errors import GpuMemError

Record = TypeVar("Record")


def to_dict(record: object) -> dict[str, Any]:
    """Return a record (a frozen dataclass: Result, Measurement, Verdict ...) as plain data."""
    plain: dict[str, Any]
    try:  # several times as fast
        plain = msgspec.msgpack.decode(msgspec.msgpack.encode(record))
    except (UnicodeEncodeError, OverflowError):  # half a surrogate pair, or beyond 64 bits
        plain = _lists(msgspec.to_builtins(record))
    return plain


def from_dict(kind: type[Record], data: object) -> Record:
    """Return the record that :func:`to_dict` made ``data`` of.

    Args:
        kind: the record's class.
        data: plain data.

    Raises:
        GpuMemError: ``data`` is not what a record of this class becomes.
    """
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise GpuMemError(
            f"data of a {kind.__name__}",
            f"cannot be understood: {error}",
            "run the same version of pytest-gpumem in every process of the session",
        ) from error


def _lists(value: object) -> Any:  # noqa: ANN401 - plain data is of any type
    """Return plain data with lists in place of tuples."""
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, (list, tuple)) else value
