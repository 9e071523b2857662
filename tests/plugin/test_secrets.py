"""What a session writes: nothing of the environment, nothing outside its folders, no markup of a
test's name; and nothing that it reads can run."""

from __future__ import annotations

import ast
import json
import secrets
from pathlib import Path

import pytest
from helpers.sources import HELPER

import pytest_gpumem
from pytest_gpumem.baselines.store import BaselineStore
from pytest_gpumem.report.json_report import read_report

PACKAGE = Path(pytest_gpumem.__file__).parent
SETTINGS = "max_split_size_mb:517"
VARIABLES = (
    *("AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "PIP_INDEX_URL"),
    *("USER", "LOGNAME", "HOSTNAME", "MASTER_ADDR", "NVIDIA_DRIVER_CAPABILITIES", "CI_JOB_TOKEN"),
    *("GITHUB_REPOSITORY", "GITHUB_SHA", "GPUMEM_ANYTHING", "TORCH_HOME", "CUDA_HOME", "PYTEST_ME"),
)
OUTPUTS = (
    *("--gpumem-update-baselines", "--gpumem-html=out/page.html", "--gpumem-json=out/r.json"),
    *("--gpumem-markdown=out/report.md", "--gpumem-snapshots=out/snaps", "--junitxml=out/j.xml"),
)


def written(suite):
    """The content of all that a session wrote, by path."""
    files = (path for path in suite.path.rglob("*") if path.is_file())
    return {
        str(path.relative_to(suite.path)): path.read_bytes()
        for path in files
        if path.suffix not in {".py", ".pyc"}
    }


def test_of_the_environment_the_allocators_settings_alone_are_recorded(suite, monkeypatch):
    values = {name: f"value-{secrets.token_hex(12)}" for name in VARIABLES}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", SETTINGS)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(suite.path / "summary.md"))
    session = suite.run(
        *("-vv", *OUTPUTS),
        source="""
        @pytest.mark.gpu_memory
        def test_good(): mib(40)

        @pytest.mark.gpu_memory(max_gib=0.1)
        def test_large(): mib(200)

        @pytest.mark.gpu_memory(max_allocated_gib=0.01)
        def test_over(gpu_memory):
            with gpu_memory.measure("part"):
                mib(40)
        """,
    )
    assert session.outcomes == {"passed": 1, "failed": 2}
    files = written(suite)
    assert {Path(name).suffix for name in files} >= {".json", ".html", ".md", ".pickle", ".xml"}
    files["the terminal"] = (session.out + session.err).encode()
    found = [
        (path, name)
        for path, content in files.items()
        for name, value in values.items()
        if value.encode() in content
    ]
    assert found == []
    (baselines,) = suite.baselines().values()
    (provenance,) = json.loads(baselines)["provenance"].values()
    assert provenance.pop("allocator") == SETTINGS
    assert set(provenance) == {"torch", "cuda", "cudnn", "driver"}


HOSTILE = (
    *("../../up", "/etc/up", "..", "a\\..\\up", "<script>alert(1)</script>", "a' onload='alert(1)"),
    *("\x1b[31mred", "\u202e", "::error::up", "%0A::error::up", "|a|`b`|", "[a](javascript:up)"),
    *("{{ 7 * 191 }}", "${up}", "y" * 300, "con", "null\x00", "\r\nup: down", "]]>", "--><b>"),
)


def test_names_write_nowhere_else_and_are_no_markup(suite, monkeypatch):
    """Of tests, of their modules and of their parts."""
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(suite.path / "out" / "summary.md"))
    source = f"""
import pytest
import torch
{HELPER}
NAMES = {HOSTILE!r}

@pytest.mark.gpu_memory
@pytest.mark.parametrize("name", NAMES, ids=NAMES)
def test_it(name, gpu_memory):
    with gpu_memory.measure(name):
        mib(2)

@pytest.mark.gpu_memory(max_allocated_gib=0.001)
@pytest.mark.parametrize("name", NAMES, ids=NAMES)
def test_fails(name): mib(2)
"""
    suite.write("<img src=x onerror=up>/test_{{ 7 * 191 }}.py", source)
    (suite.path / "out").mkdir()
    outside = set(suite.path.parent.iterdir()) - {suite.path}
    session = suite.run("--import-mode=importlib", *OUTPUTS)
    count = len(HOSTILE)
    assert session.outcomes == {"passed": count, "failed": count}, session.out
    assert set(suite.path.parent.iterdir()) - {suite.path} == outside
    hidden = {".pytest_cache", ".cache", ".config"}  # pytest's, and matplotlib's at home
    made = {path.name for path in suite.path.iterdir()} - hidden
    assert made == {"out", "baselines", "<img src=x onerror=up>"}
    assert len(suite.baselined()) == 2 * count  # each test and its part
    page = (suite.path / "out" / "page.html").read_text()
    for text in (page, (suite.path / "out" / "report.md").read_text(), session.out):
        assert "1337" not in text
        assert not set(text) & {"\x1b", "\u202e", "\x00", "\r"}
    assert "<script>alert" not in page
    assert "<img" not in page
    commands = [line for line in session.out.splitlines() if line.startswith("::")]
    assert all(line.startswith("::error file=") for line in commands)
    assert len(commands) == count
    store = BaselineStore(suite.path / "baselines")
    for result in read_report(suite.path / "out" / "r.json").results:
        module, _, test = result.nodeid.partition("::")
        there = store.get("virtual-H100", module, test, result.part) is not None
        assert there is not result.verdict.failed


RUNS = {"eval", "exec", "compile", "__import__", "execfile"}
MAKES_CODE = {"wrapped_functions.py", "undone.py"}
"""what makes a function's code of the parameters of one of PyTorch's own functions, and what
imports the project's own modules as they were in a commit"""
READS_PYTORCHS_CACHE = {"recorded_graphs.py"}
"""what reads a graph of Inductor's cache, which PyTorch itself unpickles, with code that it runs"""
UNPICKLES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "torch"}


def test_nothing_that_is_read_is_run():
    """No file's content is evaluated."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        runs = RUNS - {"exec", "compile"} if path.name in MAKES_CODE else RUNS
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in UNPICKLES - {"torch"}:
                found.append((path.name, node.lineno))
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                module, _, name = called.rpartition(".")
                loads = module in UNPICKLES and name in {"load", "loads", "Unpickler", "safe_load"}
                loads &= path.name not in READS_PYTORCHS_CACHE
                if called in runs or loads:
                    found.append((path.name, node.lineno, called))
    assert found == []


@pytest.mark.parametrize("content", [b"\x80\x04cos\nsystem\n(S'false'\ntR.", b"!!python/object:os"])
def test_a_pickle_in_the_place_of_a_baseline_is_refused(suite, content):
    path = suite.path / "baselines" / "virtual-H100" / "test_it.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    session = suite.run(source="@pytest.mark.gpu_memory\ndef test_it(): mib(40)")
    assert session.outcomes == {"failed": 1}
    assert "incomparable: cannot read the baseline" in session.flat
