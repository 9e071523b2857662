"""What pip installs: the sdist, the wheel with the virtual GPU in it, and the wheel without."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from helpers.paths import ROOT

sys.path.append(str(ROOT / "release"))

from check import LIBRARIES as RELEASED
from check import problems

TEMPLATES = ROOT / "pytest_gpumem/report/page/templates"
NATIVE = "pytest_gpumem/devices/virtual/native"
SHELLS = ("libcuda.so.1", "libnvidia-ml.so.1", "libnvrtc.so.12", "libnvrtc.so.13")
STUB = "libgpumem_stub.so"
LINKED = "libcuda.so"
LIBRARIES = {f"{NATIVE}/{name}" for name in ("libgpumem_cuda.so", LINKED, STUB, *SHELLS)}
STATUS = f"{NATIVE}/build-status.txt"
needs_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="the virtual GPU is built on Linux"
)
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, [os.environ.get("CC") or "cc", "gcc", "clang"])),
    reason="the virtual GPU is built with a C compiler, and there is none on PATH",
)


def copy_tree(target: Path) -> Path:
    """Copy what a build reads, so that nothing is left behind in the project's own tree."""
    skip = shutil.ignore_patterns("*.so", "*.so.1", "build-status.txt", "__pycache__", ".build-*")
    shutil.copytree(ROOT / "pytest_gpumem", target / "pytest_gpumem", ignore=skip)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, target)
    return target


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """Run a command that has to succeed, and return what it said."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, "CFLAGS": "-O0", **env},  # quick to build: nothing here runs for long
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def build(kind: str, tree: Path, **env: str) -> Path:
    """Build an sdist or a wheel as pip does: through the hook of the build backend."""
    hook = f"import setuptools.build_meta as backend; backend.build_{kind}('dist')"
    run(sys.executable, "-c", hook, cwd=tree, **env)
    (archive,) = (tree / "dist").iterdir()
    return archive


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return build("sdist", copy_tree(tmp_path_factory.mktemp("tree")))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """A wheel made from the sdist, as pip does where the index has no wheel for the machine."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, "--wheel-dir", folder, sdist, cwd=folder)
    (archive,) = folder.glob("*.whl")
    return archive


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def text_in(wheel: Path, ending: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(ending))
        return archive.read(name).decode()


def test_sdist_holds_every_c_source_and_header_and_nothing_built(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / NATIVE).glob("*/*.[ch]")}
    assert f"{NATIVE}/base/base.h" in sources
    lists = {f"{NATIVE}/libraries/refused_{name}.txt" for name in ("exports", "functions")}
    sources |= lists
    assert sources <= names
    assert not names & {*LIBRARIES, STATUS}


@needs_linux
@needs_compiler
def test_wheel_with_the_virtual_gpu_is_for_any_python_3_on_this_platform(wheel):
    assert wheel.name.startswith("pytest_gpumem-")
    assert "-py3-none-linux_" in wheel.name
    tag = wheel.stem.split("-", 2)[2]
    assert f"Tag: {tag}\n" in text_in(wheel, "/WHEEL")
    assert "Root-Is-Purelib: false\n" in text_in(wheel, "/WHEEL")
    data = {"pytest_gpumem/py.typed", "pytest_gpumem/devices/cards.csv"}
    assert names_in(wheel) >= {*LIBRARIES, *data}
    assert STATUS not in names_in(wheel)


@needs_linux
def test_wheel_holds_the_package_and_no_sources_of_tests_or_c(wheel):
    outside = {name for name in names_in(wheel) if not name.startswith("pytest_gpumem")}
    assert outside == set()
    assert not [name for name in names_in(wheel) if name.endswith((".c", ".h"))]
    templates = {f"pytest_gpumem/report/page/templates/{it.name}" for it in TEMPLATES.iterdir()}
    assert len(templates) == 4
    assert templates <= names_in(wheel)
    assert "gpumem = pytest_gpumem.plugin" in text_in(wheel, "/entry_points.txt")


@needs_linux
@needs_compiler
@pytest.mark.parametrize("name", SHELLS)
def test_shell_lends_its_name_to_the_library_beside_it(wheel, tmp_path, name):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    load = (
        "import ctypes, sys; ctypes.CDLL(sys.argv[1]); maps = open('/proc/self/maps').read(); "
        "sys.exit(sys.argv[2] not in maps)"
    )
    library = tmp_path / NATIVE / "libgpumem_cuda.so"
    run(sys.executable, "-c", load, tmp_path / NATIVE / name, library, cwd=tmp_path)
    by_name = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); ctypes.CDLL(sys.argv[2])"
    run(sys.executable, "-c", by_name, tmp_path / NATIVE / name, name, cwd=tmp_path)


def failing_compiler(folder: Path) -> dict[str, str]:
    script = folder / "broken-cc"
    script.write_text("#!/bin/sh\necho 'base.h:1: no such luck' >&2\nexit 3\n", encoding="utf-8")
    script.chmod(0o755)
    return {"CC": str(script)}


