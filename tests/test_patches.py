"""Patches of other packages: how long one lasts, that all are declared, and their page."""

import ast
import functools
import importlib
import os
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from helpers.paths import ROOT

from pytest_gpumem.patches import PATCHES, Patch

PACKAGE = ROOT / "pytest_gpumem"
PAGE = ROOT / "tests" / "tables" / "patches.md"


class Base:
    def read(self):
        return "base"


class Child(Base):
    pass


def declared(*names):
    """A patch of this test, which is none of the package's."""
    patch = Patch("their.module", *names, reason="a test")
    PATCHES.remove(patch)
    return patch


def new(_old):
    return "new"


def test_a_patch_ends_with_its_block():
    module = SimpleNamespace(read="old")
    with ExitStack() as stack:
        assert declared("read").wrap(module, new, stack)
        assert module.read == "new"
    assert module.read == "old"


def test_a_patch_of_an_inherited_method_leaves_the_class_without_a_method_of_its_own():
    with ExitStack() as stack:
        declared("Child.read").wrap(SimpleNamespace(Child=Child), lambda _: lambda _: "new", stack)
        assert Child().read() == "new"
        assert Base().read() == "base"
    assert "read" not in vars(Child)
    assert Child().read() == "base"


def test_the_later_of_two_patches_ends_first():
    module, patch = SimpleNamespace(read="old"), declared("read")
    with ExitStack() as outer:
        patch.put(module, {"read": "outer"}, outer)
        with ExitStack() as inner:
            patch.put(module, {"read": "inner"}, inner)
            assert module.read == "inner"
        assert module.read == "outer"
    assert module.read == "old"


def test_a_patch_ends_where_its_block_raises():
    module = SimpleNamespace(read="old")
    with pytest.raises(ZeroDivisionError), ExitStack() as stack:
        declared("read").wrap(module, new, stack)
        raise ZeroDivisionError
    assert module.read == "old"


def test_without_a_stack_a_patch_stays_and_a_function_keeps_its_name():
    module = SimpleNamespace(read=lambda: "old")
    name = module.read.__qualname__
    declared("read").wrap(module, lambda read: lambda: f"around {read()}")
    assert module.read() == "around old"
    assert module.read.__qualname__ == name


def test_a_function_under_two_names_stays_one():
    read = SimpleNamespace()
    module = SimpleNamespace(read=read, part=SimpleNamespace(read=read))
    declared("read", "part.read").wrap(module, lambda _: object())
    assert module.read is module.part.read is not read


def test_a_star_stands_for_each_class_with_a_method_of_its_own():
    def reading(_read):
        return lambda _: "new"

    class Other:
        read = Base.read

    with ExitStack() as stack:
        module = SimpleNamespace(Other=Other, Child=Child, number=3)
        assert declared("*.read").wrap(module, reading, stack)
        assert (Other().read(), Child().read()) == ("new", "base")


@pytest.mark.parametrize("module", [SimpleNamespace(), SimpleNamespace(Reader=Base)])
def test_what_this_version_of_torch_has_not_is_not_replaced(module):
    patch = declared("Reader.write", "*.write")
    assert not patch.wrap(module, pytest.fail)
    assert patch.values(module) == {}
    patch.put(module, dict.fromkeys(patch.names, pytest.fail))


# -- the package's own --


