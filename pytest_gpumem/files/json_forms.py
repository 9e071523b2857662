"""JSON of baselines and reports: strict parsing with clear errors, and the forms of records.

A record is a dataclass. Its form in a file is a ``msgspec.Struct`` derived from it, with fields of
the same names in the same order, and fields that only the file has. Where a record's field is a
number of bytes or a count, the form's field must not be negative; ``nbytes`` is called "bytes"
there. msgspec can read dataclasses themselves, but ignores unknown fields: a misspelled one in a
baseline would be dropped.
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
from collections import Counter
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NoReturn,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from pytest_gpumem import measurement

CONFLICT: Final = re.compile(r"^([<=>|])\1{6}(?=\s|$)", re.MULTILINE)
"""a merge-conflict marker of git"""
MAX_INT: Final = 2**63 - 1
Bytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]
"""a number of bytes or a count, 0 or more"""
Signed = Annotated[int, msgspec.Meta(ge=-MAX_INT - 1, le=MAX_INT)]
FILE_NAMES: Final = {"nbytes": "bytes"}
"""names of fields in files, where they differ from the record's"""


class JsonProblem(ValueError):  # noqa: N818 - each reader turns it into an error of its own
    """A problem of a file's content, worded to follow the file's name: "is empty"."""

    def __init__(self, problem: str, *, encoding: bool = False, conflict: bool = False) -> None:
        super().__init__(problem)
        self.encoding = encoding
        """whether the encoding is wrong"""
        self.conflict = conflict
        """whether there is a merge-conflict marker"""


def parse_json(content: str | bytes, kind: str) -> Any:  # noqa: ANN401 - JSON
    """Parse a JSON text.

    Bytes are UTF-8, with or without a byte order mark; ``kind`` names the file in messages.

    Raises:
        JsonProblem: the text is not JSON, repeats a name in an object, or has NaN or infinity.
    """
    texts: dict[str, str] = {}

    def fields_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # Share equal strings: a suite's results have many in common.
        fields = {
            name: texts.setdefault(value, value) if type(value) is str else value
            for name, value in pairs
        }
        if len(fields) < len(pairs):
            (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
            raise ValueError(f"{json.dumps(name)} occurs twice in one object")
        return fields

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a number of bytes")

    decoded = ""
    try:
        decoded = content.decode("utf-8-sig") if isinstance(content, bytes) else content
        return json.loads(decoded, object_pairs_hook=fields_of, parse_constant=refuse)
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


class Forms:
    """Creates the forms of records for one kind of file.

    Args:
        base: the base class of the forms.
    """

    def __init__(self, base: type[msgspec.Struct]) -> None:
        self._base = base
        self._forms: dict[type, type] = {}

    def of(  # noqa: PLR0913 - each is a difference between a record and its form
        self,
        record: type,
        *,
        base: type[msgspec.Struct] | None = None,
        optional: tuple[str, ...] = (),
        without: tuple[str, ...] = (),
        types_of: dict[str, Any] | None = None,
        name: str = "",
    ) -> type:
        """Create the form of a record; the forms of records in its fields must exist already.

        Args:
            record: a dataclass.
            base: base class, whose own fields come first.
            optional: fields that may be missing in a file; they get the record's default.
            without: fields that are not in files.
            types_of: types of fields whose type differs in files.
            name: the form's name, if it differs from the record's.
        """
        base = base or self._base
        hints = get_type_hints(record, include_extras=True)
        fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
        for field in dataclasses.fields(record):
            if field.name in without or field.name in base.__struct_fields__:
                continue
            kind = (types_of or {}).get(field.name) or self._in_file(hints[field.name])
            default = (field.default,) if field.name in optional else ()
            fields.append((field.name, kind, *default))
        form = msgspec.defstruct(
            name or record.__name__,
            fields,
            bases=(base,),
            module=__name__,
            namespace={"__doc__": record.__doc__},
            rename=FILE_NAMES,
            frozen=base.__struct_config__.frozen,
        )
        self._forms[record] = form
        return form

    def _in_file(self, kind: Any) -> Any:  # noqa: ANN401 - types
        if kind in {int, measurement.Signed}:
            return Bytes if kind is int else Signed
        if kind in self._forms:
            return self._forms[kind]
        origin, parts = get_origin(kind), get_args(kind)
        if origin is None or origin is Literal:
            return kind
        parts = tuple(part if part is ... else self._in_file(part) for part in parts)
        if origin in {Union, types.UnionType}:
            return Union[parts]  # noqa: UP007 - of a list
        return origin[parts]
