"""The how-to guides for developers are true: their programs run, and print what the pages show."""

from __future__ import annotations

import os
import re

import pytest
from helpers.git import commit, git
from helpers.pages import Place, blocks, changed, files, flat, read
from helpers.paths import ROOT

yaml = pytest.importorskip("yaml")

HAND = "how-to/from-max-memory-allocated.md"
FAILURE = "how-to/reading-a-failure.md"
LIGHTNING = "how-to/from-lightning.md"
BUMPS = "how-to/toolchain-bumps.md"
USES_LIBRARY = """
import library
import pytest
import torch

@pytest.mark.gpu_memory
def test_step():
    kept = library.step(lambda size: torch.empty(size, dtype=torch.uint8, device="cuda"))
    assert kept.nbytes
"""

STAND_IN = """
import torch
class LightningModule(torch.nn.Module): pass
"""


@pytest.fixture
def place(tmp_path, virtual_gpu):
    return Place(tmp_path / "project")


# From max_memory_allocated


@pytest.fixture
def hand(place):
    for name, text in files(HAND).items():
        place.write(name, text)
    return place


def test_the_check_by_hand_is_skipped_without_a_gpu_and_the_others_run(hand):
    done = hand.sh("pytest -rs", CUDA_VISIBLE_DEVICES="")
    assert done.ret == 0, done.out
    assert re.search(r"^SKIPPED .*test_before.py:\d+: needs a GPU$", done.out, re.MULTILINE)
    assert "2 passed, 1 skipped" in done.out


def test_the_marker_refuses_more_than_its_limit(suite):
    text = files(HAND)["test_after.py"]
    assert text.count("8192, 8192") == 1
    suite.write("test_after.py", text.replace("8192, 8192", "8192, 16384"))
    session = suite.run()
    assert session.ret == 1
    assert "over budget: peak allocated" in session.out


LEAVING = """
import pytest
import torch

KEPT = []

{marker}
def test_leaving():
    KEPT.append(torch.empty(2**30, dtype=torch.uint8, device="cuda"))
"""


def test_the_check_by_hand_counts_what_earlier_tests_left(hand):
    hand.write("test_a.py", LEAVING.format(marker=""))
    by_hand = "gpumem run -m pytest -p no:gpumem"  # all that is in it sees a GPU
    assert "1 passed" in hand.sh(f"{by_hand} test_before.py").out
    done = hand.sh(f"{by_hand} test_a.py test_before.py")
    assert "1 failed, 1 passed" in done.out
    assert re.search(r"AssertionError: assert \d{10} <", done.out)


def test_the_marker_does_not(suite):
    suite.write("test_a.py", LEAVING.format(marker="@pytest.mark.gpu_memory"))
    suite.write("test_after.py", files(HAND)["test_after.py"])
    session = suite.run("-v")
    assert session.ret == 0
    alone = suite.run("-v", "test_after.py").figures()["test_step_memory"]
    assert session.figures()["test_after.py::test_step_memory"] == alone


def test_what_the_table_offers_there_is(suite):
    text = read(HAND)
    offered = [line.split("|")[2] for line in text.splitlines() if line.startswith("| ")]
    fields = [it for cell in offered for it in re.findall(r"`(\w+=[^`(]+)`", cell)]
    assert len(fields) == 5
    (part,) = [it for cell in offered for it in re.findall(r"`(with [^`]+:)`", cell)]
    tests = [
        f"@pytest.mark.gpu_memory({field})\ndef test_{number}(gpu_memory):\n"
        f"    {part}\n        mib(1)\n    assert forward.peak_allocated == 2**20\n"
        for number, field in enumerate(fields)
    ]
    session = suite.run(source="\n".join(tests))
    assert session.outcomes == {"passed": len(fields)}


# From Lightning's finder


@pytest.fixture
def finder(place):
    for name, text in files(LIGHTNING).items():
        place.write(name, text)
    try:
        import lightning  # noqa: F401
    except ImportError:
        place.write("lightning.py", STAND_IN)
    return place


def test_the_largest_batch_is_what_the_page_shows(same_torch, finder):
    done = finder.sh("pytest -s --gpumem-device=virtual")
    assert done.ret == 0, done.out
    (shown,) = blocks(LIGHTNING, "text")
    assert shown in done.out


def test_the_largest_batch_of_several_cards_is_searched_as_the_page_says(same_torch, finder):
    (command,) = blocks(LIGHTNING, "console")
    done = finder.sh(command.removeprefix("$ "))
    assert done.ret == 0, done.out
    assert [blocks(LIGHTNING, "text")[0] in done.out, "in 21.77 GiB" in done.out] == [True, True]


def test_lightnings_finder_runs_as_shown(finder):
    pytest.importorskip("lightning", reason="the page's other half")
    done = finder.sh("gpumem run --card T4 find_batch_size.py")
    assert done.ret == 0, done.err
    assert "256" in done.out.splitlines()


# Update torch, CUDA or the driver


