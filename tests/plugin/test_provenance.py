"""A new toolchain: what the summary leads with, and what --gpumem-provenance changes."""

from __future__ import annotations

import json
import re

import pytest

UPDATE = "--gpumem-update-baselines"
SOURCE = """
import os
MORE = int(os.environ.get("MORE", "0"))

@pytest.mark.parametrize("n", range(5))
@pytest.mark.gpu_memory
def test_one(n):
    mib(100 + 10 * n + MORE)

@pytest.mark.gpu_memory
def test_other():
    mib(60 if MORE < 1 or "ALONE" not in os.environ else 560)
"""
FILE = "baselines/virtual-H100/test_it.json"


@pytest.fixture
def known(suite):
    """Tests whose baselines an older torch made."""
    assert suite.run(UPDATE, source=SOURCE).outcomes == {"passed": 6}
    made_with(suite, "1.99.0")
    return suite


def made_with(suite, version):
    """Have the baselines be of a version of torch."""
    path = suite.path / FILE
    text = re.sub(r'"torch": "[^"]*"', f'"torch": "{version}"', path.read_text())
    path.write_text(text)


def provenances(suite):
    found = json.loads((suite.path / FILE).read_text())
    return {found["provenance"][it["provenance"]]["torch"] for it in found["tests"].values()}


def test_the_summary_leads_with_a_change_of_toolchain_and_no_section_repeats_it(
    known, virtual_gpu, monkeypatch
):
    monkeypatch.setenv("MORE", "28")
    session = known.run()
    assert session.outcomes == {"failed": 5, "passed": 1}
    now = virtual_gpu.__version__
    lead = f"gpumem: torch 1.99.0 -> {now}: 5 tests moved by +28.00 MiB allocated, other +28.00 MiB"
    summary = " ".join(session.out.partition("= GPU memory =")[2].split())
    assert re.sub(r"^=* ", "", summary).startswith(lead)
    assert f"if this is intended, run pytest {UPDATE}" in session.flat
    assert session.out.count("other tests moved with it, see the summary") == 5
    assert session.out.count("FAILED test_it.py::test_one[") == 5
    headline = f"FAILED test_it.py::test_one[0] - +28.00 MiB (+28.0%): torch 1.99.0 -> {now}"
    assert headline in session.flat
    assert "peak allocated 100.00 MiB" not in session.flat
    assert set(session.verdicts().values()) == {"regressed", "ok"}
    full = known.run("-v")
    assert "peak allocated 100.00 MiB 128.00 MiB" in full.flat
    assert "see the summary" not in full.out


@pytest.mark.parametrize("ini", ["pytest.ini", "pyproject.toml"])
def test_a_change_of_torch_names_how_to_keep_both_versions_baselines(
    known, virtual_gpu, monkeypatch, ini
):
    """What the message proposes is done as it says, step by step."""
    monkeypatch.setenv("MORE", "28")
    section, quote = ("[pytest]", "") if ini == "pytest.ini" else ("[tool.pytest.ini_options]", '"')
    known.write(ini, f"{section}\n")
    now = ".".join(virtual_gpu.__version__.split(".")[:2])
    setting = f"gpumem_baseline_dir = {quote}baselines/torch-{{torch}}{quote}"
    hint = (
        f"to keep separate baselines for torch 1.99 and torch {now}, set {setting} in {ini}, "
        "and record with each torch"
    )
    assert hint in known.run().flat
    assert "beside those" not in known.run("--gpumem-provenance=note").flat
    known.write(ini, f"{section}\n{setting}\n")
    session = known.run()
    assert session.outcomes == {"failed": 5, "passed": 1}  # still held to the ones of torch 1.99
    assert "beside those" not in session.flat
    assert known.run(UPDATE).outcomes == {"passed": 6}
    assert known.run().outcomes == {"passed": 6}
    old, new = FILE, FILE.replace("/", f"/torch-{now}/", 1)
    assert '"1.99.0"' in (known.path / old).read_text()
    assert "1.99" not in (known.path / new).read_text()


def test_a_regression_of_its_own_keeps_its_section_and_is_pointed_to(known, monkeypatch):
    monkeypatch.setenv("MORE", "28")
    monkeypatch.setenv("ALONE", "1")
    session = known.run()
    assert session.outcomes == {"failed": 6}
    assert "5 tests moved by +28.00 MiB" in session.flat
    assert "gpumem: 1 more regressed for another reason: begin with these" in session.flat
    assert "if this is intended, run pytest --gpumem-update" not in session.flat
    assert session.out.count("see the summary") == 5
    assert "(+833.3%): 60.00 -> 560.00 MiB" in session.flat


