"""All that users import comes from pytest_gpumem, at no cost, and with its types."""

import ast
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest
from helpers.pages import files
from helpers.paths import ROOT

import pytest_gpumem
from pytest_gpumem.spec import MemorySpec
from pytest_gpumem.typed_marker import Declaration

API = "reference/api.md"
PACKAGE = Path(pytest_gpumem.__file__).parent


def test_every_public_name_is_there():
    missing = [name for name in pytest_gpumem.__all__ if getattr(pytest_gpumem, name, None) is None]
    assert missing == []
    assert set(pytest_gpumem.__all__) <= set(dir(pytest_gpumem))


def test_a_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Meter'"):
        pytest_gpumem.Meter  # noqa: B018 - what is tested


def test_type_checkers_see_the_same_names_as_programs():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = {alias.name: line.module for line in block.body for alias in line.names}
    assert {*imported, "__version__"} == set(pytest_gpumem.__all__)
    for name, module in imported.items():
        assert getattr(import_module(module), name) is getattr(pytest_gpumem, name)


def test_public_names_have_docstrings():
    names = set(pytest_gpumem.__all__) - {"__version__"}
    assert [name for name in names if not getattr(pytest_gpumem, name).__doc__] == []


def test_importing_the_package_imports_no_room():
    program = (
        "import sys; before = set(sys.modules); import pytest_gpumem; "
        "print(*sorted(name for name in set(sys.modules) - before if '.' in name or '_' in name))"
    )
    output = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = [{str(ROOT)!r}]; {program}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    ours = {name for name in output.split() if name.startswith("pytest_gpumem")}
    assert ours == {"pytest_gpumem", "pytest_gpumem.version"}
    assert not {"torch", "pytest", "_pytest"} & set(output.split())


def test_importing_all_public_names_imports_neither_torch_nor_pytest():
    program = (
        "import sys; from pytest_gpumem import *; print({'torch', 'pytest'} & sys.modules.keys())"
    )
    command = [sys.executable, "-c", program]
    output = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert output == "set()\n"


def test_mypy_reads_the_programs_of_the_page_without_an_error(tmp_path):
    api = pytest.importorskip("mypy.api")
    programs = files(API)
    assert set(programs) == {"test_typed.py", "conftest.py"}
    for name, text in programs.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    wrong = programs["test_typed.py"].replace("forward.peak_allocated", "forward.peak_alocated")
    wrong = wrong.replace('measured(card="T4")', 'measured(cart="T4")')
    (tmp_path / "test_wrong.py").write_text(wrong, encoding="utf-8")
    config = tmp_path / "mypy.ini"
    config.write_text(
        "[mypy]\nstrict = true\n"
        "[mypy-pytest_gpumem.*]\nfollow_imports = silent\n"
        "[mypy-torch.*]\nfollow_imports = skip\n",  # reading torch takes a minute
        encoding="utf-8",
    )
    options = ["--config-file", str(config), "--cache-dir", str(tmp_path / "cache")]
    output, errors, _ = api.run([*options, *(str(tmp_path / name) for name in programs)])
    assert (errors, output) == ("", f"Success: no issues found in {len(programs)} source files\n")
    output, errors, _ = api.run([*options, str(tmp_path / "test_wrong.py")])
    assert '"PartFigures" has no attribute "peak_alocated"' in output
    assert 'Unexpected keyword argument "cart"' in output


def test_the_typed_marker_has_the_markers_arguments():
    arguments = {each.name for each in fields(MemorySpec)}
    assert set(Declaration.__annotations__) == arguments
    mark = pytest_gpumem.gpu_memory(card="T4", batch_size=32)
    assert mark == pytest.mark.gpu_memory(card="T4", batch_size=32)
    assert pytest_gpumem.gpu_memory(len_of).pytestmark == [pytest.mark.gpu_memory.mark]


def len_of():
    """Stands for a test."""


def test_the_programs_of_the_page_run(virtual_gpu, suite):
    for name, text in files(API).items():
        suite.write(name, text)
    assert suite.run().outcomes == {"passed": 1}
