"""Source lines: which one is the user's, and how it is written."""

import sys
import sysconfig
from pathlib import Path

import pytest

from pytest_gpumem.lines import Line, is_users, qualified, shown_path, users_line

LIBRARY = sysconfig.get_path("stdlib")


def of(module, name):
    """A file in a package's folder."""
    return str(Path(module.__file__).parent / name)


@pytest.mark.parametrize(
    "filename",
    [
        "/home/me/train.py",
        "/home/me/torch/train.py",
        f"{LIBRARY}/site-packages/torchvision/models/resnet.py",
        f"{LIBRARY}/dist-packages/timm/layers.py",
    ],
)
def test_lines_of_programs_and_of_libraries_are_the_users(filename):
    assert is_users(filename)


def test_lines_of_torch_pytest_and_python_are_not():
    import torch

    import pytest_gpumem

    assert not is_users(of(torch, "nn/functional.py"))
    assert not is_users(of(pytest, "__init__.py"))
    assert not is_users(of(pytest_gpumem, "meter.py"))
    assert not is_users(f"{LIBRARY}/contextlib.py")
    assert not is_users("<string>")
    assert not is_users("/tmp/torchinductor_me/ab/cab.py")


def test_the_line_that_runs_is_the_users():
    here = sys._getframe()
    assert users_line(here) == Line(__file__, here.f_lineno, here.f_code.co_name)
    assert users_line(None) is None


def test_files_have_the_same_name_on_every_machine(tmp_path):
    import torch

    assert shown_path(str(tmp_path / "examples/a.py"), tmp_path) == "examples/a.py"
    assert shown_path(str(Path(torch.__file__).parent / "x.py"), tmp_path) == "torch/x.py"
    assert shown_path("/nowhere/at/all.py", tmp_path) == "all.py"


def test_nested_functions_and_files_that_are_no_python(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("def outer():\n    def inner():\n        pass\n    return inner\nx = 1\n")
    assert qualified(str(path), 3) == "outer.inner"
    assert qualified(str(path), 4) == "outer"
    assert qualified(str(path), 5) == ""
    broken = tmp_path / "b.py"
    broken.write_text("def (")
    assert qualified(str(broken), 1) == ""
    assert qualified("/nowhere.py", 1) == ""
