"""Source lines: which one is the user's, and how it is written."""

import sys
import sysconfig
from pathlib import Path

import pytest

from pytest_gpumem.source_lines import (
    Line,
    forget_changed_files,
    import_folders,
    is_users,
    marker_line,
    only_forwards_call,
    package_path,
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
    assert not is_users(f"/any/folder/ab/cab{'x7' * 24}q.py")  # torch.compile's
    assert is_users("/any/folder/ab/cab.py")


def test_the_line_that_runs_is_the_users():
    here = sys._getframe()
    assert users_line(here) == Line(__file__, here.f_lineno, here.f_code.co_name)
    assert users_line(None) is None


DECORATORS = """
def decorate(function, other=None):
    def plain(*args, **kwargs):
        start(function)
        value = function(*args, **kwargs)
        return value

    async def with_more(self, number, *args, name, **kwargs):
        return await function(
            self, number, *args, name=name, **kwargs
        )

    def changes(*args, **kwargs):
        function(*args[1:], **kwargs)
        function(args[0], *args, **kwargs)
        function(*args, **kwargs).float()
        function(*args)
        return other(function(*args, **kwargs))

    def of_one_s_own(function, *args):
        return function(*args)

    def knows_what_it_calls(rows, columns):
        return function(rows, columns)

def model(*args, **kwargs):
    return function(*args, **kwargs)
"""
FORWARDING_LINES = (5, 9, 10, 11)


def test_a_decorator_s_line_that_only_calls_what_it_decorates_hands_on(tmp_path):
    path = tmp_path / "decorators.py"
    path.write_text(DECORATORS)
    # A frame is at the first line of a call, or at that of an argument.
    lines = DECORATORS.splitlines()
    assert (
        tuple(it for it in range(1, len(lines) + 1) if only_forwards_call(str(path), it))
        == FORWARDING_LINES
    )
    assert not only_forwards_call(str(tmp_path / "gone.py"), 5)
    path.write_text("\n" * 4 + "        return function(*args)\n")
    forget_changed_files()
    assert not only_forwards_call(str(path), 5)


def test_a_line_that_hands_on_is_looked_past_where_the_user_has_another(tmp_path):
    path = tmp_path / "decorators.py"
    path.write_text(
        "def decorate(function):\n    def f(*a):\n        return function(*a)\n    return f\n"
    )
    names = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    decorated = names["decorate"](lambda: users_line(sys._getframe(1)))
    here = sys._getframe()
    line = decorated()
    assert line == Line(__file__, here.f_lineno - 1, here.f_code.co_name)


def test_files_have_the_same_name_on_every_machine(tmp_path):
    import torch

    assert shown_path(str(tmp_path / "examples/a.py"), tmp_path) == "examples/a.py"
    assert shown_path(str(Path(torch.__file__).parent / "x.py"), tmp_path) == "torch/x.py"
    assert shown_path("/nowhere/at/all.py", tmp_path) == "all.py"


RESNET = "torchvision/models/resnet.py"


@pytest.mark.parametrize(
    "filename",
    [
        f".venv/lib/python3.11/site-packages/{RESNET}",
        f"env of ours/lib64/python3.14/site-packages/{RESNET}",
        f"conda/envs/gpu/lib/python3.12/site-packages/{RESNET}",
        f"/usr/lib/python3/dist-packages/{RESNET}",
        f"/home/me/.local/lib/python3.10/site-packages/{RESNET}",
        f"/elsewhere/site-packages/torchvision-0.20.0-py3.11.egg/{RESNET}",
    ],
)
def test_a_file_of_a_package_has_one_name_wherever_the_environment_lies(filename, tmp_path):
    # An absolute path stays what it is.
    assert shown_path(str(tmp_path / filename), tmp_path) == RESNET
    assert shown_path(str(tmp_path / filename), Path("/")) == RESNET
    assert package_path(filename) == RESNET


def test_a_name_with_the_separators_of_windows_is_read_as_well():
    assert package_path(".venv\\Lib\\site-packages\\torchvision\\ops\\misc.py") == (
        "torchvision/ops/misc.py"
    )
    assert package_path("src/my-packages/model.py") == "src/my-packages/model.py"


def test_a_module_that_is_installed_as_one_file_is_named_by_that(tmp_path):
    assert shown_path(str(tmp_path / ".venv/lib/site-packages/six.py"), tmp_path) == "six.py"


def test_a_project_inside_of_site_packages_names_its_own_files_from_its_root(tmp_path):
    root = tmp_path / "lib/python3.11/site-packages/mine"
    assert shown_path(str(root / "tests/test_a.py"), root) == "tests/test_a.py"
    assert shown_path(str(root.parent / RESNET), root) == RESNET
    assert shown_path(str(root / f".venv/lib/site-packages/{RESNET}"), root) == RESNET


def test_a_src_layout_is_named_from_the_root_though_python_imports_from_src(tmp_path, monkeypatch):
    (tmp_path / "src").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "src")
    import_folders.cache_clear()
    assert shown_path(str(tmp_path / "src/mine/model.py"), tmp_path) == "src/mine/model.py"
    # With the root of all files as pytest's root, the names would have the machine's folders.
    assert shown_path(str(tmp_path / "src/mine/model.py"), Path("/")) == "mine/model.py"


