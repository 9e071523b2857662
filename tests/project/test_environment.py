"""The set-up of tests/run.sh and examples/run.sh: what it installs, when, and what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from helpers.paths import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILES = (".ci/environment.sh", ".ci/constraints.txt", ".ci/examples.txt")
DRIVER = "pytest_gpumem/devices/driver.py"
NATIVE = "pytest_gpumem/devices/virtual/native"


@pytest.fixture
def copy(tmp_path):
    """A project with the set-up's scripts, and nothing to install."""
    (tmp_path / ".ci").mkdir()
    for name in (*FILES, "pyproject.toml", "setup.py"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / NATIVE).mkdir(parents=True)
    (tmp_path / NATIVE / "libgpumem_cuda.so").touch()
    return tmp_path


def set_up(copy, purpose="examples", **environment):
    command = ["bash", "-c", f". .ci/environment.sh {purpose} || exit 3; echo ready"]
    environment = {"PATH": os.environ["PATH"], **environment}
    done = subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_a_python_that_is_missing_or_too_old_is_named(copy):
    status, _, error = set_up(copy, PYTHON="nosuchpython")
    assert status == 3
    assert "nosuchpython: command not found" in error
    old = copy / "old"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.version_info = 3, 9\n$2"')
    old.chmod(0o755)
    status, _, error = set_up(copy, PYTHON=str(old))
    assert status == 3
    assert error.endswith("PYTHON=/path/to/python3: 3.10 or newer is needed\n")
    assert not (copy / ".venv").exists()


def test_a_set_up_that_fails_ends_with_pips_own_lines_and_is_tried_again(copy):
    """The constraints ask for a pip that does not exist, and there is no index."""
    (copy / ".ci/constraints.txt").write_text("pip===999\n")
    environment = {
        "PYTHON": sys._base_executable,
        "GPUMEM_VENV": "here",
        "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": os.devnull,
    }
    for _ in range(2):
        status, _, error = set_up(copy, **environment)
        assert status == 3
        assert error.startswith("setting up here for the examples: 2.5 to 6 GB, minutes the first")
        assert "\n    The user requested (constraint) pip===999\n" in error
        assert error.splitlines()[-1].startswith("ERROR: ResolutionImpossible")
    assert not (copy / ".venv").exists()


# What is installed for whom. The Python is a script that notes what pip is asked.

PYTHON = """\
#!/bin/sh
case "$*" in
*"-m venv --clear "*)
    mkdir -p "$4/bin"
    cp "$0" "$4/bin/python"
    echo made >>pip ;;
*"-m pip "*) echo "$*" | sed 's/.*pip-version-check install //' >>pip ;;
*print*) echo 3.11 ;;
*pytest_gpumem/devices/driver.py) exit 1 ;; # no GPU
esac
"""
TOOLS = "-c .ci/constraints.txt pip setuptools wheel"
LIGHT = "--no-deps -r .ci/examples.txt"
OWN = "--no-deps --no-build-isolation -e ."
ALL = "-c .ci/constraints.txt --no-build-isolation -e .[nvml,html,examples,docs,test,dev]"
EXAMPLES = "-c .ci/constraints.txt --no-build-isolation -e .[nvml,examples]"


@pytest.fixture
def asked(copy):
    """What is asked of pip to set up an environment for a purpose."""
    python = copy / "noting-python"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def asked(purpose):
        (copy / "pip").write_text("")
        assert set_up(copy, purpose, PYTHON=str(python))[0] == 0
        return (copy / "pip").read_text().splitlines()

    return asked


def test_the_examples_are_set_up_without_nvidias_packages_and_the_tests_add_all(asked, copy):
    assert asked("examples") == ["made", TOOLS, LIGHT, OWN]
    assert asked("examples") == []
    assert asked("tests") == [TOOLS, ALL]
    assert asked("examples") == []  # and takes nothing away
    with (copy / ".ci/examples.txt").open("a") as file:
        file.write("# changed\n")
    assert asked("examples") == [TOOLS, ALL]


def test_with_a_real_gpu_the_examples_have_nvidias_packages(asked, copy):
    assert asked("examples") == ["made", TOOLS, LIGHT, OWN]
    python = copy / "noting-python"
    python.write_text(PYTHON.replace(f"*{DRIVER}) exit 1", f"*{DRIVER}) exit 0"))
    assert asked("examples") == [TOOLS, EXAMPLES]
    assert asked("examples") == []
    assert asked("tests") == [TOOLS, ALL]
    assert asked("examples") == []


def test_what_pip_cannot_finish_leaves_the_environment_and_an_interrupt_does_not(asked, copy):
    assert asked("examples") == ["made", TOOLS, LIGHT, OWN]
    python = copy / ".venv/bin/python"
    whole = python.read_text()
    (copy / "setup.py").write_text("# changed")
    python.write_text(whole.replace(">>pip ;;\n*print*", ">>pip; exit 1 ;;\n*print*"))
    assert set_up(copy, PYTHON=str(copy / "noting-python"))[0] == 3  # no connection
    python.write_text(whole)
    assert asked("examples") == [TOOLS, LIGHT, OWN]
    (copy / "setup.py").write_text("# changed again")
    python.write_text(whole.replace(">>pip ;;\n*print*", ">>pip; kill -TERM $PPID ;;\n*print*"))
    assert set_up(copy, PYTHON=str(copy / "noting-python"))[0] == 3
    assert asked("examples") == ["made", TOOLS, LIGHT, OWN]


def test_two_at_once_set_up_once(asked, copy):
    (copy / "pip").write_text("")
    command = "for i in 1 2; do (. .ci/environment.sh tests) & done; wait"
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(copy / "noting-python")}
    subprocess.run(["bash", "-c", command], cwd=copy, env=environment, check=True)
    assert (copy / "pip").read_text().splitlines() == ["made", TOOLS, ALL]


def test_without_a_virtual_gpu_it_says_why_and_tries_again(asked, copy):
    (copy / NATIVE / "libgpumem_cuda.so").unlink()
    (copy / NATIVE / "build-status.txt").write_text("no C compiler")
    assert asked("tests") == ["made", TOOLS, ALL]
    error = set_up(copy, "tests", PYTHON=str(copy / "noting-python"))[2]
    assert error.endswith("warning: there will be no virtual GPU: no C compiler\n")
    assert asked("tests") == [TOOLS, ALL]


def names_in(lines):
    return {re.match(r"[\w-]+", line)[0] for line in lines if re.match(r"\w", line)}


def test_the_list_of_the_examples_is_of_the_constraints_and_complete():
    constraints, examples = ((ROOT / name).read_text("utf-8").splitlines() for name in FILES[1:])
    names = names_in(examples)
    assert {line for line in examples if not line.startswith("#")} <= set(constraints)
    assert {name for name in names if name.startswith(("nvidia", "cuda", "triton"))} == {
        "nvidia-cudnn-cu13",
        "nvidia-ml-py",
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert names >= names_in([*project["dependencies"], *extras["nvml"], *extras["examples"]])
