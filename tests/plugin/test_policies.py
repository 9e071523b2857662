"""Policies of large suites: guarded peaks, tolerances as sums, torch versions side by side."""

from __future__ import annotations

import importlib.metadata
import json

SOURCE = """
import os

@pytest.mark.gpu_memory
def test_it():
    kept = mib(100)
    if "FRAGMENTED" in os.environ:
        cached = [mib(3) for _ in range(30)]
        del cached
    if "GROWN" in os.environ:
        more = mib(float(os.environ["GROWN"]))
        assert more is not None
"""


def test_only_allocated_is_guarded_and_reserved_is_told(suite, monkeypatch):
    assert suite.run("--gpumem-update-baselines", source=SOURCE).ret == 0
    path = next((suite.path / "baselines").rglob("*.json"))
    content = json.loads(path.read_text())
    content["tests"]["test_it"]["peak_reserved"] = [40 << 20]
    path.write_text(json.dumps(content))
    assert suite.run().outcomes == {"failed": 1}
    session = suite.run("--gpumem-guard=allocated")
    assert session.outcomes == {"passed": 1}
    assert session.verdicts() == {"test_it": "ok"}
    assert "note: peak reserved grew by 60.00 MiB (+150.0%), unguarded" in session.flat
    suite.write("pytest.ini", "[pytest]\ngpumem_guard = allocated")
    assert suite.run().outcomes == {"passed": 1}
    monkeypatch.setenv("GROWN", "50")
    session = suite.run()
    assert session.outcomes == {"failed": 1}
    lead = "regressed: other +50.00 MiB at test_it.py:4 (mib)"
    assert f"{lead}; peak allocated grew by 50.00 MiB (+50.0%): 100.00 -> 150.00" in session.flat
    assert "note: peak reserved grew by 110.00 MiB (+275.0%), unguarded" in session.flat


def test_a_tolerance_can_be_a_sum(suite, monkeypatch):
    assert suite.run("--gpumem-update-baselines", source=SOURCE).ret == 0
    for grown, passes in ((10.5, True), (11.5, False)):
        monkeypatch.setenv("GROWN", str(grown))
        session = suite.run("--gpumem-tolerance=1% + 10MiB", "--gpumem-guard=allocated")
        assert session.outcomes == {"passed" if passes else "failed": 1}
    assert "tolerance 11.00 MiB" in session.flat


def test_a_test_without_a_baseline_of_its_torch_is_held_to_the_nearest(suite, monkeypatch):
    suite.write("pytest.ini", "[pytest]\ngpumem_baseline_dir = baselines/torch-{torch}")
    assert suite.run("--gpumem-update-baselines", source=SOURCE).ret == 0
    (folder,) = (suite.path / "baselines").iterdir()
    old = folder.rename(folder.with_name("torch-2.1"))
    path = next(old.rglob("*.json"))
    path.write_text(path.read_text().replace('"torch": "2.', '"torch": "2.1.'))
    monkeypatch.setenv("GROWN", "50")
    session = suite.run()
    assert session.outcomes == {"failed": 1}
    minor = importlib.metadata.version("torch").split(".")[1]
    assert f"regressed: torch 2.1.{minor}" in session.flat
    assert "peak allocated grew by 50.00 MiB (+50.0%): 100.00 -> 150.00 MiB" in session.flat
    monkeypatch.delenv("GROWN")
    assert "note: baseline made with torch 2.1." in suite.run().flat
    session = suite.run("--gpumem-update-baselines")
    assert "gpumem: baselines: 1 created" in session.out
    assert sorted(p.name for p in (suite.path / "baselines").iterdir() if p.is_dir()) == sorted(
        [folder.name, "torch-2.1"]
    )
    assert "baseline made with" not in suite.run("-v").out


def test_git_does_not_show_the_lock(suite):
    assert suite.run("--gpumem-update-baselines", source=SOURCE).ret == 0
    ignored = (suite.path / "baselines/.gitignore").read_text().split()
    assert ignored == [".gitignore", ".gpumem.lock"]