def test_a_link_in_site_packages_to_the_project_is_the_projects_file(tmp_path):
    root, packages = tmp_path / "project", tmp_path / "env/lib/python3.11/site-packages"
    (root / "src/mine").mkdir(parents=True)
    packages.mkdir(parents=True)
    (packages / "mine").symlink_to(root / "src/mine")
    (root / "src/mine/model.py").touch()
    assert shown_path(str(packages / "mine/model.py"), root) == "src/mine/model.py"


def test_setuptools_folder_of_links_names_the_sources(tmp_path):
    links = tmp_path / "build/__editable__.mine-0.1-cp311/mine"
    links.mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/model.py").touch()
    (links / "model.py").symlink_to(tmp_path / "mine/model.py")
    assert shown_path(str(links / "model.py"), tmp_path) == "mine/model.py"


def test_a_link_into_a_cache_inside_of_the_project_is_a_packages_file(tmp_path):
    cached = tmp_path / ".uv-cache/archive-v0/x3J/torchvision/models"
    cached.mkdir(parents=True)
    (tmp_path / ".uv-cache/CACHEDIR.TAG").touch()
    (cached / "resnet.py").touch()
    installed = tmp_path / f".venv/lib/python3.11/site-packages/{RESNET}"
    installed.parent.mkdir(parents=True)
    installed.symlink_to(cached / "resnet.py")
    assert shown_path(str(installed), tmp_path) == RESNET


def test_a_project_that_is_reached_by_a_link_has_one_name(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real/model.py").touch()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert shown_path(str(tmp_path / "real/model.py"), tmp_path / "link") == "model.py"
    assert shown_path(str(tmp_path / "link/model.py"), tmp_path / "real") == "model.py"


def test_sources_in_an_environment_inside_of_the_project_are_named_as_python_imports_them(
    tmp_path, monkeypatch
):
    sources = tmp_path / "env/src/detectron"  # as "pip install -e git+https://..." has them
    sources.mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    monkeypatch.syspath_prepend(sources)
    import_folders.cache_clear()
    assert shown_path(str(sources / "modeling/roi.py"), tmp_path) == "modeling/roi.py"
    # The project's own folder as the environment leaves its files the project's.
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert shown_path(str(tmp_path / "train.py"), tmp_path) == "train.py"


def test_a_file_in_an_archive_is_named_from_the_archive_on(tmp_path, monkeypatch):
    (tmp_path / "app.zip").touch()
    monkeypatch.syspath_prepend(tmp_path / "app.zip")
    import_folders.cache_clear()
    assert shown_path(str(tmp_path / "app.zip/mine/model.py"), Path("/srv")) == "mine/model.py"


@pytest.fixture(autouse=True)
def _fresh_folders():
    """Forget the folders of other tests, before and after."""
    yield
    import_folders.cache_clear()


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
