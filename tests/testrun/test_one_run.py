"""How often the body of a test runs: once if it passes, at most twice where it fails."""

from __future__ import annotations

from collections import Counter

import pytest

BODIES = """
import pathlib
LOG = []

@pytest.fixture(autouse=True)
def emptied():
    yield
    LOG.clear()

def count(name):
    with pathlib.Path("runs.txt").open("a") as file:
        file.write(f"{name}\\n")

def train():
    model = torch.nn.Linear(512, 512, device="cuda")
    adam = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.zeros(64, 512, device="cuda")).sum().backward()
        adam.step()

@pytest.mark.gpu_memory
def test_train():
    count("train")
    train()

@pytest.mark.gpu_memory
def test_range():
    count("range")
    torch.fft.rfft(torch.zeros(16, 16384, device="cuda"))
    torch.nn.LSTM(64, 64, device="cuda")(torch.zeros(8, 4, 64, device="cuda"))

@pytest.mark.gpu_memory
def test_parts(gpu_memory):
    count("parts")
    with gpu_memory.measure("train"):
        train()
"""

FAILING = """
@pytest.mark.gpu_memory(max_gib=0.03)
def test_short():
    count("short")
    for _ in range(10):
        out = torch.nn.Linear(64, 16384, device="cuda")(torch.zeros(64, 64, device="cuda"))
        LOG.append(out.detach() + 1)

@pytest.mark.gpu_memory(max_allocated_gib=20/1024)
def test_over():
    count("over")
    for _ in range(10):
        out = torch.nn.Linear(64, 16384, device="cuda")(torch.zeros(64, 64, device="cuda"))
        LOG.append(out.detach() + 1)

@pytest.mark.gpu_memory
def test_fails():
    count("fails")
    assert torch.zeros(1).item() == 1
"""


def runs(suite):
    path = suite.path / "runs.txt"
    counted = Counter(path.read_text().split())
    path.unlink()
    return counted


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--gpumem-update-baselines",),
        ("--gpumem-html=page.html", "--gpumem-json=report.json"),
        ("--gpumem-attribution=on",),
        ("--gpumem-attribution=off",),
    ],
    ids=["plain", "recording", "reports", "on", "off"],
)
def test_a_test_that_passes_runs_once(suite, options):
    session = suite.run("-v", *options, source=BODIES)
    assert session.outcomes == {"passed": 3}
    assert runs(suite) == {"train": 1, "range": 1, "parts": 1}
    # The range comes of the requests of that run.
    assert "cuFFT's workspaces" in session.flat
    session = suite.run("-v")
    assert session.outcomes == {"passed": 3}
    assert set(runs(suite).values()) == {1}


def test_a_test_that_fails_runs_at_most_twice_and_says_so(suite):
    session = suite.run("-v", source=BODIES + FAILING)
    assert session.outcomes == {"passed": 3, "failed": 3}
    assert runs(suite) == {
        "train": 1,
        "range": 1,
        "parts": 1,
        "short": 2,
        "over": 2,
        "fails": 1,
    }
    again = "note: the test failed, and ran a second time to find"
    assert f"{again} what it needs" in session.flat
    assert f"{again} what keeps its blocks" in session.flat
    assert "kept by global variable LOG" in session.flat
    assert suite.run("-v", "--gpumem-attribution=off").outcomes == {"passed": 3, "failed": 3}
    assert runs(suite)["over"] == 1


def test_a_second_run_checks_no_limit_again(suite, monkeypatch):
    """It may have other settings of the allocator, with other figures."""
    checked = []
    monkeypatch.setattr("pytest_gpumem.testrun.run.require_pinned_stats", checked.append)
    over = FAILING[FAILING.index("@pytest.mark.gpu_memory(max_allocated_gib") :]
    pinned = "def test_over(gpu_memory):\n    with gpu_memory.measure('p', max_pinned_gib=1): pass"
    over = over.replace("def test_over():", pinned)
    suite.run(source=BODIES + over)
    assert runs(suite)["over"] == 2
    assert checked == ["max_pinned_gib=1"]


def test_a_test_that_grew_is_explained_by_its_first_run(suite):
    source = BODIES.replace("train()\n\n", "train()\n    kept = mib(64)\n\n", 1)
    suite.run("--gpumem-update-baselines", source=BODIES)
    runs(suite)
    session = suite.run(source=source)
    assert session.verdicts()["test_train"] == "regressed"
    assert "kept = mib(64)" in session.flat or "64.00 MiB" in session.flat
    assert runs(suite)["train"] <= 2
