"""The reference is complete: its tables are compared with the code."""

import argparse
import inspect
import os
import re
import shlex
import textwrap
from dataclasses import MISSING, fields

import pytest
from helpers.pages import DOCS, PAGES, blocks, flat, read, table
from helpers.paths import TESTS
from helpers.warm import warm_python

import pytest_gpumem
from pytest_gpumem.breakdowns import CACHED
from pytest_gpumem.cli import main
from pytest_gpumem.devices.cards import card_names
from pytest_gpumem.judge.verdict import Kind
from pytest_gpumem.measurement import CATEGORIES
from pytest_gpumem.plugin import hookspecs
from pytest_gpumem.report.json_report import schema
from pytest_gpumem.session.settings import FIRST_OPTIONS, OPTIONS
from pytest_gpumem.spec import MemorySpec
from pytest_gpumem.testrun.fixture import GpuMemory

EVERYWHERE = ("README.md", "CONTRIBUTING.md", "examples/README.md", *PAGES)


def public(owner):
    return {name for name in vars(owner) if not name.startswith("_")}


# The marker


def test_the_table_of_the_marker_has_every_field():
    declared = [field.name for field in fields(MemorySpec) if field.name != "variant"]
    assert [row[0] for row in table("reference/marker.md")] == declared


def test_the_table_of_the_marker_has_the_defaults():
    rows = table("reference/marker.md")
    shown = {name: text for name, text, *_ in rows if text != "0.1% or more"}
    defaults = {
        field.name: None if field.default is MISSING else field.default
        for field in fields(MemorySpec)
    }
    assert shown == {
        name: {None: "none"}.get(defaults[name], str(defaults[name])) for name in shown
    }


def test_what_does_not_fit_is_reported_as_the_page_shows(same_torch, suite):
    source = """
        @pytest.mark.gpu_memory(max_gib=2, batch_size=64)
        def test_too_large():
            with torch.device("cuda"):  # which has no values to draw
                model = torch.nn.Sequential(*(torch.nn.Linear(8000, 8000) for _ in range(8)))
            model(torch.randn(64, 8000, device="cuda")).sum().backward()
    """
    session = suite.run(source=source)
    assert session.ret == 1
    (shown,) = blocks("reference/marker.md", "text")
    assert flat(shown) in session.flat


# The fixture, verdicts, categories, cards


def test_the_tables_of_the_fixture_have_everything_public():
    attributes, methods = table("reference/fixture.md"), table("reference/fixture.md", 1)
    names = {name for row in attributes for name in re.findall(r"\w+", row[0])}
    names |= {row[0].partition("(")[0] for row in methods}
    assert names == public(GpuMemory)


def test_the_table_of_categories_is_complete():
    assert [row[0] for row in table("reference/breakdown.md")] == [*CATEGORIES, CACHED]


