"""The documents for contributors name files and rooms that there are."""

import importlib
import re
import subprocess
import sys

import pytest
from helpers.pages import read, table
from helpers.paths import ROOT, TESTS

import pytest_gpumem

PAGE = "architecture.md"
PACKAGE = ROOT / "pytest_gpumem"
TEMPLATES = ROOT / ".github/ISSUE_TEMPLATE"
ROOMS = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


def test_the_table_of_rooms_is_complete():
    assert {row[0] for row in table(PAGE)} == ROOMS


def test_the_drawing_has_every_room():
    drawing = read(PAGE).split("```")[1]
    assert {room for room in ROOMS if re.search(rf"  {room}\b", drawing)} == ROOMS


def test_the_files_to_begin_with_are_there():
    for room, _, files in table(PAGE):
        for name in re.findall(r"\w[\w/]*\.py", files):
            assert (PACKAGE / room / name).is_file(), (room, name)


def test_the_table_of_base_modules_is_complete():
    named = {name for row in table(PAGE, 1) for name in re.findall(r"\w+", row[0])}
    assert named == {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}


def test_the_way_of_a_test_names_functions():
    way = read(PAGE).partition("## One test's way")[2].split("```text\n")[1].partition("```")[0]
    rows = [re.fullmatch(r" *([\w/]+\.py) (\w+)( .*)?", row) for row in way.splitlines()]
    assert len(rows) > 20
    for path, name, _ in (row.groups() for row in rows):
        source = (PACKAGE / path).read_text(encoding="utf-8")
        assert len(re.findall(rf"^ *(?:def|class) {name}\b", source, re.MULTILINE)) == 1, path


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", PAGE])
def test_the_paths_of_a_page_are_there(page):
    named = re.findall(r"`((?:pytest_gpumem|tests|docs|benchmarks|release)/[\w./-]*)`", read(page))
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_files_that_the_tests_page_names_are_there():
    page = (ROOT / "tests/README.md").read_text(encoding="utf-8")
    named = re.findall(r"`(\w+/[\w/]+\.py)`", page)
    assert len(named) >= 4
    missing = [it for it in named if not any((top / it).exists() for top in (PACKAGE, TESTS))]
    assert missing == []


def test_the_commands_of_contributing_name_files_that_are_there():
    commands = re.findall(r"^\$ (.*)$", read("CONTRIBUTING.md"), re.MULTILINE)
    named = re.findall(r"(?:bash|pytest) ((?:tests|examples|\.ci)/[\w./]*)", "\n".join(commands))
    assert len(named) >= 4
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_table_of_benchmarks_has_every_result_and_every_command_is_there(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    page = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.count("|") == 5][2:]
    modules = [
        ROOT / "benchmarks" / re.match(r" `([\w.]+)", row[1])[1].replace(".", "/") for row in rows
    ]
    missing = [
        path
        for path in modules
        if not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file()
    ]
    assert missing == []
    families = set(re.findall(r"`published (\w+)`", page))
    assert families == set(importlib.import_module("benchmarks.published.__main__").FAMILIES)
    named = set(re.findall(r"`([\w.-]+\.(?:txt|json|md))`", page))
    results = {path.name for path in (ROOT / "benchmarks/results").iterdir() if path.is_file()}
    assert named == results


def test_python_m_benchmarks_lists_each_with_its_question():
    command = [sys.executable, "-m", "benchmarks", "segmentation", "L40S"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == (
        "How close is the virtual GPU to segmentation networks measured on an L40S?\n"
        "    python -m benchmarks.published smp\n"
        "    writes published_smp.txt; takes minutes\n"
    )


def test_the_issue_templates_ask_for_the_versions():
    yaml = pytest.importorskip("yaml")
    forms = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in TEMPLATES.glob("*.yml")}
    links = forms.pop("config")["contact_links"]
    assert all(link["url"].startswith("https://") for link in links)
    for form in forms.values():
        assert {"name", "description", "body"} <= form.keys()
        assert all(field["type"] == "textarea" for field in form["body"])
    for name in ("bug", "wrong-figure"):
        fields = {field["attributes"]["label"]: field for field in forms[name]["body"]}
        assert fields["gpumem version"]["validations"] == {"required": True}


def test_the_citation_is_of_this_version():
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["version"] == pytest_gpumem.__version__
    headings = re.findall(r"^## (.+)$", read("CHANGELOG.md"), re.MULTILINE)
    if "archive/main.tar.gz" in read("README.md"):  # release/prepare.py takes this away
        assert headings == ["Unreleased"]
    else:
        released = [heading for heading in headings if heading != "Unreleased"]
        assert released[0] == f"{citation['version']} - {citation['date-released']}"
