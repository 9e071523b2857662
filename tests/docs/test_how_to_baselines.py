"""The guides on reviewing baselines and on services that track figures: their commands run."""

import json
import re
import shlex
import subprocess

import pytest
from helpers.command_line import write
from helpers.git import commit, git
from helpers.pages import blocks

REVIEW = "how-to/reviewing-a-baseline.md"
TRACK = "how-to/track-benchmarks.md"
STEP = "@pytest.mark.gpu_memory\ndef test_step(): mib(100)"


def commands(page):
    """The arguments of each command that a page shows at a prompt, in their order."""
    text = "".join(blocks(page, "console"))
    return [shlex.split(line) for line in re.findall(r"^\$ (.*)$", text, re.MULTILINE)]


@pytest.fixture
def grown(here):
    """A repository whose last commit has a grown baseline of the page's test."""
    git("init", "-q", "-b", "main")
    for size in (100, 150):
        sizes = {"test_resnet50_step": (size, 200)}
        write(here / "baselines", sizes, module="test_training.py")
        commit(f"a step of {size} MiB")
    git("checkout", "-qb", "topic")
    write(here / "baselines", {"test_resnet50_step": (180, 200)}, module="test_training.py")
    return here


def test_the_commands_of_a_review_say_what_the_page_says(grown, gpumem):
    ours = [words[1:] for words in commands(REVIEW) if words[0] == "gpumem"]
    outputs = []
    for arguments in ours:
        status, out, err = gpumem(*arguments)
        assert (status, err) == (0, ""), arguments
        outputs.append(out)
    compared, listed, course = outputs
    assert compared.startswith("gpumem: main -> baselines: 1 grew")
    assert "150.00" in compared
    assert listed.index("not committed") < listed.index("a step of 150 MiB")
    assert course.index("180.00") < course.index("150.00") < course.index("100.00")
    (question,) = [words[1:] for words in commands(REVIEW) if words[0] == "jq"]
    allocated = subprocess.run(["jq", *question], check=True, capture_output=True, text=True).stdout
    assert json.loads(allocated) == {"test_resnet50_step": [180 << 20]}
    assert gpumem("compare", "main", "--fail-on-growth", "2%")[0] == 1
    assert gpumem("compare", "main", "--format=markdown")[1].count("test_resnet50_step") == 1


def test_a_run_is_compared_with_baselines_of_the_device_that_the_page_names(suite):
    (command,) = [words[1:] for words in commands(REVIEW) if words[0] == "pytest"]
    assert suite.run("--gpumem-card=L4", "--gpumem-update-baselines", source=STEP).ret == 0
    assert command[0] == "--gpumem-device=cuda"
    session = suite.run("--gpumem-device=virtual", "--gpumem-card=T4", *command[1:])
    assert session.ret == 0
    assert "virtual-L4" in session.flat


def test_services_get_their_files_by_the_commands_of_the_page(suite):
    (workflow,) = blocks(TRACK, "yaml")
    suite.write("test_it.py", STEP)
    suite.write("figures.jq", *blocks(TRACK, "text"))
    sessions = re.findall(r"run: (.*)", workflow)
    by_hand = re.findall(r"^\$ (.*)$", *blocks(TRACK, "console"), re.MULTILINE)
    send = by_hand.pop().split()
    output = re.search(r"output-file-path: (.*)", workflow)[1]
    assert "tool: customSmallerIsBetter" in workflow
    assert send[-1] == output
    made = []
    for session, command in (sessions, by_hand):
        assert suite.run(*session.split()[1:]).ret == 0
        subprocess.run(command, cwd=suite.path, shell=True, check=True)
        made.append(json.loads((suite.path / output).read_text()))
    (row,) = made[0]
    assert row == {"name": "test_it.py::test_step  device 0", "unit": "bytes", "value": 100 << 20}
    assert made[1] == {row["name"]: {"peak-allocated": {"value": 100 << 20}}}
