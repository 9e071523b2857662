"""A patch lasts as long as its block, and leaves its owner as it was."""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from helpers.paths import ROOT

from pytest_gpumem.patches import patch, replace

PACKAGE = ROOT / "pytest_gpumem"


class Base:
    def read(self):
        return "base"


class Child(Base):
    pass


def test_a_patch_ends_with_its_block():
    owner = SimpleNamespace(read="old")
    with ExitStack() as stack:
        patch(stack, owner, "read", "new")
        assert owner.read == "new"
    assert owner.read == "old"


def test_a_patch_of_an_inherited_method_leaves_the_class_without_a_method_of_its_own():
    with ExitStack() as stack:
        patch(stack, Child, "read", lambda _: "new")
        assert Child().read() == "new"
        assert Base().read() == "base"
    assert "read" not in vars(Child)
    assert Child().read() == "base"


def test_the_later_of_two_patches_ends_first():
    owner = SimpleNamespace(read="old")
    with ExitStack() as outer:
        patch(outer, owner, "read", "outer")
        with ExitStack() as inner:
            patch(inner, owner, "read", "inner")
            assert owner.read == "inner"
        assert owner.read == "outer"
    assert owner.read == "old"


def test_a_patch_ends_where_its_block_raises():
    owner = SimpleNamespace(read="old")
    with pytest.raises(ZeroDivisionError), ExitStack() as stack:
        patch(stack, owner, "read", "new")
        raise ZeroDivisionError
    assert owner.read == "old"


def test_a_function_that_is_replaced_keeps_its_name():
    owner = SimpleNamespace(read=lambda: "old")
    name = owner.read.__qualname__
    replace(owner, "read", lambda read: lambda: f"around {read()}")
    assert owner.read() == "around old"
    assert owner.read.__qualname__ == name


@pytest.mark.parametrize("owner", [None, SimpleNamespace(), SimpleNamespace(read=3), Child])
def test_what_this_version_of_torch_has_not_is_not_replaced(owner):
    replace(owner, "read", pytest.fail)


def test_no_other_module_takes_a_patch_back_by_hand():
    by_hand = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if "callback(setattr" in path.read_text("utf-8") and path.stem != "patches"
    ]
    assert by_hand == []
