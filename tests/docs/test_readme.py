"""The README is true: its programs run, its outputs are theirs, its tables are complete."""

import re
from dataclasses import MISSING, fields

import pytest
from helpers.paths import ROOT

from pytest_gpumem.devices.cards import card_names
from pytest_gpumem.judge.breakdown_diff import CACHED
from pytest_gpumem.judge.verdict import Kind
from pytest_gpumem.measurement import CATEGORIES
from pytest_gpumem.plugin.settings import OPTIONS
from pytest_gpumem.spec import MemorySpec

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


FIRST, PARTS, FITS, PROGRAM, HOOKS = blocks("python")
HEAD, REGRESSED, NO_ROOM, LARGEST, ADVICE, CARDS = blocks("text")
(DIFF,) = blocks("diff")


def section(title):
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def table(title):
    """The cells of a section's table, a row a list, without code marks."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")][2:]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


def flat(text):
    return " ".join(text.split())


def passes_and_says(session, text):
    """A session passes, and its output has all lines of a text."""
    assert session.ret == 0
    for line in text.splitlines():
        assert line in session.out


@pytest.fixture(scope="session")
def imported(virtual_gpu):
    """Imported before pytester takes note of the modules there are: it would import them twice."""
    __import__("torch._dynamo")
    pytest.importorskip("torchvision")


@pytest.fixture(scope="session")
def same_torch(imported, virtual_gpu):
    """Figures belong to a version of torch, which the README names."""
    if not virtual_gpu.__version__.startswith("2.15.0"):
        pytest.skip(f"the README's figures are torch 2.15.0's, this is {virtual_gpu.__version__}")


def test_the_first_test_prints_what_the_readme_shows(same_torch, suite):
    suite.write("test_training.py", FIRST)
    session = suite.run("--gpumem-card=T4")
    passes_and_says(session, HEAD)


def test_its_regression_and_its_diff_are_what_the_readme_shows(same_torch, suite):
    suite.write("test_training.py", FIRST)
    assert suite.run("--gpumem-card=T4", "--gpumem-update-baselines").ret == 0
    lines = {mark: [it[1:] for it in DIFF.splitlines() if it[0] in f" {mark}"] for mark in "+-"}
    (before,) = suite.baselines().values()
    assert "\n".join(lines["-"]) in before
    grown = FIRST.replace("loss.backward()", "loss.backward(retain_graph=True)")
    suite.write("test_training.py", grown)
    session = suite.run("--gpumem-card=T4")
    assert session.ret == 1
    assert flat(REGRESSED) in session.flat
    assert suite.run("--gpumem-card=T4", "--gpumem-update-baselines").ret == 0
    (after,) = suite.baselines().values()
    assert "\n".join(lines["+"]) in after


def test_what_does_not_fit_is_said_as_the_readme_shows(same_torch, suite):
    source = """
        @pytest.mark.gpu_memory(max_gib=2, batch_size=64)
        def test_too_large():
            model = torch.nn.Sequential(*(torch.nn.Linear(8000, 8000) for _ in range(8))).cuda()
            model(torch.randn(64, 8000, device="cuda")).sum().backward()
    """
    session = suite.run(source=source)
    assert session.ret == 1
    assert flat(NO_ROOM) in session.flat


def test_what_fits_is_said_as_the_readme_shows(same_torch, suite):
    suite.write("test_fits.py", FITS)
    session = suite.run("-s")
    passes_and_says(session, LARGEST)


def test_advice_is_given_as_the_readme_shows(suite):
    source = """
        @pytest.mark.gpu_memory(max_gib=1, batch_size=128)
        def test_too_large(gpu_memory):
            tensors = [mib(100), mib(10 * gpu_memory.batch_size)]
            assert tensors
    """
    assert flat(ADVICE) in suite.run(source=source).flat


def test_the_matrix_of_cards_is_what_the_readme_shows(suite):
    source = """
        @pytest.mark.gpu_memory(card=["T4", "L4", "A100-80GB"])
        @pytest.mark.parametrize("gib", [8, 18])
        def test_it(gib):
            mib(gib * 1024)
    """
    out = suite.run(source=source).out
    assert CARDS in "\n".join(line.rstrip() for line in out.splitlines())


def test_the_parts_example_passes(imported, suite):
    suite.write("test_parts.py", PARTS)
    session = suite.run("-v", "--gpumem-card=T4")
    assert session.ret == 0
    assert "(forward)" in session.out
    assert "(backward)" in session.out


def test_the_program_prints_what_its_comment_says(same_torch, suite):
    said = re.search(r"# (\d+ \d+)$", PROGRAM, re.MULTILINE).group(1)
    done = suite.python(PROGRAM)
    assert done.ret == 0, done.err
    assert done.out.strip() == said


def test_the_hooks_are_called(imported, suite):
    suite.write("conftest.py", HOOKS)
    source = """
        @pytest.mark.gpu_memory
        def test_it():
            mib(1)
    """
    session = suite.run("-s", source=source)
    assert session.ret == 0
    assert re.search(r"test_it.py::test_it no baseline 1048576\b", session.out)


def test_the_marker_table_has_every_field():
    declared = [field.name for field in fields(MemorySpec) if field.name != "variant"]
    assert [row[0] for row in table("The marker")] == declared


def test_the_marker_table_has_the_defaults():
    plain = {name: text for name, text, *_ in table("The marker") if text != "0.1% or more"}
    expected = {
        field.name: None if field.default is MISSING else field.default
        for field in fields(MemorySpec)
    }
    assert plain == {
        name: {None: "none"}.get(expected[name], str(expected[name])) for name in plain
    }


def test_the_options_table_is_what_there_is():
    rows = [row[:3] for row in table("Options")]
    assert rows == [[option.flag, option.ini, str(option.default)] for option in OPTIONS]


def test_the_table_of_categories_is_complete():
    assert [row[0] for row in table("Why it grew")] == [*CATEGORIES, CACHED]


def test_the_verdict_table_has_every_verdict():
    assert {row[0] for row in table("Verdicts")} == set(map(str, Kind))


def test_the_cards_are_those_that_there_are():
    listed = re.search(r"^Cards: (.*?)\. `gpumem cards`", README, re.MULTILINE | re.DOTALL)
    names = flat(listed.group(1)).split(", ")
    assert names == list(card_names())
    assert f"any of {len(names)} cards" in README


def test_what_it_points_to_exists():
    targets = re.findall(r"\]\(((?!http)[^)#]+)\)", README)
    targets += re.findall(r"^\$ bash (\S+)$", README, re.MULTILINE)
    assert targets
    assert [it for it in targets if not (ROOT / it).exists()] == []
