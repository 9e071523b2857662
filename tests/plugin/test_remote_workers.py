"""Workers that pytest-xdist starts by ``--tx``, as on other machines: by execnet, over loopback."""

from __future__ import annotations

import os
import re
import shlex
import shutil

import pytest
from helpers.git import commit, git
from helpers.pages import blocks, flat, read
from helpers.warm import warm_python

from pytest_gpumem.report.json_report import read_report
from pytest_gpumem.sizes import MIB

pytest.importorskip("xdist")

PAGE = "how-to/across-machines.md"
UPDATE = "--gpumem-update-baselines"
MODES = ("load", "loadscope", "loadfile", "loadgroup", "worksteal", "each")
THREE = """
@pytest.mark.parametrize("number", range(3))
@pytest.mark.gpu_memory
def test_numbered(number):
    mib(22 + 2 * number)
"""
ALL = {f"test_it.py::test_numbered[{number}]": (22 + 2 * number,) * 2 for number in range(3)}


def remote(*settings):
    """The option that starts a worker by execnet, with an interpreter of its own."""
    return "--tx", "//".join([f"popen//python={warm_python()}", *settings])


@pytest.mark.parametrize("mode", MODES)
def test_results_of_remote_workers_come_to_the_controller(suite, mode):
    arguments = (*remote(), *remote(), f"--dist={mode}", UPDATE, "--gpumem-json=r.json")
    session = suite.run_warm(*arguments, source=THREE)
    assert session.ret == 0
    assert "2 workers [3 items]" in session.out or mode == "each"
    assert suite.baselined() == ALL
    results = read_report(suite.path / "r.json").results
    assert sorted(it.nodeid for it in results) == sorted(ALL)  # once, with each worker's too
    assert {it.outcome for it in results} == {"passed"}


def test_the_page_names_the_modes_that_were_run():
    shown = flat(read(PAGE)).partition("With `--dist` and ")[2]
    assert tuple(re.findall(r"`(\w+)`", shown.partition(" workers with")[0])) == MODES


def test_each_worker_has_a_card_of_its_own(suite):
    """As on two machines: each worker's figures are of its own device."""
    cards = ("T4", "L4")
    options = [word for card in cards for word in remote(f"env:GPUMEM_RUN_CARD={card}")]
    options = (*options, "--dist=each")
    session = suite.run_warm(*options, UPDATE, source=THREE)
    assert session.ret == 0
    assert sorted(suite.baselines()) == [f"virtual-{card}/test_it.json" for card in sorted(cards)]
    session = suite.run_warm(*options, "--gpumem-json=r.json")
    results = read_report(suite.path / "r.json").results
    assert len(results) == 6
    assert {it.verdict.kind for it in results} == {"within"}


def test_each_worker_compares_with_the_baselines_of_its_own_checkout(suite):
    """As on two machines, one of which has checked out a commit with other baselines."""
    suite.write("pytest.ini", "[pytest]")
    assert suite.run_warm(UPDATE, source=THREE).ret == 0
    other = suite.path.with_name(f"{suite.path.name}-other")
    shutil.copytree(suite.path, other)
    (path,) = other.glob("**/virtual-H100/test_it.json")
    path.write_text(path.read_text().replace(f"{22 * MIB}", f"{11 * MIB}"))
    session = suite.run_warm(
        *remote(f"chdir={other}"), "--dist=load", "--gpumem-json=r.json", "--gpumem-attribution=off"
    )
    assert session.ret == 1
    results = {it.nodeid: it for it in read_report(suite.path / "r.json").results}
    assert {name: str(it.verdict.kind) for name, it in results.items()} == {
        name: "regressed" if "[0]" in name else "within" for name in ALL
    }
    assert not (other / "r.json").exists()  # results are the controller's


