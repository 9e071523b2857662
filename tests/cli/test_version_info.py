"""``gpumem version`` tells what a bug report needs, whatever is broken or missing."""

import json
import platform
import subprocess
import sys

import pytest
from helpers.warm import warm_python

from pytest_gpumem.cli import main, version_info
from pytest_gpumem.cli.version_info import (
    describe_gpus,
    describe_torch,
    describe_virtual,
    facts_of,
    format_cudnn,
)
from pytest_gpumem.devices import virtual
from pytest_gpumem.devices.torch_build import TorchBuild
from pytest_gpumem.devices.virtual import native
from pytest_gpumem.devices.virtual.native import BuildProblem
from pytest_gpumem.version import __version__

FACTS = {"version": "2.15.0+cu132", "cuda": "13.2", "cudnn": 92600, "gpus": []}
BROKEN = {"error": "OSError: libcudart.so.13: cannot open shared object file"}


@pytest.fixture
def quick(monkeypatch):
    """Facts as they are told, without the seconds that importing torch takes."""
    answers = {
        version_info.TORCH_PROGRAM: FACTS,
        version_info.VIRTUAL_PROGRAM: {"cudnn": 92600},
    }
    monkeypatch.setattr(version_info, "facts_of", answers.get)
    return answers


def test_it_tells_the_versions_of_this_machine(virtual_gpu, gpumem, monkeypatch):
    monkeypatch.setattr(sys, "executable", warm_python())
    status, output, errors = gpumem("version")
    assert (status, errors) == (0, "")
    told = dict(line.split(maxsplit=1) for line in output.splitlines())
    assert told["pytest-gpumem"] == __version__
    assert told["Python"].startswith(platform.python_version())
    assert told["torch"].startswith(f"{virtual_gpu.__version__}, CUDA {virtual_gpu.version.cuda}")
    assert told["pytest"] == pytest.__version__
    assert "virtual GPU    works; " in output


def test_it_names_all_that_it_should(quick, gpumem):
    names = [line[:15].strip() for line in gpumem("version")[1].splitlines()]
    assert names[:7] == [
        *("pytest-gpumem", "Python", "system", "torch", "GPU"),
        *("NVIDIA driver", "virtual GPU"),
    ]
    assert {"pytest", "pluggy", "tabulate", "msgspec", "filelock"} <= set(names)


def test_variables_that_change_figures_are_told(quick, gpumem, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert "PYTORCH_CUDA_ALLOC_CONF  expandable_segments:True" in gpumem("version")[1]


def test_a_row_that_fails_says_why_and_the_others_stay(quick, gpumem, monkeypatch):
    def fail(_facts):
        raise PermissionError("no")

    monkeypatch.setattr(version_info, "describe_gpus", fail)
    quick[version_info.TORCH_PROGRAM] = {}
    status, output, _ = gpumem("version")
    assert status == 0
    assert "unknown: PermissionError: no" in output
    assert "torch          unknown: KeyError: 'cuda'" in output
    assert f"pytest         {pytest.__version__}" in output


def test_torch_that_is_broken_or_missing(monkeypatch):
    build = TorchBuild("2.15.0+cu132", "13.2")
    monkeypatch.setattr(version_info, "installed_torch", lambda: build)
    expected = f"2.15.0+cu132, which cannot be imported: {BROKEN['error']}"
    assert describe_torch(BROKEN) == expected
    assert describe_gpus(BROKEN) == "unknown: torch cannot be queried"
    monkeypatch.setattr(version_info, "installed_torch", lambda: None)
    assert describe_torch(BROKEN) == "not installed"


def test_torch_without_cuda_s_libraries_is_meant_for_the_virtual_gpu(monkeypatch):
    build = TorchBuild("2.15.0+cu132", "13.2")
    monkeypatch.setattr(version_info, "installed_torch", lambda: build)
    row = describe_torch(BROKEN, ["libcublas.so.13", "libnccl.so.2"])
    assert row.startswith("2.15.0+cu132, CUDA 13.2, for the virtual GPU alone: 2 of CUDA's")
    assert "pip check" in row


def test_torch_without_cuda():
    facts = FACTS | {"version": "2.15.0+cpu", "cuda": None, "cudnn": None}
    assert describe_torch(facts) == "2.15.0+cpu, a build without CUDA, no cuDNN"


def test_the_gpus_that_torch_sees():
    assert describe_gpus(FACTS) == "torch sees no GPU"
    gpus = [["NVIDIA L4", 23 * 2**30, "8.9"], ["NVIDIA T4", 15 * 2**30, "7.5"]]
    expected = "NVIDIA L4 (23.00 GiB, capability 8.9), NVIDIA T4 (15.00 GiB, capability 7.5)"
    assert describe_gpus(FACTS | {"gpus": gpus}) == expected


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"cudnn": 92600, "computes_workspaces": True}, "works; cuDNN 9.26.0 computes workspaces"),
        (
            {"cudnn": 90501},
            "works; cuDNN 9.5.1 is too old to compute workspaces (9.8 and later can)",
        ),
        ({"cudnn": 0}, "works; there is no cuDNN to compute workspaces"),
        (BROKEN, f"built, but it does not run: {BROKEN['error']}"),
    ],
)
def test_the_virtual_gpu(facts, expected):
    assert describe_virtual(facts) == expected


def test_a_virtual_gpu_that_was_not_built_says_why(monkeypatch):
    problem = BuildProblem("no C compiler was found", "install one", "")
    monkeypatch.setattr(native, "build_problem", lambda: problem)
    row = describe_virtual(virtual.status()._asdict())
    assert row == "not built: no C compiler was found; install one"


@pytest.mark.parametrize(("number", "text"), [(92600, "9.26.0"), (90501, "9.5.1"), (8907, "8.9.7")])
def test_cudnns_numbers(number, text):
    assert format_cudnn(number) == text


@pytest.mark.parametrize(
    ("program", "facts"),
    [
        ("print('noise'); print('{\"a\": 1}')", {"a": 1}),
        ("raise ImportError('libcudart')", {"error": "ImportError: libcudart"}),
        ("import os; os._exit(3)", {"error": "exit status 3"}),
    ],
)
def test_a_program_that_ends_badly_ends_alone(program, facts):
    assert facts_of(program) == facts


def test_a_program_without_an_end_is_ended(monkeypatch):
    def run(*_arguments, **_options):
        raise subprocess.TimeoutExpired("python", 120)

    monkeypatch.setattr(version_info.subprocess, "run", run)
    assert facts_of("") == {"error": "no answer in 120 s"}


def test_it_runs_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('broken')\n")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
        "from pytest_gpumem.cli import version_info; "
        "import json; print(json.dumps('torch' in sys.modules))"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
    assert json.loads(output) is False


def test_the_version_alone(capsys):
    with pytest.raises(SystemExit) as end:
        main.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"pytest-gpumem {__version__}\n"


def test_the_command_needs_no_script():
    command = (sys.executable, "-m", "pytest_gpumem", "--version")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"pytest-gpumem {__version__}\n", "")