def test_git_finds_the_commit_that_brought_a_growth_as_the_page_says(place):
    library = place.folder.parent / "transformers"
    library.mkdir()
    place.write("test_llama.py", USES_LIBRARY)
    made = ["git init -q", "git config user.name a", "git config user.email a@b"]
    sources = {"v4.37.2": 99, "as before": 100, "broken": 0, "grown": 160, "v4.38.0": 161}
    for name, mib in sources.items():
        source = f"mib = 1 << 20 if {mib} else none\\ndef step(make): return make({mib} * mib)\\n"
        made += [f"printf '{source}' > library.py", "git add .", f"git commit -qm '{name}'"]
        made += [f"git tag {name}"] if name[0] == "v" else []
    assert place.sh(f"cd {library}; {'; '.join(made)}").ret == 0
    (commands,) = [block for block in blocks(BUMPS, "console") if "bisect start" in block]
    found = place.sh(
        commands.replace("$ git", "git").replace("$ pytest", "pytest"),
        PYTHONPATH=f"{ROOT}{os.pathsep}{library}",
        PYTHONDONTWRITEBYTECODE="1",
    )
    assert "peak allocated grew by 60.00 MiB" in flat(found.out), found
    log = place.sh("git -C ../transformers bisect log").out
    states = dict(re.findall(r"^# (\w+): \[\w+\] (.+)$", log, re.MULTILINE))
    assert states == {"good": "as before", "skip": "broken", "bad": "grown"}


# Reading a failure


@pytest.fixture
def training(suite, monkeypatch):
    """The page's program, whose baseline is recorded."""
    monkeypatch.setenv("COLUMNS", "80")
    suite.write("test_training.py", files(FAILURE)["test_training.py"])
    assert suite.run("--gpumem-update-baselines").ret == 0
    return suite


@pytest.fixture
def grown():
    """The page's program after the page's change."""
    (diff,) = blocks(FAILURE, "diff")
    return changed(files(FAILURE)["test_training.py"], diff)


def test_a_regression_prints_what_the_page_shows(same_torch, training, grown):
    training.write("test_training.py", grown)
    shown = [it for it in blocks(FAILURE, "text") if "524288" not in it]
    assert len(shown) == 6
    for options, texts in (((), shown[:3]), (("-v",), shown[3:])):
        session = training.run_warm(*options)  # which reads the changed lines anew
        assert session.ret == 1
        places = [session.out.find(it) for it in texts]
        assert -1 not in places
        assert places == sorted(places)


def test_the_edit_is_blamed_as_the_page_shows(same_torch, place, grown, monkeypatch):
    monkeypatch.chdir(place.folder)
    (console,) = (it for it in blocks(FAILURE, "console") if "gpumem blame" in it)
    place.write("test_training.py", files(FAILURE)["test_training.py"])
    git("init", "-q")
    commit("A loop")
    place.write("test_training.py", grown)
    command, _, output = console.partition("\n")
    done = place.sh(command.removeprefix("$ "))
    assert done.out.strip().endswith(output.strip())


def test_the_mend_that_the_page_names_brings_the_baseline_back(training, grown):
    kept = "        losses.append((model(batch) - batch).square().mean())\n"
    assert kept in grown
    mended = grown.replace(kept, f"        with torch.no_grad():\n    {kept}")
    training.write("test_training.py", mended)
    session = training.run("-v")
    assert session.ret == 0
    assert session.verdicts() == {"test_training": "ok"}


def test_a_step_that_does_not_fit_prints_what_the_page_shows(same_torch, training):
    text = files(FAILURE)["test_training.py"].replace("batch_size=4096", "batch_size=524288")
    training.write("test_training.py", text)
    session = training.run()
    assert session.ret == 1
    shown = [it for it in blocks(FAILURE, "text") if "524288" in it]
    assert len(shown) == 2
    assert [it for it in shown if it not in session.out] == []


# Without NVIDIA's packages

STEP = """
import pytest
import torch


@pytest.mark.gpu_memory(card="T4")
def test_step():
    torch.ones(1 << 20, device="cuda")
"""


def test_the_job_for_gitlab_installs_what_gpumem_light_prints(place):
    place.have_light_print("torch==2.15.0")
    place.write("test_step.py", STEP)
    recorded = place.sh("pytest --gpumem-device=virtual --gpumem-update-baselines")
    assert recorded.ret == 0, recorded.out
    (job,) = (
        yaml.safe_load(it)["gpu-memory"]
        for it in blocks("how-to/light.md", "yaml")
        if it.startswith("gpu-memory:")
    )
    outputs = [place.sh(command) for command in job["script"]]
    assert [it.ret for it in outputs] == [0] * 4, outputs
    assert "1 ok" in outputs[-1].out
    assert place.asked.read_text().splitlines() == [
        "install --no-deps pytest-gpumem",
        "gpumem light --cudnn -r requirements.txt",
        "install --no-deps --no-compile -r light.txt",
    ]
    assert (place.folder / "light.txt").read_text() == "torch==2.15.0\n"


def test_the_step_for_github_has_inputs_that_the_action_knows():
    (step,) = (
        yaml.safe_load(it)[0]
        for it in blocks("how-to/light.md", "yaml")
        if it.startswith("- uses:")
    )
    inputs = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))["inputs"]
    assert set(step["with"]) <= set(inputs)
    assert step["with"]["light"] == "cudnn"


def test_the_containerfile_of_the_examples_copies_what_is_there():
    containerfile = (ROOT / "examples/Containerfile").read_text(encoding="utf-8")
    copied = re.search(r"^COPY (.+) \./$", containerfile, re.MULTILINE)[1].split()
    assert all((ROOT / name).is_file() for name in copied)
