"""macOS and Windows, as far as Linux can show: what the package imports, and what it says there."""

import pytest
from helpers.paths import ROOT
from helpers.virtual_gpu import run_python

LINUX_ALONE = """
import ctypes, importlib, io, os, pkgutil, sys

import pytest

import pytest_gpumem

names = [
    module.name
    for module in pkgutil.walk_packages(pytest_gpumem.__path__, "pytest_gpumem.")
    # Of the virtual GPU only the facade is imported elsewhere; __main__ is a program.
    if not module.name.startswith("pytest_gpumem.devices.virtual.")
    and not module.name.endswith("__main__")
]
for name in names:  # so that all other modules are imported as Linux has them
    importlib.import_module(name)
for name in [name for name in sys.modules if name.partition(".")[0] == "pytest_gpumem"]:
    del sys.modules[name]

system = sys.argv[1]
UNIX = {"fcntl", "grp", "pwd", "resource", "termios"} if system == "win32" else set()


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in UNIX:
            raise ImportError(f"{name} is not on {system}")


for name in UNIX:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Missing())
sys.platform = system
absent = ["sched_getaffinity"]
absent += ["getuid"] if system == "win32" else []
for module in (os, ctypes):
    for name in [*absent, *(name for name in dir(module) if name.startswith("RTLD_"))]:
        if module is os or name != "RTLD_GLOBAL":  # ctypes has that on each system
            vars(module).pop(name, None)


def refuse(event, arguments):
    if event in {"open", "os.listdir", "os.scandir"} and str(arguments[0]).startswith("/proc"):
        raise FileNotFoundError(arguments[0])


sys.addaudithook(refuse)
for name in names:
    importlib.import_module(name)
assert "torch" not in sys.modules
"""


HELP = """
from pytest_gpumem.cli import main
print(main.main(["--help"]))
"""
SESSION = """
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # others import what Linux has
io._WindowsConsoleIO = type(None)  # pytest's capture asks for it on Windows
sys.exit(pytest.main(["-rs", "-p", "pytest_gpumem.plugin", *sys.argv[2:]]))
"""
SUITE = """
import pytest

def test_plain():
    pass

@pytest.mark.gpu_memory
def test_marked():
    pass
"""


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_every_module_is_imported_without_what_linux_alone_has(system):
    done = run_python(LINUX_ALONE + HELP, system)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "usage: gpumem" in done.stdout


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_a_marked_test_is_skipped_by_a_sentence_and_fails_in_ci(system, tmp_path):
    path = tmp_path / "test_it.py"
    path.write_text(SUITE)
    arguments = [LINUX_ALONE + SESSION, system, f"--rootdir={tmp_path}", str(path)]
    told = f"no virtual GPU: the virtual GPU: it needs Linux, and this system is {system}"
    if system == "darwin":  # MPS is looked for: here torch's accelerator is CUDA
        told = f"the accelerator of this torch is CUDA; write --gpumem-device=cuda), and {told}"
    done = run_python(*arguments, "-k", "plain")
    assert "1 passed, 1 deselected" in done.stdout, done.stdout + done.stderr
    done = run_python(*arguments)
    assert "1 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert told in done.stdout
    done = run_python(*arguments, CI="1")
    assert "ERROR at setup of test_marked" in done.stdout, done.stdout + done.stderr
    assert told in done.stdout


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_setup_builds_nothing_there_and_says_so(system, tmp_path):
    program = """
import pathlib, runpy, sys
import setuptools

setuptools.setup = lambda **_: None
functions = runpy.run_path(sys.argv[1])
sys.platform = sys.argv[2]
try:
    functions["compile_libraries"](pathlib.Path(sys.argv[3]))
except functions["CannotBuildError"] as error:
    print(error.text)
"""
    done = run_python(program, str(ROOT / "setup.py"), system, str(tmp_path), GPUMEM_PURE="")
    assert f"the virtual GPU runs on Linux only, and this is {system}" in done.stdout, done.stderr
    assert not list(tmp_path.iterdir())
