"""Forms of records: the same fields, as files have them."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest

from pytest_gpumem.files.json_forms import MAX_INT, Forms
from pytest_gpumem.measurement import Signed  # noqa: TC001 - the form reads annotations


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    pass


@dataclass(frozen=True)
class Row:
    path: str
    nbytes: int
    change: Signed = 0
    kind: str | None = None


@dataclass(frozen=True)
class Table:
    title: str
    rows: tuple[Row, ...] = ()
    by_name: dict[str, int] | None = None


@pytest.fixture
def forms():
    return Forms(Strict)


def read(form, **fields):
    return msgspec.convert(fields, form)


def test_a_form_has_the_records_fields_in_their_order(forms):
    form = forms.of(Row)
    assert form.__struct_fields__ == ("path", "nbytes", "change", "kind")
    assert form.__doc__ == Row.__doc__


def test_bytes_have_their_name_in_files(forms):
    form = forms.of(Row)
    row = read(form, path="a.py", bytes=1, change=2, kind=None)
    assert msgspec.to_builtins(row) == {"path": "a.py", "bytes": 1, "change": 2, "kind": None}
    assert msgspec.convert(row, Row, from_attributes=True) == Row("a.py", 1, 2)


def test_fields_are_required_unless_they_are_optional(forms):
    with pytest.raises(msgspec.ValidationError, match="missing required field `change`"):
        read(forms.of(Row), path="a.py", bytes=1)
    form = forms.of(Row, optional=("change", "kind"))
    assert read(form, path="a.py", bytes=1).change == 0


def test_numbers_are_of_64_bits_and_below_zero_only_where_that_is_said(forms):
    form = forms.of(Row, optional=("kind",))
    assert read(form, path="", bytes=MAX_INT, change=-MAX_INT - 1).change < 0
    for fields in ({"bytes": -1, "change": 0}, {"bytes": MAX_INT + 1, "change": 0}):
        with pytest.raises(msgspec.ValidationError):
            read(form, path="", **fields)


def test_other_fields_are_refused(forms):
    with pytest.raises(msgspec.ValidationError, match="unknown field `more`"):
        read(forms.of(Row), path="a.py", bytes=1, change=0, kind=None, more=1)


def test_records_in_fields_have_their_forms(forms):
    forms.of(Row, optional=("change", "kind"))
    form = forms.of(Table)
    table = read(form, title="a", rows=[{"path": "a.py", "bytes": 1}], by_name={"a": 1})
    assert table.rows[0].nbytes == 1
    with pytest.raises(msgspec.ValidationError, match=r"`\$.rows\[0\].bytes`"):
        read(form, title="a", rows=[{"path": "a.py", "bytes": -1}], by_name=None)
    with pytest.raises(msgspec.ValidationError, match="by_name"):
        read(form, title="a", rows=[], by_name={"a": -1})


def test_a_form_may_lack_fields_have_more_and_have_another_name(forms):
    class Keyed(Strict):
        key: str

    form = forms.of(Row, base=Keyed, without=("kind", "change"), name="Line")
    assert form.__struct_fields__ == ("key", "path", "nbytes")
    assert form.__name__ == "Line"


def test_fields_of_the_base_come_first(forms):
    class OfPath(Strict):
        path: str

        def __post_init__(self):
            self.path = self.path.upper()

    form = forms.of(Row, base=OfPath, optional=("kind", "change"))
    assert form.__struct_fields__ == ("path", "nbytes", "change", "kind")
    assert read(form, path="a.py", bytes=1).path == "A.PY"