def test_reports_lead_with_it_as_well(known, monkeypatch):
    monkeypatch.setenv("MORE", "28")
    known.run("--gpumem-markdown=report.md", "--gpumem-json=report.json")
    text = (known.path / "report.md").read_text()
    assert text.index("5 tests moved by +28.00 MiB allocated") < text.index("### ")
    (remark,) = json.loads((known.path / "report.json").read_text())["remarks"]
    assert "5 tests moved by +28.00 MiB allocated" in remark


def test_with_the_same_toolchain_each_is_a_regression_of_its_own(suite, monkeypatch):
    assert suite.run(UPDATE, source=SOURCE).outcomes == {"passed": 6}
    monkeypatch.setenv("MORE", "28")
    session = suite.run()
    assert session.outcomes == {"failed": 5, "passed": 1}
    assert "moved by" not in session.out
    assert "see the summary" not in session.out


def test_workers_results_are_told_together_as_well(known, monkeypatch):
    pytest.importorskip("xdist")
    monkeypatch.setenv("MORE", "28")
    session = known.run_warm("-n", "2")
    assert session.outcomes == {"failed": 5, "passed": 1}
    assert "5 tests moved by +28.00 MiB allocated" in session.flat
    assert session.out.count("see the summary") == 5


@pytest.mark.parametrize("ini", [False, True])
def test_note_passes_what_is_far_from_a_baseline_of_another_toolchain(known, monkeypatch, ini):
    arguments = given(known, "note", ini=ini)
    monkeypatch.setenv("MORE", "28")
    session = known.run(*arguments)
    assert session.outcomes == {"passed": 6}
    assert "5 tests moved by +28.00 MiB allocated" in session.flat
    assert sorted(set(session.verdicts().values())) == ["incomparable", "ok"]
    assert session.table["test_one[0]"]["change"].startswith("+28.00 (+")
    assert "note: baseline made with torch 1.99.0; measured with torch" in session.flat
    monkeypatch.setenv("MORE", "-28")
    assert known.run(*arguments, "--gpumem-shrinkage=fail").outcomes == {"passed": 6}


def test_note_changes_nothing_where_the_toolchain_is_the_same(suite, monkeypatch):
    assert suite.run(UPDATE, source=SOURCE).outcomes == {"passed": 6}
    monkeypatch.setenv("MORE", "28")
    assert suite.run("--gpumem-provenance=note").outcomes == {"failed": 5, "passed": 1}


@pytest.mark.parametrize("ini", [False, True])
def test_fail_refuses_baselines_of_another_toolchain(known, ini):
    arguments = given(known, "fail", ini=ini)
    session = known.run(*arguments)
    assert session.outcomes == {"failed": 6}
    assert set(session.verdicts().values()) == {"incomparable"}
    assert "incomparable: the baseline was made with torch 1.99.0; 100.00 MiB all" in session.flat
    assert f"pytest 'test_it.py::test_one[0]' {UPDATE}" in session.flat
    assert "6 made with another toolchain (torch 1.99.0)" in session.flat


def test_fail_is_satisfied_by_an_update_though_no_figure_moved(known, virtual_gpu):
    """Without the option an entry whose figures are the same is not written anew."""
    assert known.run(UPDATE).outcomes == {"passed": 6}
    assert provenances(known) == {"1.99.0"}
    session = known.run(UPDATE, "--gpumem-provenance=fail")
    assert session.outcomes == {"passed": 6}
    assert "gpumem: baselines: 6 changed" in session.out
    assert provenances(known) == {virtual_gpu.__version__}
    assert known.run("--gpumem-provenance=fail").outcomes == {"passed": 6}


def test_an_unknown_choice_is_a_usage_error(known):
    session = known.run("--gpumem-provenance=maybe")
    assert session.ret == pytest.ExitCode.USAGE_ERROR
    assert "--gpumem-provenance=maybe: this is not a valid choice; write" in session.err


def given(suite, choice, *, ini):
    """Set the option, in the ini file or by the arguments that are returned."""
    if not ini:
        return [f"--gpumem-provenance={choice}"]
    suite.write("pytest.ini", f"[pytest]\ngpumem_provenance = {choice}")
    return []
