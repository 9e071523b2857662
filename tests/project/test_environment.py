"""The set-up of tests/run.sh and examples/run.sh: its errors have their cause in one line."""

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

SCRIPT = (ROOT / ".ci/environment.sh").read_text(encoding="utf-8")
FILES = (".ci/environment.sh", ".ci/constraints.txt", ".ci/examples.txt")
DRIVER = "pytest_gpumem/devices/driver.py"
UNREACHABLE = "Failed to resolve 'index.example' ([Errno -2] Name or service not known)"
RETRY = (
    "WARNING: Retrying (Retry(total=%d, read=None)) after connection broken by "
    f"'{UNREACHABLE}': /simple/pip/\n"
)
OTHER_PYTHON = """\
ERROR: Ignored the following versions that require a different python version: 3.0 Requires-Python \
>=3.11; 4.1.2 Requires-Python >=3.11.5
ERROR: Could not find a version that satisfies soupsieve==4.1.2 (from versions: 2.10)
ERROR: No matching distribution found for soupsieve==4.1.2
"""
CONFLICT = """\
ERROR: Cannot install beautifulsoup4==4.15.0 because these have conflicting dependencies.

The conflict is caused by:
    beautifulsoup4 4.15.0 depends on soupsieve>=1.6.1
    The user requested (constraint) soupsieve==1.0

To fix this you could try to:
1. loosen the range of package versions you've specified

ERROR: ResolutionImpossible: for help visit https://pip.pypa.io/en/latest/topics/
"""
BUILD = """\
      File "<string>", line 1, in <module>
      ModuleNotFoundError: No module named 'nosuch'
      [end of output]

  note: This error originates from a subprocess, and is likely not a problem with pip.
ERROR: Failed to build 'file:///here' when getting requirements to build wheel
"""
FULL = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n\n"


def cause_of(output):
    """The cause that the set-up names for a command's output."""
    (function,) = re.findall(r"^env_cause\(\) \{\n.*?^\}\n", SCRIPT, re.MULTILINE | re.DOTALL)
    command = ["bash", "-c", f"{function}env_cause"]
    done = subprocess.run(command, input=output, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        (
            RETRY % 0 + "ERROR: No matching distribution found for pip==26.3\n",
            f"no connection to the package index: {UNREACHABLE}",
        ),
        (
            RETRY % 4 + OTHER_PYTHON,  # a connection that was there at the second try
            "No matching distribution found for soupsieve==4.1.2 (4.1.2 Requires-Python >=3.11.5)",
        ),
        (
            CONFLICT,
            (
                "conflict: beautifulsoup4 4.15.0 depends on soupsieve>=1.6.1; "
                "The user requested (constraint) soupsieve==1.0"
            ),
        ),
        (
            BUILD,
            (
                "Failed to build 'file:///here' when getting requirements to build wheel: "
                "ModuleNotFoundError: No module named 'nosuch'"
            ),
        ),
        (FULL, FULL.removeprefix("ERROR: ").strip()),
        ("x.c:1:11: error: expected a name\n    1 | int\n", "x.c:1:11: error: expected a name"),
        ("\nKilled\n", "Killed"),
    ],
)
def test_the_cause_is_one_line_of_the_output(output, cause):
    assert cause_of(output) == f"{cause}\n"


@pytest.fixture
def copy(tmp_path):
    """A project with the set-up's scripts, and nothing to install."""
    (tmp_path / ".ci").mkdir()
    for name in (*FILES, "pyproject.toml", "setup.py"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
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
    assert error.startswith("error: nosuchpython not found: install Python 3.10 or newer")
    old = copy / "old"
    old.write_text("#!/bin/sh\ncase $2 in *print*) echo 3.9 ;; *) exit 1 ;; esac\n")
    old.chmod(0o755)
    status, _, error = set_up(copy, PYTHON=str(old))
    assert status == 3
    assert error == (
        f"error: {old} is Python 3.9 and 3.10 or newer is needed: name one: "
        "PYTHON=/path/to/python3.11\n"
    )


def test_a_set_up_that_fails_says_so_in_one_line_and_is_tried_again(copy):
    """The constraints ask for a pip that does not exist, and there is no index."""
    (copy / ".ci/constraints.txt").write_text("pip===999\n")
    environment = {
        "PYTHON": sys._base_executable,
        "GPUMEM_VENV": "here",
        "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": os.devnull,
    }
    for said in ("setting up here (about 2.5 GB", "setting up here, where it failed before"):
        status, out, error = set_up(copy, **environment)
        assert (status, out.startswith(said), out.count("\n")) == (3, True, 1)
        assert error.startswith("error: pip install failed: conflict: The user requested pip; The ")
        assert error.endswith(f"(all output: {copy}/here/setup.log)\n")
        assert error.count("\n") == 1
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
