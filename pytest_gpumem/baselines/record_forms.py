"""The form of a record in a file: the record's own fields, and further ones of the file.

A record is a dataclass, and is written once. Its form is a ``msgspec.Struct`` with fields of the
same names, in the same order. Where a field of the record is a number of bytes or a count, that of
the form is none below zero; ``nbytes`` is called "bytes" in a file.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from pytest_gpumem import measurement

MAX_INT: Final = 2**63 - 1
Bytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]
"""bytes, or a count"""
Signed = Annotated[int, msgspec.Meta(ge=-MAX_INT - 1, le=MAX_INT)]
"""a number that may be below zero"""
FILE_NAMES: Final = {"nbytes": "bytes"}
"""the names of fields in files, where they differ"""


class Forms:
    """The forms that the records of one kind of file have.

    Args:
        base: the class that they are derived from.
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
        """Return the form of a record; records in its fields have their forms already.

        Args:
            record: a dataclass.
            base: has fields of its own, which come first.
            optional: fields that a file may lack: it has the record's default then.
            without: fields that are not in files.
            types_of: the types of fields that differ in files.
            name: the form's, where the record has another one.
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
