"""Builds the virtual GPU's shared libraries; all that can be said as data is in pyproject.toml.

The libraries use no Python ABI, so a wheel that holds them is tagged py3-none-<platform>. They are
optional: where they cannot be built, or GPUMEM_PURE is set, the package installs without them and
build-status.txt, which pytest_gpumem.devices.virtual.native reads, says why.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

PACKAGE = Path("pytest_gpumem", "devices", "virtual", "native")
MAIN = "libgpumem_cuda.so"
SHELLS = {
    "libcuda.so.1": "libcuda.so.1",
    "libcuda.so": "libcuda.so.1",  # for compilers: -lcuda finds no other name, and wheels no links
    "libnvidia-ml.so.1": "libnvidia-ml.so.1",
    "libnvrtc.so.12": "libnvrtc.so.12",
    "libnvrtc.so.13": "libnvrtc.so.13",
    # Its copies bear the names of libraries that are not installed (virtual/missing_libraries.py).
    "libgpumem_stub.so": "libgpumem-stub-" + "x" * 48,
}
"""file: the SONAME that it lends to the main library"""
STATUS = "build-status.txt"
SOURCES = sorted(path.as_posix() for path in PACKAGE.glob("[!.]*/*.c"))
HEADERS = sorted(path.as_posix() for path in PACKAGE.glob("*/*.h"))
LISTS = sorted(PACKAGE.glob("libraries/*.txt"))
"""lists of functions of which C is made: each line has an action or a status, then names"""
ACTIONS = {
    "opened": ("void **out", "return gm_visible() ? gm_new_descriptor(out, {0}) : {0};"),
    "made": ("void **out", "return gm_new_descriptor(out, {0});"),
    "deleted": ("void *descriptor", "return gm_delete_descriptor(descriptor);"),
    "ended": ("void *descriptor", "gm_workspaces_end(); return gm_delete_descriptor(descriptor);"),
    "computed": ("void", "return gm_computed({0});"),
    "done": ("void", "return GM_SUCCESS;"),
    "refused": ("void", 'return gm_unsupported("{1}", {0});'),
}
"""the parameters that are read, and the body, of functions by what they do"""

COMPILE = (
    *("-std=c11", "-O2", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"),
    "-Wno-unused-parameter",  # functions have NVIDIA's parameters, of which they read few
)
COMPILER_REMEDY = (
    "install a C compiler (Debian, Ubuntu: apt install gcc libc6-dev; Fedora: dnf install gcc) or "
    "set CC to one, then: pip install --force-reinstall --no-deps --no-cache-dir pytest-gpumem, "
    "or, in a source tree: python setup.py build_ext --inplace"
)


class CannotBuildError(Exception):
    """Why there will be no virtual GPU, what to do about it, and what the compiler said."""

    def __init__(self, problem: str, remedy: str, details: str = "") -> None:
        super().__init__(problem)
        self.text = "\n".join([problem, remedy, *details.splitlines()]) + "\n"


def find_compiler() -> list[str]:
    """Return $CC, or the first of cc, gcc and clang that is on PATH, as a command."""
    wanted = os.environ.get("CC", "").strip()
    if wanted:
        command = shlex.split(wanted)
        if shutil.which(command[0]) is None:
            raise CannotBuildError(f"CC is {wanted!r}, which cannot be run", COMPILER_REMEDY)
        return command
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise CannotBuildError("no C compiler was found (looked for cc, gcc, clang)", COMPILER_REMEDY)


def compile_libraries(folder: Path) -> None:
    """Compile the main library and its shells into folder, or raise CannotBuildError."""
    if os.environ.get("GPUMEM_PURE"):
        raise CannotBuildError(
            "this is the wheel for any system, which comes without it",
            "on Linux, with a C compiler: pip install --force-reinstall --no-deps --no-binary "
            "pytest-gpumem pytest-gpumem",
        )
    if not sys.platform.startswith("linux"):
        raise CannotBuildError(
            f"the virtual GPU runs on Linux only, and this is {sys.platform}",
            "use Linux, a container or WSL for it",
        )
    if not SOURCES or not LISTS:
        raise CannotBuildError(f"there are no C sources in {PACKAGE}", "use a complete source tree")
    compiler = find_compiler()
    flags = shlex.split(os.environ.get("CFLAGS", ""))
    link_flags = shlex.split(os.environ.get("LDFLAGS", ""))
    base = [*compiler, *COMPILE, f"-I{PACKAGE}", *flags, "-shared"]
    main = folder / MAIN
    soname = f"-Wl,-soname,{MAIN}"
    listed = folder / "listed.c"
    listed.write_text(listed_source(), encoding="utf-8")
    sources = [*SOURCES, str(listed)]
    _run([*base, *sources, "-o", str(main), soname, "-Wl,-z,defs", *link_flags, "-ldl"])
    listed.unlink()
    # A shell is empty: it lends its SONAME, under which others ask for it, to the main library.
    empty = folder / "empty.c"
    empty.write_text("typedef int gpumem_empty;\n", encoding="utf-8")
    for name, lent in SHELLS.items():
        names = [f"-Wl,-soname,{lent}", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN"]
        _run([*base, str(empty), "-o", str(folder / name), *names, str(main), *link_flags])
    empty.unlink()


def listed_source() -> str:
    """Return the C source of the functions of LISTS."""
    lines = ['#include "base/base.h"']
    for line in "".join(path.read_text(encoding="utf-8") for path in LISTS).splitlines():
        if line.startswith("#"):
            continue
        action, *words = line.split()
        if action not in ACTIONS:  # a status
            action, words = "refused", [action, *words]
        status = words.pop(0) if "{0}" in ACTIONS[action][1] else ""
        parameters, body = ACTIONS[action]
        for word in words:
            before, _, rest = word.partition("{")
            letters, _, after = rest.partition("}")
            # Another definition, in C or in a list, takes the place of a refusal.
            kind = "GM_API __attribute__((weak)) int" if action == "refused" else "GM_API int"
            for name in (f"{before}{letter}{after}" for letter in letters.split(",")):
                code = body.replace("{0}", status).replace("{1}", name)
                lines.append(f"{kind} {name}({parameters}) {{ {code} }}")
    return "\n".join(lines) + "\n"


def _run(command: list[str]) -> None:
    print(shlex.join(command))  # noqa: T201 - as any build does
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CannotBuildError(f"{command[0]} cannot be run", COMPILER_REMEDY, str(error)) from None
    sys.stderr.write(done.stderr)
    if done.returncode != 0:
        raise CannotBuildError(
            f"{command[0]} failed with exit status {done.returncode}",
            COMPILER_REMEDY,
            f"{shlex.join(command)}\n{done.stderr.strip()}",
        )


class BuildNative(build_ext):
    """Builds the libraries with a plain C compiler: they are no Python modules."""

    def run(self) -> None:
        """Put the libraries, or build-status.txt with the reason why not, in place."""
        folder = self._folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as name:
            scratch = Path(name)
            try:
                compile_libraries(scratch)
            except CannotBuildError as error:
                for path in scratch.iterdir():
                    path.unlink()
                (scratch / STATUS).write_text(error.text, encoding="utf-8")
                sys.stderr.write(f"warning: pytest-gpumem: no virtual GPU: {error.text}")
            built = {path.name for path in scratch.iterdir()}
            for path in scratch.iterdir():
                path.replace(folder / path.name)  # never half a library under a running test
        for stale in {MAIN, *SHELLS, STATUS} - built:
            (folder / stale).unlink(missing_ok=True)

    def _folder(self) -> Path:
        """Return where the libraries go: beside their sources when in place, else in build_lib."""
        return PACKAGE if self.inplace else Path(self.build_lib, PACKAGE)

    def get_outputs(self) -> list[str]:
        """List what the last run made, by its path in build_lib."""
        folder = self._folder()
        names = [name for name in (MAIN, *SHELLS, STATUS) if (folder / name).exists()]
        return [str(Path(self.build_lib, PACKAGE, name)) for name in names]

    def get_output_mapping(self) -> dict[str, str]:
        """Map each output to its place beside the sources, for an editable installation."""
        if not self.inplace:
            return {}
        return {path: str(PACKAGE / Path(path).name) for path in self.get_outputs()}


class Wheel(bdist_wheel):
    """A wheel for any Python 3: of this platform with the libraries, of any without."""

    def run(self) -> None:
        """Build first: what came of it decides the tag."""
        if not self.skip_build:
            self.run_command("build")
        library = Path(self.get_finalized_command("build").build_lib, PACKAGE, MAIN)
        if not library.exists():
            self.distribution.ext_modules = []
            self.root_is_pure = True
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """Return setuptools' tag with the part on Python's version and ABI left open."""
        return ("py3", "none", super().get_tag()[2])


setup(
    ext_modules=[
        Extension(
            ".".join((*PACKAGE.parts, "libgpumem_cuda")),
            SOURCES,
            depends=[*HEADERS, *map(str, LISTS)],
        )
    ],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": Wheel},
)
