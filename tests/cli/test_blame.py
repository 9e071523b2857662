"""``gpumem blame``: the edits without which a test takes less."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.git import commit, git
from helpers.judged import NOW
from helpers.warm import warm_python

from pytest_gpumem.baselines.paths import Key
from pytest_gpumem.cli.bisect.bisect import VersionFigures
from pytest_gpumem.cli.bisect.blame import EditSearch, Replacement, grouped, undone
from pytest_gpumem.cli.bisect.trials import SkippedError
from pytest_gpumem.cli.main import main
from pytest_gpumem.measurement import BaselineEntry, Peak
from pytest_gpumem.sizes import MIB

KEY = Key("virtual-H100", "test_it.py", "test_step")
EDITS = [(Replacement(Path("/p/m.py"), line, ("new\n",), ("old\n",)),) for line in range(8)]


def searched(takes, edits=EDITS, broken=()):
    """The outcome of a search, and the lines of the edits that each run was without.

    ``takes`` returns MiB, None out of memory, with the lines of the edits that are there; runs
    without edits of ``broken`` alone do not run.
    """
    runs = []

    def figures_without(groups):
        without = {edit.first for (edit,) in groups}
        runs.append(sorted(without))
        if without in broken:
            raise SkippedError("E")
        mib = takes({edit.first for (edit,) in edits} - without)
        if mib is None:
            return VersionFigures({}, frozenset({KEY}))
        peak = Peak(mib * MIB, mib * MIB)
        return VersionFigures({KEY: BaselineEntry((peak,), NOW)}, frozenset())

    return EditSearch(figures_without, "main").answer(edits), runs


def told(outcome):
    """The amount of each edit that is told, by its line."""
    blocks = [block.splitlines()[0] for block in outcome.text.split("\n\n")[1:]]
    return {int(block.rpartition(":")[2]) - 1: block.partition(" by ")[0] for block in blocks}


def test_one_edit_of_many_is_found_in_few_runs():
    outcome, runs = searched(lambda there: 100 + 50 * (5 in there))
    assert told(outcome) == {5: "+50.00 MiB"}
    assert outcome.status == 0
    assert "grew since main: 100.00 MiB -> 150.00 MiB" in outcome.text
    assert len(runs) <= 8, runs


def test_several_edits_are_told_with_their_bytes_the_most_first():
    outcome, _ = searched(lambda there: 100 + 20 * (1 in there) + 60 * (6 in there))
    assert list(told(outcome).items()) == [(6, "+60.00 MiB"), (1, "+20.00 MiB")]


def test_an_edit_of_less_than_an_eighth_is_not_told():
    outcome, _ = searched(lambda there: 100 + 5 * (1 in there) + 60 * (6 in there))
    assert told(outcome) == {6: "+60.00 MiB"}


def test_edits_that_one_alone_undoes_nothing_of_are_told_together():
    outcome, _ = searched(lambda there: 100 + 50 * bool(there & {2, 3}))
    assert "by " + "\nand ".join(str(edit) for (edit,) in EDITS[2:4]) in outcome.text


def test_a_run_that_fails_tells_nothing_of_its_edits():
    outcome, _ = searched(lambda there: 100 + 50 * (3 in there), broken=[{3}])
    assert "by " + "\nand ".join(str(edit) for (edit,) in EDITS[2:4]) in outcome.text


def test_a_test_that_ran_out_of_memory_fits_without_the_edit():
    outcome, _ = searched(lambda there: None if 4 in there else 100)
    assert told(outcome) == {4: "all"}
    assert "100.00 MiB -> out of memory" in outcome.text


def test_edits_that_brought_nothing_are_no_cause():
    outcome, runs = searched(lambda _: 100)
    assert outcome.status == 1
    assert "without the 8 edits since main the tests take as much memory" in outcome.text
    assert len(runs) == 2


OLD = '''\
import torch
def f(x):
    """F."""
    # why
    return x + 1
def g(x):
    return x
'''


def test_comments_docstrings_and_formatting_are_no_edits():
    new = OLD.replace("# why", "# why not").replace("x + 1", "(x\n        + 1)")
    new = new.replace('"""F."""', '"""Adds one."""')
    assert not [*grouped(Path("m.py"), OLD, new)]


def test_each_edit_can_be_undone_alone():
    new = OLD.replace("x + 1", "x + 2").replace("return x\n", "y = x\n    return y\n")
    (first,), (second,) = grouped(Path("m.py"), OLD, new)
    assert undone(new, [first]) == new.replace("x + 2", "x + 1")
    assert undone(undone(new, [second]), [first]) == undone(new, [first, second]) == OLD
    assert str(first).splitlines()[1:] == ["  -    return x + 1", "  +    return x + 2"]


def test_edits_that_are_no_program_alone_are_undone_together():
    new = OLD.replace("def f(x):\n", "def f(x): return [\n").replace("return x + 1", "x]")
    ((opening, closing),) = grouped(Path("m.py"), OLD, new)
    assert (opening.new, closing.new) == (("def f(x): return [\n",), ("    x]\n",))


def test_sources_take_the_place_of_files_and_no_file_changes(suite):
    suite.write("lib.py", "SIZE = 2\n")
    suite.write("test_lib.py", "import inspect, lib\ndef test_it():\n    assert lib.SIZE == 2\n")
    suite.write("elsewhere/linked.py", "SIZE = 2\n")
    (suite.path / "linked.py").symlink_to("elsewhere/linked.py")
    text = "import inspect, lib, linked\ndef test_it():\n    assert lib.SIZE == linked.SIZE == 1\n"
    text += "    assert 'linked.SIZE == 1' in inspect.getsource(test_it)\n"
    text += "    assert inspect.getsource(linked) == 'SIZE = 1\\n'\n"
    sources = {"lib.py": "SIZE = 1\n", "elsewhere/linked.py": "SIZE = 1\n", "test_lib.py": text}
    given = {str(suite.path.resolve() / name): source for name, source in sources.items()}
    suite.write("sources.json", json.dumps(given))
    command = [sys.executable, "-m", "pytest_gpumem.cli.bisect.undone", "sources.json"]
    done = subprocess.run(
        [*command, "-q", "--assert=plain", "test_lib.py"], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert (suite.path / "lib.py").read_text() == "SIZE = 2\n"


MODEL = """\
import torch