def test_a_worker_with_another_commit_is_told_and_records_nothing(suite, gpumem):
    """Its figures are those of other code."""
    suite.write("test_it.py", THREE)
    suite.write("pytest.ini", "[pytest]\n")
    suite.write(".gitignore", "*.json\npytest/\n_pytest/\n")
    git("init", "-q", "-b", "main")
    commit("one")
    other = suite.path.with_name(f"{suite.path.name}-other")
    git("clone", "-q", str(suite.path), str(other))
    suite.write("model.py", "WIDTH = 2\n")
    commit("two")
    options = (*remote(), *remote(f"chdir={other}"), "--dist=load", "--gpumem-json=r.json")
    session = suite.run_warm(*options)
    first = git("rev-parse", "HEAD^").strip()
    sentence = f"worker gw1 tested commit {first[:12]}, which is not checked out here"
    assert (session.ret, sentence in session.flat) == (0, True)
    assert read_report(suite.path / "r.json").report.origins[0].other_commits == (first,)
    status, _, err = gpumem("accept", "r.json", "--yes")
    assert (status, suite.baselines()) == (2, {})
    assert f"r.json: has figures of commit {first[:12]}, which a worker had; run the tests" in err
    session = suite.run_warm(*options, UPDATE)
    assert (session.ret, sentence in session.flat) == (1, True)
    assert suite.baselines() == {}
    git("-C", str(other), "pull", "-q")
    session = suite.run_warm(*options, UPDATE)
    assert (session.ret, "tested commit" in session.out) == (0, False)
    assert suite.baselined() == ALL
    assert gpumem("accept", "r.json", "--yes")[0] == 0


def test_two_figures_of_one_device_are_told_and_not_recorded(suite):
    source = """
        import os

        @pytest.mark.gpu_memory
        def test_own(): mib(int(os.environ["SIZE"]))

        @pytest.mark.gpu_memory
        def test_same(): mib(30)
    """
    options = [word for size in (30, 90) for word in remote(f"env:SIZE={size}")]
    session = suite.run_warm(*options, "--dist=each", UPDATE, source=source)
    assert (
        "test_it.py::test_own has two different figures on virtual-H100, from gw0 and gw1"
        in session.flat
    )
    assert list(suite.baselined()) == ["test_it.py::test_same"]


def test_a_remote_worker_that_is_lost_is_told_with_its_test(suite):
    source = f"{THREE}\n    import os\n    number != 1 or os._exit(9)\n"
    options = (*remote(), *remote(), "--dist=load", "--gpumem-json=r.json")
    session = suite.run_warm(*options, UPDATE, source=source)
    assert session.ret == 1
    assert "crashed while running 'test_it.py::test_numbered[1]'" in session.flat
    assert set(suite.baselined()) == {name for name in ALL if "[1]" not in name}
    assert read_report(suite.path / "r.json").report.remarks == (
        "test_it.py::test_numbered[1]: its worker crashed, so this report does not have the test",
    )


HOME = "/home/me/project"
SSH = """#!/bin/sh
# As OpenSSH's client and server do: the words after the options and the host are a shell's command.
[ "$1" = -C ] && shift
echo "$1" >> "$(dirname "$0")/hosts"
shift
exec sh -c "$*"
"""


def test_workers_of_ssh_run_the_tests_of_their_checkouts(suite, monkeypatch, tmp_path_factory):
    """The page's command. ssh is a stand-in that runs its command here; hosts are folders."""
    suite.write("test_it.py", THREE)
    suite.write("pytest.ini", "[pytest]\n")
    folder = tmp_path_factory.mktemp("bin")
    (folder / "ssh").write_text(SSH)
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    (command,) = (it for it in blocks(PAGE, "console") if "ssh=" in it)
    command = command.replace("\\\n", "").replace(f"{HOME}/.venv/bin/python", warm_python())
    first, *options = shlex.split(command.removeprefix("$ "))
    assert first == "pytest"
    for host, card in (("gpu-1", "T4"), ("gpu-2", "L4")):
        checkout = suite.path.parent / host
        shutil.copytree(suite.path, checkout)
        (place,) = (index for index, word in enumerate(options) if f"ssh={host}" in word)
        options[place] = (
            f"{options[place].replace(HOME, str(checkout))}//env:GPUMEM_RUN_CARD={card}"
        )
    options = [word.replace("--dist=load", "--dist=each") for word in options]
    session = suite.run_warm(*options, UPDATE, "--gpumem-json=r.json")
    assert session.ret == 0, session.out
    assert sorted((folder / "hosts").read_text().split()) == ["gpu-1", "gpu-2"]
    results = read_report(suite.path / "r.json").results
    assert sorted((it.device_key, it.nodeid) for it in results) == [
        (f"virtual-{card}", name) for card in ("L4", "T4") for name in sorted(ALL)
    ]
    assert sorted(suite.baselines()) == ["virtual-L4/test_it.json", "virtual-T4/test_it.json"]
    assert not list(suite.path.parent.glob("gpu-*/baselines"))  # the controller alone writes