@needs_linux
@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("cc unknown", "CC is '/nonexistent', which cannot be run"),
        ("no compiler", "no C compiler was found (looked for cc, gcc, clang)"),
        ("cc fails", "broken-cc failed with exit status 3"),
    ],
)
def test_without_a_working_compiler_the_wheel_is_pure_and_says_why(tmp_path, case, reason):
    env = {
        "cc unknown": lambda: {"CC": "/nonexistent"},
        "no compiler": lambda: {"CC": "", "PATH": str(tmp_path)},
        "cc fails": lambda: failing_compiler(tmp_path),
    }[case]()
    tree = tmp_path / "tree"
    tree.mkdir()
    wheel = build("wheel", copy_tree(tree), **env)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not names_in(wheel) & LIBRARIES
    problem, remedy, *details = text_in(wheel, STATUS).splitlines()
    assert problem.endswith(reason)
    assert "install a C compiler" in remedy
    assert ("no such luck" in "\n".join(details)) == (case == "cc fails")


@needs_linux
@needs_compiler
def test_build_in_place_replaces_what_an_earlier_one_left(tmp_path):
    copy_tree(tmp_path)
    ask = (
        "from importlib.util import module_from_spec as make, spec_from_file_location as spec\n"
        f"s = spec('native', '{NATIVE}/__init__.py'); m = make(s); s.loader.exec_module(m)\n"
        "print(m.build_problem())"
    )
    printed = run(sys.executable, "-c", ask, cwd=tmp_path)
    command = re.search("in a source tree: python (.*?); else", printed)[1]
    build = (sys.executable, *shlex.split(command))
    run(*build, cwd=tmp_path, CC="/nonexistent")
    assert "'/nonexistent'" in run(sys.executable, "-c", ask, cwd=tmp_path)
    run(*build, cwd=tmp_path)
    assert all((tmp_path / name).exists() for name in LIBRARIES)
    assert run(sys.executable, "-c", ask, cwd=tmp_path).strip() == "None"
    run(*build, cwd=tmp_path, CC="/nonexistent")
    assert not any((tmp_path / name).exists() for name in LIBRARIES)


def renamed(wheel: Path, folder: Path, tag: str) -> Path:
    """Copy a wheel to the name that it has on another platform."""
    name, version, python, abi, _ = wheel.name.removesuffix(".whl").split("-")
    return Path(shutil.copy(wheel, folder / f"{name}-{version}-{python}-{abi}-{tag}.whl"))


@needs_linux
@needs_compiler
def test_a_released_wheel_is_held_to_what_its_name_says(wheel, tmp_path):
    """By release/check.py, which release/build.sh runs on what zig built."""
    machine = platform.machine()
    other = {"x86_64": "aarch64", "aarch64": "x86_64"}[machine]
    assert {f"{NATIVE}/{name}" for name in RELEASED} == LIBRARIES
    assert problems(wheel) == ["its platform is neither manylinux_X_Y nor any"]
    assert problems(renamed(wheel, tmp_path, f"manylinux_2_99_{machine}")) == []
    told = "; ".join(problems(renamed(wheel, tmp_path, f"manylinux_2_1_{machine}")))
    assert "libgpumem_cuda.so asks for GLIBC_2." in told
    told = problems(renamed(wheel, tmp_path, f"manylinux_2_99_{other}"))
    assert len(told) == len(RELEASED)
    assert f"not of {other}" in told[0]
    told = problems(renamed(wheel, tmp_path, "any"))
    assert len(told) == len(RELEASED) + 1  # each of them, and no word about why there are none


@needs_linux
def test_the_wheel_for_any_system_says_what_it_comes_without(tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    wheel = build("wheel", copy_tree(tree), GPUMEM_PURE="1")
    assert problems(wheel) == []
    problem, remedy = text_in(wheel, STATUS).splitlines()
    assert problem == "this is the wheel for any system, which comes without it"
    assert "--no-binary pytest-gpumem pytest-gpumem" in remedy
    told = problems(renamed(wheel, tmp_path, "manylinux_2_17_x86_64"))
    assert told == [f"{name} is missing" for name in RELEASED]


@needs_linux
def test_metadata_says_what_an_index_shows(sdist):
    with tarfile.open(sdist) as archive:
        (name,) = (it for it in archive.getnames() if it.count("/") == 1 and "PKG-INFO" in it)
        text = archive.extractfile(name).read().decode()
    head, _, readme = text.partition("\n\n")
    assert "Name: pytest-gpumem\n" in head
    assert "Description-Content-Type: text/markdown" in head
    assert "License-Expression: MIT" in head
    assert "License-File: LICENSE" in head
    assert "Framework :: Pytest" in head
    assert "Typing :: Typed" in head
    for name in ("Documentation", "Source", "Changelog", "Issues"):
        assert f"Project-URL: {name}, https://" in head
    assert readme.strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()
