"""The C sources of the virtual GPU: folders need folders below them, no two files each other."""

import re
import subprocess
from graphlib import CycleError, TopologicalSorter

import pytest
from helpers.elf import symbols
from helpers.native_sources import NATIVE, SOURCES, compiler

BELOW = {
    "base": set(),
    "runtime": {"base"},
    "driver": {"base", "runtime"},
    "cudnn": {"base", "runtime", "libraries"},
    "libraries": {"base", "runtime"},
}
"""folder: the folders that it may use; cuDNN's engines plan with cuBLASLt, of the libraries"""


def test_every_folder_has_its_place():
    assert {path.parent.name for path in SOURCES} == set(BELOW)


def test_sources_include_headers_of_folders_below_only():
    for path in sorted(NATIVE.glob("*/*.[ch]")):
        folder = path.parent.name
        included = re.findall(r'^#include "(.*)"', path.read_text(), flags=re.MULTILINE)
        assert {name.split("/")[0] for name in included} <= BELOW[folder] | {folder}, path
        assert all((NATIVE / name).exists() for name in included), path


@pytest.fixture(scope="module")
def needed_files(tmp_path_factory):
    """For each source file, those whose functions it calls."""
    target = tmp_path_factory.mktemp("objects")
    tables = {}
    for path in SOURCES:
        name = f"{path.parent.name}/{path.name}"
        library = target / name.replace("/", "-")
        command = [*compiler(), "-std=c11", "-shared", "-fPIC", "-pthread", f"-I{NATIVE}"]
        subprocess.run([*command, path, "-o", library], check=True)
        tables[name] = symbols(library)
    definer = {function: name for name, table in tables.items() for function in table.given}
    # the linker's own (_init, _fini) are in every library
    shared = frozenset.intersection(*(table.given for table in tables.values()))
    return {
        name: {definer[function] for function in table.wanted - shared if function in definer}
        for name, table in tables.items()
    }


def test_files_call_functions_of_folders_below_only(needed_files):
    assert "base/state.c" in needed_files["runtime/memory.c"]
    for name, needed in needed_files.items():
        folder = name.split("/")[0]
        assert {file.split("/")[0] for file in needed} <= BELOW[folder] | {folder}, name


def test_no_circle_of_files_call_each_other(needed_files):
    try:
        TopologicalSorter(needed_files).prepare()
    except CycleError as error:
        pytest.fail(f"these call each other in a circle: {' -> '.join(error.args[1])}")