DEPTH = 2

def layers(x):
    kept = [x]
    for _ in range(DEPTH):
        kept.append(kept[-1] + 1)
    return kept
"""
STEP = """
    from model import layers

    @pytest.mark.gpu_memory
    def test_step():
        layers(torch.zeros(32 << 18, device="cuda"))
"""


def test_the_edit_is_named_and_not_the_line_that_grew(suite, capsys):
    """The line that allocates the memory was edited as well."""
    suite.write("model.py", MODEL)
    suite.write("test_it.py", STEP)
    git("init", "-q")
    commit("A model")
    edited = MODEL.replace("kept[-1] + 1", "1 + kept[-1]").replace("DEPTH = 2", "DEPTH = 4")
    suite.write("model.py", edited)
    assert main(["blame", "HEAD", "test_it.py"]) == 0
    output, progress = capsys.readouterr()
    assert output == (
        "peak allocated of test_it.py::test_step grew since HEAD: 96.00 MiB -> 160.00 MiB\n"
        "\n"
        "+64.00 MiB by model.py:3\n"
        "  -DEPTH = 2\n"
        "  +DEPTH = 4\n"
    )
    assert "gpumem blame: 2 edits since HEAD\n" in progress
    assert "  without model.py:3: 96.00 MiB\n" in progress


@pytest.fixture
def warm(monkeypatch):
    """Sessions of the command are forks of the warm process."""
    monkeypatch.setattr(sys, "executable", warm_python())


@pytest.mark.parametrize(
    ("revision", "edit", "words"),
    [
        ("no-such", "assert True", "git says: "),
        ("HEAD", "return 1 +", "the tests do not run as they are, or without the 1 edit: "),
        ("HEAD", "assert True", "or without the 1 edit: no test was measured"),
    ],
)
@pytest.mark.usefixtures("warm")
def test_what_cannot_be_asked_is_told(suite, capsys, revision, edit, words):
    suite.write("test_it.py", "def test_it():\n    pass\n")
    git("init", "-q")
    commit("A test")
    suite.write("test_it.py", f"def test_it():\n    {edit}\n")
    assert main(["blame", revision, "test_it.py"]) == 2
    assert words in capsys.readouterr().err


def test_a_file_that_cannot_be_read_is_named(suite, capsys):
    (suite.path / "lib.py").write_bytes(b"a = 1\n")
    git("init", "-q")
    commit("A file")
    (suite.path / "lib.py").write_bytes(b"a = '\xff'\n")
    assert main(["blame", "HEAD", "test_it.py"]) == 1
    assert "lib.py cannot be read, so its edits stay: " in capsys.readouterr().err


def test_without_edits_nothing_runs(suite, capsys):
    suite.write("test_it.py", "def test_it():\n    pass\n")
    git("init", "-q")
    commit("A test")
    assert main(["blame", "HEAD", "test_it.py"]) == 1
    assert capsys.readouterr().out == "no Python file was edited since HEAD\n"
