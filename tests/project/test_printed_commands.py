"""Commands that the package prints: each is run in a shell, as it stands, where it was printed.

The project makes quoting and repeated options necessary: pytest is not run in its root folder,
names have spaces, brackets, dollars and quotes, and options decide what is measured. Commands whose
words stand in the source are run in test_fixed_commands.py.
"""

from __future__ import annotations

import json
import re
import shlex

import pytest
from helpers.html_pages import Page
from helpers.pages import Place
from helpers.sources import HELPER

IDS = ("a b", "[x]", "$HOME", """it's "q" \\ `ls` *""")
TESTS = f"""
import os
import pytest, torch
{HELPER}

@pytest.mark.gpu_memory
@pytest.mark.parametrize("name", {IDS!r})
def test_it(name):
    mib(float(os.environ.get("SIZE", "5")))
"""
SESSION = ("pytest", "--gpumem-card=T4", "--gpumem-baseline-dir=base lines")
REPORTS = ("--gpumem-markdown=a.md", "--gpumem-html=a.html", "--gpumem-json=a.json")


@pytest.fixture
def place(tmp_path):
    """A shell in a folder of tests below pytest's root folder."""
    root = tmp_path / "a project"
    root.mkdir()
    (root / "pytest.ini").write_text("[pytest]", encoding="utf-8")
    place = Place(root / "the tests")
    place.write("test_a.py", TESTS)
    return place


def in_terminal(output):
    return re.findall(r"^(?: {4}|gpumem: to record baselines: )(pytest .*)$", output, re.MULTILINE)


def in_markdown(text):
    return re.findall(r"^```sh\n(.*)\n```$", text, re.MULTILINE)


def results(place):
    return json.loads((place.folder / "a.json").read_text(encoding="utf-8"))["results"]


def test_commands_record_and_accept_from_the_folder_where_they_were_printed(place):
    summary = place.folder / "summary.md"
    github = {"CI": "1", "GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary)}
    missing = place.sh(shlex.join([*SESSION, *REPORTS]), **github)
    assert "4 without baseline" in missing.out
    *each, every = in_terminal(missing.out)
    assert len(each) == len(set(each)) == len(IDS)
    # Every report has the same ones.
    assert [result["verdict"]["command"] for result in results(place)] == each
    for path in (place.folder / "a.md", summary):
        commands = in_markdown(path.read_text(encoding="utf-8"))
        assert commands == [*each, every, "gpumem accept a.json"]
    page = Page((place.folder / "a.html").read_text(encoding="utf-8"))
    codes = [" ".join("".join(code.text).split()) for code in page.all("code")]
    assert [code for code in codes if code.startswith("pytest ")] == each
    assert not re.search("(pytest|gpumem) -", re.sub("(?m)^(?!::).*$", "", missing.out))
    for command in each:
        assert "baselines: 1 created" in place.sh(command).out, command
    # Of a test that grew, the command accepts it and no other one.
    grown = place.sh(shlex.join([*SESSION, *REPORTS]), SIZE="70")
    assert "4 regressed" in grown.out
    commands = [result["verdict"]["command"] for result in results(place)]
    assert commands == each
    assert in_terminal(grown.out) == each[:1]  # the others have the same cause
    assert "baselines: 1 changed" in place.sh(commands[1], SIZE="70").out
    assert "1 ok, 3 regressed" in place.sh(shlex.join(SESSION), SIZE="70").out
    # The same command for all tests that have none.
    for path in (place.folder.parent / "base lines").rglob("*.json"):
        path.unlink()
    assert "baselines: 4 created" in place.sh(every).out
    # A new toolchain that moved all of them: one command for the whole session.
    (path,) = (place.folder.parent / "base lines").rglob("*.json")
    path.write_text(re.sub(r'"torch": "[^"]*"', '"torch": "1.0"', path.read_text()))
    moved = place.sh(shlex.join(SESSION), SIZE="70")
    (command,) = in_terminal(moved.out)
    assert "baselines: 4 changed" in place.sh(command, SIZE="70").out


def test_the_edit_is_blamed_in_the_folder_where_the_command_was_printed(place):
    commit = "git add .. && git -c user.name=a -c user.email=b commit -qm x"
    recorded = place.sh(f"{shlex.join(SESSION)} --gpumem-update-baselines")
    assert "baselines: 4 created" in recorded.out
    place.sh(f"git init -q .. && {commit}")
    place.write(
        "test_a.py", TESTS.replace("import os\n", "import os, sys\n").replace('"5"', '"70"')
    )
    grown = place.sh(shlex.join(SESSION))
    (command, *_) = re.findall(r"^ {4}(gpumem blame .*)$", grown.out, re.MULTILINE)
    blamed = place.sh(command)
    assert blamed.ret == 0, blamed.err
    assert "5.00 MiB -> 70.00 MiB" in blamed.out
    assert '+    mib(float(os.environ.get("SIZE", "70")))' in blamed.out


def test_workers_print_what_the_controller_was_asked_with(place):
    session = place.sh(shlex.join([*SESSION, "-n1"]), CI="1")
    *each, every = in_terminal(session.out)
    assert len(set(each)) == len(IDS)
    assert "baselines: 1 created" in place.sh(each[2]).out
    assert "3 created, 1 unchanged" in place.sh(every).out


def test_commands_about_baselines_delete_list_and_write(place):
    session = shlex.join(SESSION)
    assert "baselines: 4 created" in place.sh(f"{session} --gpumem-update-baselines").out
    place.write("test_a.py", TESTS.replace("'a b', ", ""))
    session = place.sh(f"{session} .. .")
    (command,) = re.findall(r"1 baseline has no test any more \((.*) deletes them\)", session.out)
    assert "1 baseline has no test any more (deleted): " in place.sh(command).out
    folder = "--baseline-dir='../base lines'"
    place.sh("git init -q .. && git add .. && git -c user.name=a -c user.email=b commit -qm x")
    told = place.sh(f"gpumem history zzz {folder}")
    (command,) = re.findall(r"; (gpumem .*) lists all$", told.err.strip())
    listed = place.sh(command)
    assert listed.ret == 0
    assert "test_it[[x]]" in listed.out
    place.write("a b.json", '{"format": 1, "gpumem": "0.1.0", "created": ')  # cut off
    told = place.sh("gpumem report 'a b.json'")
    (command,) = re.findall("; write the report again with (.*)$", told.err.strip())
    place.sh(command)
    assert place.sh("gpumem report 'a b.json'").ret == 0


def test_a_shallow_clone_gets_the_commits_before_it(place):
    commit = "git add . && git -c user.name=a -c user.email=b commit -qm x"
    place.sh(f"git init -q . && {commit}")
    for size in ("5", "70"):
        update = "pytest --rootdir=. --gpumem-update-baselines"
        place.sh(f"{update} && {commit}", SIZE=size)
    place.sh('git clone -q --depth=1 "file://$PWD" ../shallow')
    told = place.sh("cd ../shallow && gpumem history")
    (command,) = re.findall("this clone is shallow; (.*) gets the earlier commits", told.out)
    assert place.sh(f"cd ../shallow && {command}").ret == 0
    told = place.sh("cd ../shallow && gpumem history")
    assert "shallow" not in told.out
