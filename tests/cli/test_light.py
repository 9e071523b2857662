"""``gpumem light``: requirements without NVIDIA's packages."""

import importlib.metadata
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from pytest_gpumem.cli import light
from pytest_gpumem.cli.light import EXCLUDED_BY_UV, UNUSED, is_left_out, normalized

# As pip's installation report has them.
PACKAGES = {
    "torch": "2.15.0",
    "nvidia-cudnn-cu13": "9.26.0.51",
    "nvidia_cublas": "13.4.1.3",
    "cuda-toolkit": "13.2.2",
    "cuda_bindings": "13.5.0",
    "nvidia-ml-py": "13.0.1",
    "triton": "3.9.0",
    "transformers": "5.23.0",
    "pytest-gpumem": "0.1.0",
}
WITHOUT_ALL = ["nvidia-ml-py==13.0.1", "torch==2.15.0", "transformers==5.23.0"]


@pytest.fixture
def asked(monkeypatch):
    """The requirements that pip is asked for; it answers with PACKAGES."""
    requirements = []

    def resolved(wanted):
        requirements.extend(wanted)
        return [{"metadata": {"name": n, "version": v}} for n, v in PACKAGES.items()]

    monkeypatch.setattr(light, "resolved", resolved)
    return requirements


def lines_of(output):
    return [line for line in output.splitlines() if not line.startswith("#")]


def test_it_prints_pinned_requirements_without_what_only_a_real_gpu_needs(gpumem, asked):
    status, output, errors = gpumem("light", "transformers")
    assert (status, errors) == (0, "")
    assert lines_of(output) == WITHOUT_ALL
    assert "# left out: cuda-toolkit, cuda_bindings, nvidia-cudnn-cu13, nvidia_cublas" in output


def test_cudnn_and_triton_are_kept_where_they_are_wanted(gpumem, asked):
    kept = lines_of(gpumem("light", "--cudnn", "--triton")[1])
    assert sorted(set(kept) - set(WITHOUT_ALL)) == ["nvidia-cudnn-cu13==9.26.0.51", "triton==3.9.0"]


def test_pip_is_asked_for_this_package_s_requirements_and_the_user_s(gpumem, asked):
    gpumem("light", "-r", "requirements.txt", "-c", "constraints.txt", "torch==2.15.0")
    assert asked[-5:] == ["torch==2.15.0", "-r", "requirements.txt", "-c", "constraints.txt"]
    own = asked[:-5]
    assert {requirement.split(">")[0] for requirement in own} >= {"torch", "pytest", "msgspec"}
    assert not any("extra" in requirement for requirement in own)


def test_of_this_package_it_takes_the_installed_one_with_the_extras_that_are_named(gpumem, asked):
    gpumem("light")
    plain = asked.copy()
    asked.clear()
    gpumem("light", "pytest-gpumem[html, nvml]", "timm")
    assert asked[-1] == "timm"
    added = [requirement for requirement in asked[:-1] if requirement not in plain]
    assert [re.match(r"[\w-]+", requirement)[0] for requirement in added] == [
        "nvidia-ml-py",
        "jinja2",
    ]


@pytest.fixture
def pips(monkeypatch):
    """The commands of pip; statuses has the exit status of each one that does not succeed."""
    commands, statuses = [], {}

    def run(command, **_options):
        status = statuses.get(len(commands), 0)
        commands.append(command[1:])
        return subprocess.CompletedProcess(command, status, '{"install": []}', "")

    monkeypatch.setattr(light.subprocess, "run", run)
    return commands, statuses


def test_an_old_pip_would_download_all_so_a_newer_one_resolves(monkeypatch, pips):
    commands, statuses = pips
    monkeypatch.setattr(light, "version", lambda _name: "23.2.1")
    assert light.resolved(["torch"]) == []
    assert commands[0][:3] == ["-m", "pip", "install"]
    assert "--no-compile" in commands[0]  # it runs once
    assert commands[0][-2:] == [commands[1][0].removesuffix("/pip"), "pip>=25.3"]
    assert "--use-feature=fast-deps" in commands[1]
    commands.clear()
    statuses[0] = 1  # no newer one is to be had
    assert light.resolved(["torch"]) == []
    assert commands[1][:3] == ["-m", "pip", "install"]
    assert "--use-feature=fast-deps" not in commands[1]


def test_a_pip_that_downloads_nothing_is_taken_as_it_is(monkeypatch, pips):
    commands, _ = pips
    for recent in ("25.3", "26.0.1", "26.3.dev1"):
        monkeypatch.setattr(light, "version", lambda _name, recent=recent: recent)
        light.resolved(["torch"])
    assert [command[:3] for command in commands] == [["-m", "pip", "install"]] * 3
    assert all("--use-feature=fast-deps" in command for command in commands)


def test_requirements_that_pip_cannot_meet_are_named(gpumem, tmp_path):
    missing = tmp_path / "requirements.txt"
    status, output, errors = gpumem("light", "-r", str(missing))
    assert (status, output) == (2, "")
    assert "pip cannot install these together (exit status 1, see above)" in errors


def test_without_pip_it_says_how_uv_does_it(gpumem, monkeypatch):
    monkeypatch.setattr(light, "PathFinder", SimpleNamespace(find_spec=lambda _name: None))
    status, _, errors = gpumem("light")
    assert status == 2
    assert "has no pip" in errors
    assert "uv pip install --excludes excludes.txt" in errors


def test_uv_s_names_are_all_that_this_torch_brings(gpumem):
    installed = {normalized(d.metadata["Name"]) for d in importlib.metadata.distributions()}
    brought = {name for name in installed if is_left_out(name, ())}
    assert brought - set(EXCLUDED_BY_UV) == set()
    assert all(UNUSED.fullmatch(name) for name in EXCLUDED_BY_UV)
    assert lines_of(gpumem("light", "--excludes")[1]) == list(EXCLUDED_BY_UV)
    kept = set(EXCLUDED_BY_UV) - set(lines_of(gpumem("light", "--excludes", "--cudnn")[1]))
    assert kept == {"nvidia-cudnn-cu12", "nvidia-cudnn-cu13"}


def test_it_runs_where_nothing_but_this_package_is_installed():
    absent = ["torch", "pytest", "pluggy", "tabulate", "wcwidth", "msgspec", "filelock", "jinja2"]
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({absent})); "
        "from pytest_gpumem.cli.main import main; sys.exit(main(['light', '--excludes']))"
    )
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (process.returncode, process.stderr) == (0, "")
    assert "nvidia-cublas" in process.stdout
