"""Source lines: which one is the user's, and how it is written."""

import sys
import sysconfig
from pathlib import Path

import pytest

from pytest_gpumem.source_lines import (
    Line,
    is_users,
    marker_line,
    qualified,
    shown_path,
    users_line,
)

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


MARKED = """\
import pytest

limits = pytest.mark.gpu_memory(max_gib=8)

@pytest.mark.parametrize("x", [1])
@pytest.mark.gpu_memory(
    max_gib=8)
async def test_own(x): pass

@limits
def test_under_another_name(): pass

def test_none(): pass

@pytest.mark.gpu_memory(batch_size=2)
class TestAll:
    def test_its_class(self): pass

    @pytest.mark.skip
    @pytest.mark.gpu_memory(batch_size=4)
    def test_its_own(self): pass

    class TestInner:
        pytestmark = [pytest.mark.slow, pytest.mark.gpu_memory]
        def test_assigned(self): pass

@pytest.mark.parametrize("x", [
    1,
    pytest.param(2, marks=pytest.mark.gpu_memory),
])
def test_parameter(x): pass
"""


@pytest.mark.parametrize(
    ("first", "line"),
    [(5, 6), (10, 10), (13, 13), (17, 15), (19, 20), (25, 24), (27, 29), (99, 99)],
)
def test_the_line_of_a_marker(tmp_path, first, line):
    path = tmp_path / "test_it.py"
    path.write_text(MARKED)
    assert marker_line(str(path), first, "gpu_memory") == line


def test_the_line_of_a_modules_marker(tmp_path):
    path = tmp_path / "test_it.py"
    path.write_text("import pytest\npytestmark = pytest.mark.gpu_memory\ndef test_it(): pass\n")
    assert marker_line(str(path), 3, "gpu_memory") == 2
    assert marker_line(str(path), 3, "other") == 3


@pytest.mark.parametrize("text", ["def (", "x = " + "(" * 5000 + ")" * 5000, "\0"])
def test_of_what_python_does_not_read_the_first_line_is_taken(tmp_path, text):
    path = tmp_path / "test_it.py"
    path.write_text(text)
    assert marker_line(str(path), 3, "gpu_memory") == 3
