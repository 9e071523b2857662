"""The README is a landing page, and true: its test runs, and says what is shown."""

import re
import sys

import pytest
from helpers.git import commit, git
from helpers.pages import DOCS, blocks, read, shows
from helpers.paths import ROOT
from PIL import Image

from pytest_gpumem.plugin import session_plugin

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

README = read("README.md")
REPOSITORY = "https://github.com/pytest-gpumem/pytest-gpumem"
FILES = "https://raw.githubusercontent.com/pytest-gpumem/pytest-gpumem/main/"
PAGES = "https://pytest-gpumem.readthedocs.io/en/latest/"
(TEST,) = blocks("README.md", "python")
MEASURED, OUT_OF_MEMORY = blocks("README.md", "text")
MEASURE, RECORD = (
    command.split() for command in re.findall(r"^\$ pytest (.*)$", README, re.MULTILINE)
)


@pytest.fixture
def step(same_torch, suite, monkeypatch):
    """The README's test, whose baseline is recorded by the README's command, and committed."""
    monkeypatch.setenv("COLUMNS", "80")
    suite.write("test_step.py", TEST)
    assert suite.run(*RECORD).ret == 0
    monkeypatch.chdir(suite.path)
    git("init", "-q")
    commit("a baseline")
    return suite


def test_the_first_page_of_the_documentation_has_the_same_test_and_what_it_prints(step):
    assert blocks("index.md", "python") == [TEST]
    step.write("test_step.py", TEST.replace("4096", "16384"))
    (report,) = blocks("index.md", "text")
    assert shows(step.run().out, report)


def test_its_first_command_measures_tests_without_a_marker(same_torch, suite, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    plain = re.sub(r"@pytest.mark.*\n", "", TEST).replace("(gpu_memory)", "()")
    suite.write("test_step.py", plain.replace("gpu_memory.batch_size", "32"))
    assert shows(suite.run(*MEASURE).out, MEASURED)


def test_its_test_is_compared_with_the_baseline_that_its_command_writes(step):
    session = step.run("-v")
    assert session.ret == 0
    assert session.verdicts() == {"test_step": "ok"}


def test_its_change_fails_by_the_line_that_grew(step):
    assert "16384" in README
    step.write("test_step.py", TEST.replace("4096", "16384"))
    session = step.run()
    assert session.ret == 1
    line = next(i for i, text in enumerate(TEST.splitlines(), 1) if "4096" in text)
    assert f"regressed: test_step.py:{line} changed: 4096 -> 16384; peak" in session.flat


@pytest.mark.parametrize(("picture", "columns"), [("failure", "80"), ("failure-160", "160")])
def test_its_picture_shows_what_its_commands_print(step, monkeypatch, picture, columns):
    """docs/images/make.py keeps the text of a picture in its file: draw it anew after a change."""
    monkeypatch.setenv("COLUMNS", columns)
    screen = session_plugin.screen_of
    monkeypatch.setattr(
        session_plugin, "screen_of", lambda config: screen(config)._replace(interactive=True)
    )
    step.write("test_step.py", TEST.replace("4096", "16384"))
    printed = [line.rstrip() for line in step.run().out.splitlines()]
    with Image.open(ROOT / f"docs/images/{picture}.png") as opened:
        drawn = [line.rstrip() for line in opened.text["Text"].splitlines()]
    head = next(line for line in drawn if line)
    start = printed.index(head) - drawn.index(head)
    assert printed[start : start + len(drawn)] == drawn


def test_what_does_not_fit_prints_what_is_shown(step):
    assert "`batch_size=1024`" in README
    step.write("test_step.py", TEST.replace("batch_size=32", "batch_size=1024"))
    session = step.run()
    assert session.ret == 1
    assert shows(session.out, OUT_OF_MEMORY)


def test_its_badges_say_what_pyproject_says():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lowest = dict(re.match(r"([\w-]+)>=([\d.]+)", it).groups() for it in project["dependencies"])
    expected = {
        "Python": f"{project['requires-python'].removeprefix('>=')} or newer",
        "torch": f"{lowest['torch']} or newer",
        "pytest": f"{lowest['pytest']} or newer",
        "licence": project["license"],
    }
    badges = re.findall(rf"!\[(\w+)\]\({FILES}(\S+/badge-\S+?)\)", README)
    texts = {
        name: re.search(r"<title>(.*)</title>", (ROOT / path).read_text(encoding="utf-8"))[1]
        for name, path in badges
    }
    assert texts == {name: f"{name}: {value}" for name, value in expected.items()}


def test_all_its_links_are_absolute():
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert links
    assert [link for link in links if not link.startswith("https://")] == []


def anchors(text):
    """The anchors of a page's headings, as Sphinx and GitHub make them."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def missing(link):
    """What an absolute link of the project names and does not exist; "" where all is there."""
    address, _, anchor = link.partition("#")
    if address.startswith(PAGES):
        page = DOCS / (address.removeprefix(PAGES) or "index.html")
        source = page.with_suffix(".md")
        if not source.is_file():
            return f"{source} of {link}"
        return f"#{anchor}" if anchor and anchor not in anchors(source.read_text("utf-8")) else ""
    if address.startswith(FILES):
        path = ROOT / address.removeprefix(FILES)
    else:
        path = ROOT / re.sub(r"^/?(blob|tree)/main/", "", address.removeprefix(REPOSITORY))
        if address.rstrip("/") == REPOSITORY or re.match(
            r"/(issues|security|archive)", address.removeprefix(REPOSITORY)
        ):
            return ""
    return "" if path.exists() else f"{path} of {link}"


def documents():
    """All files that name an address of the project."""
    names = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "CITATION.cff")
    yield from (ROOT / name for name in (*names, "pyproject.toml", "examples/README.md"))
    yield from DOCS.rglob("*.md")
    yield from (ROOT / ".github").rglob("*.yml")


def test_every_link_to_the_repository_or_to_a_page_leads_somewhere():
    own = rf"(?:{REPOSITORY}|{FILES}|{PAGES})[^\s)>\"'`\]]*"
    links = {link for path in documents() for link in re.findall(own, path.read_text("utf-8"))}
    assert len(links) > 10
    assert [problem for problem in map(missing, links) if problem] == []


@pytest.mark.parametrize(
    "link",
    [
        f"{PAGES}how-to/gone.html",
        f"{PAGES}how-to/gitlab.html#gone",
        f"{REPOSITORY}/blob/main/gone.md",
        f"{FILES}docs/images/gone.png",
    ],
)
def test_a_link_to_what_is_gone_is_noticed(link):
    assert missing(link)