@functools.cache
def trees():
    return {
        path.relative_to(PACKAGE): ast.parse(path.read_text("utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "patches.py"
    }


def chain(node):
    """The names of an attribute of an attribute of ... a name: ["torch", "cuda", "_lazy_init"]."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


OF_MODULES = {"sys.modules", "sys.modules.get", "importlib.import_module"}
"""what returns a module that may be another package's"""


def is_foreign(value, foreign):
    """Whether an expression is another package's module, or an attribute of one."""
    if isinstance(value, (ast.Call, ast.Subscript)):
        source = value.func if isinstance(value, ast.Call) else value.value
        return ".".join(chain(source)) in OF_MODULES
    return chain(value) != [] and chain(value)[0] in foreign


def foreign_names(tree):
    """The names in a module that are other packages' modules, or attributes of those."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            source = [getattr(node, "module", None)] * isinstance(node, ast.ImportFrom)
            for alias in node.names:
                package = (source or [alias.name])[0].split(".")[0]
                if package not in sys.stdlib_module_names and package != "pytest_gpumem":
                    names.add((alias.asname or alias.name).split(".")[0])
        elif isinstance(node, ast.arg) and "ModuleType" in ast.unparse(node.annotation or node):
            names.add(node.arg)
    for node in ast.walk(tree):
        value = getattr(node, "value", None)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and value and is_foreign(value, names):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {chain(target)[-1] for target in targets if chain(target)}
    return names


def by_hand(tree):
    """The lines of a module that set, or delete, an attribute of another package's modules."""
    foreign = foreign_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and chain(node.func) in (["setattr"], ["delattr"]):
            yield ast.unparse(node)
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Delete)):
            for target in targets:
                for part in getattr(target, "elts", [target]):
                    if ast.unparse(part).startswith("vars("):
                        yield ast.unparse(node)
                    if any(name in foreign for name in chain(part)[:-1]):
                        yield ast.unparse(node)


@pytest.mark.parametrize(
    ("source", "patches_by_hand"),
    [
        ("import torch\ntorch.cuda.is_available = answer", True),
        ("import torch\ndel torch.cuda.is_available", True),
        ("def hook(module: ModuleType):\n    module.compile_fx = own", True),
        ("import torch\ndistributed = torch.distributed\ndistributed.send, b = own", True),
        ("config = sys.modules.get(NAME)\nconfig.limit = 3", True),
        ("import torch\nself._torch = torch\nself._torch.cuda.count = None", True),
        ("setattr(owner, name, value)", True),
        ('vars(owner)["name"] = value', True),
        ("from torch import nn\nself.torch = nn.Linear(3, 3)", False),
        ("from pytest_gpumem import sizes\nsizes.value = 3", False),
    ],
)
def test_the_scan_knows_a_patch_by_hand(source, patches_by_hand):
    assert bool(list(by_hand(ast.parse(source)))) is patches_by_hand


NO_PATCHES = {
    "setattr(compiled, attribute, graph)": "compiled code gets an attribute of ours",
    "setattr(compiled, PROGRAM, program)": "likewise",
    "setattr(compiled, PRODUCTS, tuple(map(tuple, self._requested)))": "likewise",
    "setattr(_kind, f'__{_name}__', _wrapped(getattr(_plain, f'__{_name}__')))": "our own class",
    "module.__loader__ = self._loader": "a loader's own duty",
    "module.__spec__.loader = self._loader": "likewise",
}


def test_every_patch_of_another_package_is_declared():
    found = {(str(path), line) for path, tree in trees().items() for line in by_hand(tree)}
    assert {(path, line) for path, line in found if line not in NO_PATCHES} == set()
    assert {line for _, line in found} == set(NO_PATCHES), "an exception is not needed any more"


def table():
    """The rows of the page, of all declared patches by their first name."""
    for path, tree in trees().items():
        if "Patch" in {
            alias.name
            for node in ast.walk(tree)
            for alias in getattr(node, "names", ())
            if isinstance(node, ast.ImportFrom)
        }:
            importlib.import_module(".".join(("pytest_gpumem", *path.with_suffix("").parts)))
    for patch in sorted(PATCHES, key=lambda patch: (patch.module, patch.names, patch.reason)):
        names = " ".join(f"`{name}`" for name in patch.names)
        yield f"| `{patch.module}` | {names} | {patch.reason} | {patch.versions} |"


def test_the_page_lists_every_patch():
    """GPUMEM_REWRITE_GOLD=1 writes the table anew."""
    page = PAGE.read_text("utf-8")
    old = "".join(line for line in page.splitlines(keepends=True) if line.startswith("| `"))
    made = page.replace(old, "".join(f"{row}\n" for row in table()))
    if os.environ.get("GPUMEM_REWRITE_GOLD") == "1":
        PAGE.write_text(made, encoding="utf-8")
        return
    assert page == made


def test_every_reason_is_a_clause_of_its_own():
    list(table())
    for patch in PATCHES:
        assert not patch.reason.endswith("."), patch.names
        assert len(patch.reason.split()) <= 25, patch.names