def rewrite_or_compare(path, made):
    """GPUMEM_REWRITE_GOLD=1 writes a page, or a table of it, anew."""
    if os.environ.get("GPUMEM_REWRITE_GOLD") == "1":
        path.write_text(made, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == made


def test_the_list_of_cards_is_made_of_the_table_of_cards():
    names = textwrap.fill(f"{', '.join(card_names())}.", 112, break_on_hyphens=False)
    path = DOCS / "reference/cards.md"
    page = path.read_text(encoding="utf-8")
    made = re.sub(r"(?<=SMs:\n\n).*?\.\n", f"{names}\n", page, flags=re.DOTALL)
    made, counts = re.subn(r"any of \d+ cards", f"any of {len(card_names())} cards", made)
    assert counts == 1
    rewrite_or_compare(path, made)


def test_the_table_of_verdicts_is_made_of_the_kinds():
    source = textwrap.dedent(inspect.getsource(Kind))
    told = re.findall(r'^    (\w+) = \(.*\n    """((?:.|\n)+?)"""$', source, re.MULTILINE)
    texts = {Kind[name]: " ".join(text.replace("``", "`").split()) for name, text in told}
    lines = ["| verdict | when | the test |", "| --- | --- | --- |"]
    for kind in sorted(Kind, key=lambda kind: kind.severity):
        when, _, outcome = texts[kind].partition(": ")
        assert outcome
        lines.append(f"| {kind} | {when} | {outcome} |")
    path = DOCS / "reference/verdicts.md"
    page = path.read_text(encoding="utf-8")
    (shown,) = re.findall(r"^\| verdict \|(?:.*\n)+?(?=\n)", page, re.MULTILINE)
    rewrite_or_compare(path, page.replace(shown, "\n".join([*lines, ""])))


# Options and commands


def table_of(options):
    """The page's table of some options, made of the table of settings."""
    lines = ["| option | default | meaning |", "| --- | --- | --- |"]
    for option in options:
        default = f"`{option.default}`" if option.default != "" else ""
        text = f"{option.text}: {option.page}" if option.page else option.text
        lines.append(" ".join(f"| `{option.flag}` | {default} | {text} |".split()))
    return "\n".join(lines)


def test_the_tables_of_options_are_made_of_the_table_of_settings():
    path = DOCS / "reference/options.md"
    page = path.read_text(encoding="utf-8")
    first, others = re.findall(r"^\| option \|(?:.*\n)+?(?=\n)", page, re.MULTILINE)
    made = page.replace(first, f"{table_of(OPTIONS[:FIRST_OPTIONS])}\n")
    made = made.replace(others, f"{table_of(OPTIONS[FIRST_OPTIONS:])}\n")
    rewrite_or_compare(path, made)


def test_help_begins_with_what_a_newcomer_needs(suite):
    shown = suite.run("--help").out
    first, others = (
        re.findall(r"^ +(--gpumem-[a-z-]+)", part, re.MULTILINE)
        for part in shown.partition("first options:")[2].split("all other options:")
    )
    assert [*first, *others] == [option.flag for option in OPTIONS]
    assert len(first) == FIRST_OPTIONS


def test_options_with_choices_name_them_all():
    for option in OPTIONS:
        assert [choice for choice in option.choices if f"`{choice}" not in option.text] == []


@pytest.mark.parametrize("page", EVERYWHERE)
def test_every_option_that_a_page_names_exists(page):
    flags = {option.flag for option in OPTIONS}
    assert set(re.findall(r"--gpumem-[a-z-]+[a-z]", read(page))) <= flags
    inis = {option.ini for option in OPTIONS}
    assert set(re.findall(r"^(gpumem_\w+) =", read(page), re.MULTILINE)) <= inis


def test_the_table_of_commands_is_complete():
    rows = table("reference/commands.md")
    assert {row[0].removeprefix("gpumem ") for row in rows} == set(main.COMMANDS)


@pytest.mark.parametrize("page", EVERYWHERE)
def test_every_gpumem_command_that_a_page_shows_can_be_typed(page):
    for line in re.findall(r"^\$ (?:\w+=\S+ )?gpumem ([^|>\n]+)", read(page), re.MULTILINE):
        name, *arguments = shlex.split(line)
        parser = argparse.ArgumentParser()
        main.subcommand(name).add_arguments(parser)
        assert parser.parse_args(arguments)


# The JSON report


@pytest.mark.parametrize(
    ("record", "number"),
    [("Document", 0), ("Origin", 1), ("Result", 2), ("Verdict", 3), ("Measurement", 4)],
)
def test_the_page_of_the_json_report_has_every_field(record, number):
    rows = table("reference/json-report.md", number)
    shown = {name for row in rows for name in re.findall(r"\w+", row[0])}
    assert shown == set(schema()["$defs"][record]["properties"])


def test_the_page_of_the_json_report_has_every_kind_of_verdict():
    (kinds,) = (row[1] for row in table("reference/json-report.md", 3) if row[0] == "kind")
    assert set(kinds.split(", ")) == {kind.value for kind in Kind}


def test_a_report_is_read_as_the_page_shows(virtual_gpu, suite):
    source = """
        @pytest.mark.gpu_memory
        def test_it():
            mib(1)
    """
    assert suite.run("--gpumem-json=gpumem.json", source=source).ret == 0
    output = suite.python(blocks("reference/json-report.md", "python")[0], python=warm_python()).out
    assert output.strip() == "test_it.py::test_it no baseline 1048576"


# Hooks and the Python API


def test_the_hooks_are_those_that_there_are():
    (block,) = blocks("reference/hooks.md", "python")
    shown = dict(re.findall(r"^def (\w+)\((.*)\):", block, re.MULTILINE))
    specified = {
        name: ", ".join(hook.__code__.co_varnames[: hook.__code__.co_argcount])
        for name, hook in vars(hookspecs).items()
        if name.startswith("pytest_gpumem_")
    }
    assert shown == specified


def test_the_hooks_are_called(virtual_gpu, suite):
    suite.write("conftest.py", blocks("reference/hooks.md", "python")[0])
    source = """
        @pytest.mark.gpu_memory
        def test_it():
            mib(1)
    """
    session = suite.run("-s", source=source)
    assert session.ret == 0
    assert re.search(r"test_it.py::test_it no baseline 1048576\b", session.out)


def test_the_python_api_has_a_directive_for_every_public_name():
    page = read("reference/api.md")
    named = re.findall(r"^\.\. auto\w+:: pytest_gpumem\.(\w+)", page, re.MULTILINE)
    assert sorted(named) == sorted(set(pytest_gpumem.__all__) - {"__version__"})


def test_every_page_with_a_program_is_named_by_a_test():
    tests = "".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    assert [it for it in PAGES if blocks(it, "python") and f'"{it}"' not in tests] == []
