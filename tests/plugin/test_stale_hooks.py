"""Stale baselines: found after a full, successful collection, and only then."""

from __future__ import annotations

import re
import shlex

import filelock
import pytest
from helpers.command_line import write

from pytest_gpumem.baselines.paths import read_file
from pytest_gpumem.baselines.store import BaselineStore

UPDATE = "--gpumem-update-baselines"
FAIL = "--gpumem-stale=fail"
DELETE = "--gpumem-stale=delete"
FIRST = """
@pytest.mark.gpu_memory
def test_kept(): mib(1)

@pytest.mark.gpu_memory
def test_gone(): mib(2)
"""
LEFT = FIRST.replace("test_gone", "test_renamed")
REMOVES = "no test any more (pytest --collect-only --gpumem-stale=delete deletes them)"
LINE = f"gpumem: 1 baseline has {REMOVES}: "
GONE = "test_it.py::test_gone on virtual-H100"


@pytest.fixture
def renamed(suite):
    """Two tests with baselines, of which one was renamed, and another file's."""
    suite.write("test_more.py", "@pytest.mark.gpu_memory\ndef test_more(): mib(1)")
    assert suite.run(UPDATE, source=FIRST).outcomes == {"passed": 3}
    suite.write("test_it.py", LEFT)
    return suite


def test_a_full_session_notes_what_is_gone(renamed):
    before = renamed.baselines()
    session = renamed.run()
    assert session.ret == 0
    assert LINE + GONE in session.out
    assert renamed.baselines() == before


@pytest.mark.parametrize("arguments", [["test_more.py", "--gpumem-json=r.json"], []])
def test_files_of_other_modules_are_not_read(renamed, monkeypatch, arguments):
    """A session of few tests beside the baselines of thousands starts and ends as quickly."""
    (renamed.path / "test_it.py").write_text("")  # collected by a session of all, without tests
    renamed.write("conftest.py", "collect_ignore = ['test_it.py']")
    read = []

    def noted(path):
        read.append(path.name)
        return read_file(path)

    monkeypatch.setattr("pytest_gpumem.baselines.file_format.read_file", noted)
    assert renamed.run(*arguments).ret == 0
    assert read == ["test_more.json"]


@pytest.mark.parametrize("ini", [False, True])
def test_it_fails_the_session_where_asked(renamed, ini):
    if ini:
        renamed.write("pytest.ini", "[pytest]\ngpumem_stale = fail")
    session = renamed.run(*([] if ini else [FAIL]))
    assert session.outcomes == {"passed": 3}
    assert session.ret == pytest.ExitCode.TESTS_FAILED
    assert LINE + GONE in session.out
    renamed.write("test_it.py", FIRST)
    assert renamed.run(FAIL).ret == 0


def test_nothing_is_said_where_every_baseline_has_its_test(suite):
    assert suite.run(UPDATE, source=FIRST).ret == 0
    session = suite.run("-v", FAIL)
    assert session.ret == 0
    assert REMOVES not in session.out
    assert "stale" not in session.out


def test_a_file_that_is_gone_and_one_without_marked_tests_leave_stale_baselines(renamed):
    (renamed.path / "test_it.py").unlink()
    session = renamed.run(FAIL)
    assert session.ret == 1
    assert "gpumem: 2 baselines have no test any more" in session.out
    assert f"{GONE}, test_it.py::test_kept on virtual-H100\n" in session.out
    renamed.write("test_more.py", "def test_unmarked(): pass")
    session = renamed.run()
    assert "gpumem: 3 baselines have no test any more" in session.out


@pytest.mark.parametrize(
    "arguments",
    [
        ["-k", "kept"],
        ["-m", "gpu_memory"],
        ["test_it.py"],
        ["test_it.py::test_kept"],
        ["--deselect", "test_it.py::test_renamed"],
        ["--ignore", "test_more.py"],
        ["--ignore-glob", "*more*"],
        ["--lf"],
        ["--stepwise"],
        ["-o", "python_functions=test_kept test_more"],
        ["--gpumem-cards=T4,L4"],
        ["-o", "gpumem_cards=T4"],
    ],
)
def test_nothing_is_said_after_a_collection_that_was_not_full(renamed, arguments):
    session = renamed.run(FAIL, *arguments)
    assert session.ret == 0, session.out
    assert REMOVES not in session.out
    detailed = renamed.run(FAIL, "-v", *arguments)
    assert "gpumem: stale baselines are unknown: " in detailed.out


def test_nothing_is_said_where_a_file_cannot_be_collected(renamed):
    renamed.write("test_more.py", "raise RuntimeError('broken')")
    for more in ([], ["--continue-on-collection-errors"]):
        assert REMOVES not in renamed.run(FAIL, *more).out


def test_another_plugin_that_deselects_makes_it_no_full_collection(renamed):
    renamed.write(
        "conftest.py",
        """
        def pytest_collection_modifyitems(config, items):
            config.hook.pytest_deselected(items=items[1:])
            del items[1:]
        """,
    )
    assert REMOVES not in renamed.run(FAIL).out


def test_naming_the_root_folder_or_all_testpaths_is_a_full_collection(renamed):
    assert renamed.run(FAIL, ".").ret == 1
    assert renamed.run(FAIL, str(renamed.path)).ret == 1
    renamed.write("pytest.ini", "[pytest]\ntestpaths = test_it.py test_more.py")
    assert renamed.run(FAIL).ret == 1
    assert renamed.run(FAIL, "test_it.py", "test_more.py").ret == 1
    assert renamed.run(FAIL, "test_it.py").ret == 0


def test_a_session_in_a_folder_below_is_no_full_collection(renamed, monkeypatch):
    renamed.write("pytest.ini", "[pytest]")
    renamed.write("sub/test_sub.py", "def test_sub(): pass")
    monkeypatch.chdir(renamed.path / "sub")
    assert renamed.run(FAIL).ret == 0


def test_what_is_skipped_here_is_not_gone(renamed):
    for source in (
        "pytest.skip('not here', allow_module_level=True)",
        "pytest.importorskip('no_such_module')",
        "pytestmark = pytest.mark.skip\ndef test_kept(): pass\ndef test_gone(): pass",
    ):
        renamed.write("test_it.py", source)
        session = renamed.run(FAIL)
        assert REMOVES not in session.out, source
    renamed.write("test_it.py", FIRST)
    assert REMOVES not in renamed.run(FAIL, "--gpumem-device=none").out


def test_a_file_that_a_conftest_leaves_out_is_not_gone(renamed):
    renamed.write("conftest.py", "collect_ignore = ['test_it.py']")
    assert REMOVES not in renamed.run(FAIL).out


def test_baselines_of_other_devices_are_stale_only_with_their_test(renamed):
    renamed.write("test_it.py", FIRST)
    assert renamed.run(UPDATE, "--gpumem-card=T4").ret == 0
    assert renamed.run(FAIL).ret == 0
    renamed.write("test_it.py", LEFT)
    session = renamed.run(FAIL)
    assert "gpumem: 2 baselines have no test any more" in session.out
    assert f"{GONE}, test_it.py::test_gone on virtual-T4" in session.out


def test_workers_find_the_same(renamed):
    pytest.importorskip("xdist")
    session = renamed.run_warm("-n", "2", FAIL)
    assert session.outcomes == {"passed": 3}
    assert session.ret == 1
    assert session.out.count(LINE + GONE) == 1
    assert renamed.run_warm("-n", "2", FAIL, "-k", "kept or more").ret == 0
    assert renamed.run_warm("-n", "2", FAIL, "test_it.py").ret == 0
    renamed.write("test_it.py", FIRST)
    assert renamed.run_warm("-n", "2", FAIL).ret == 0


def test_a_failing_test_hides_nothing(renamed):
    renamed.write("test_more.py", "def test_fails(): assert False")
    session = renamed.run("-x", FAIL)
    assert session.ret == 1
    assert "gpumem: 2 baselines have no test any more" in session.out


def test_listing_tests_finds_them_too_and_quiet_says_nothing_unless_it_fails(renamed):
    assert GONE in renamed.run("--collect-only").out
    assert GONE not in renamed.run("-q").out
    session = renamed.run("-q", FAIL)
    assert session.ret == 1
    assert GONE in session.out


def test_a_test_that_has_its_name_from_outside_cannot_inject_anything(suite):
    source = """
        @pytest.mark.parametrize("x", ["a\\x1b[31m"])
        @pytest.mark.gpu_memory
        def test_it(x): mib(1)
    """
    assert suite.run(UPDATE, source=source).ret == 0
    (suite.path / "test_it.py").write_text("def test_new(): pass\n")
    session = suite.run()
    assert "1 baseline has no test any more" in session.out
    assert "\x1b" not in session.out


def test_the_hooks_import_no_torch_where_no_test_is_marked(suite):
    suite.write("baselines/README", "no file of ours")
    source = """
        import sys
        def test_it(): assert "torch" not in sys.modules and "msgspec" not in sys.modules
    """
    suite.write("test_plain.py", source)
    path = suite.path / "test_plain.py"
    path.write_text(path.read_text().replace("import pytest, torch\n", ""))
    assert suite.run_apart().outcomes == {"passed": 1}


# Deleting


def test_the_printed_command_deletes_what_is_stale_and_nothing_else(renamed):
    kept = BaselineStore(renamed.path / "baselines").get("virtual-H100", "test_it.py", "test_kept")
    arguments = shlex.split(re.search(r"\(pytest (.*) deletes them\)", renamed.run().out)[1])
    session = renamed.run(*arguments)
    assert (session.ret, session.outcomes) == (0, {"tests": 3})
    assert f"gpumem: 1 baseline has no test any more (deleted): {GONE}" in session.out
    store = BaselineStore(renamed.path / "baselines")
    assert store.get("virtual-H100", "test_it.py", "test_kept") == kept
    assert store.get("virtual-H100", "test_it.py", "test_gone") is None
    assert store.get("virtual-H100", "test_more.py", "test_more") is not None
    assert renamed.run(FAIL).ret == 0


def test_a_session_with_workers_deletes_what_all_of_them_miss(renamed):
    pytest.importorskip("xdist")
    session = renamed.run_warm("-n", "2", DELETE)
    assert (session.ret, session.out.count("(deleted)")) == (0, 1)
    assert renamed.run(FAIL).ret == 0


@pytest.mark.parametrize("arguments", [["-k", "kept"], ["test_it.py"], ["--lf"]])
def test_a_collection_that_was_not_full_deletes_nothing_and_says_so(renamed, arguments):
    before = renamed.baselines()
    session = renamed.run("--collect-only", DELETE, *arguments)
    assert "gpumem: stale baselines are unknown: " in session.out
    renamed.write("test_more.py", "raise RuntimeError('broken')")
    session = renamed.run("--collect-only", DELETE)
    assert "stale baselines are unknown: test_more.py could not be collected" in session.out
    assert renamed.baselines() == before


def test_folders_that_are_empty_then_go_and_others_stay(renamed):
    folder = renamed.path / "baselines"
    write(folder, {"test_x": (1, 2)}, module="sub/deep/test_b.py")
    (folder / "virtual-T4/sub/README").write_text("kept")
    assert renamed.run("--collect-only", DELETE).ret == 0
    assert not (folder / "virtual-T4/sub/deep").exists()
    assert (folder / "virtual-T4/sub/README").exists()


def test_what_cannot_be_deleted_is_told_and_fails_the_session(renamed):
    write(renamed.path / "baselines", {"test_x": (1, 2)}, module="sub/test_b.py")
    with filelock.FileLock(renamed.path / "baselines/.gpumem.lock"):
        renamed.write(
            "conftest.py",
            """
            from pytest_gpumem.baselines.store import BaselineStore

            locked = BaselineStore.__init__
            BaselineStore.__init__ = lambda self, *args, **named: locked(
                self, *args, **{**named, "lock_timeout": 0.1}
            )
            """,
        )
        session = renamed.run_warm("--collect-only", DELETE)
    assert session.ret == 1
    assert "another process has held it" in session.flat
    assert "(deleted)" not in session.out


def test_all_names_are_listed_if_asked(renamed):
    names = [f"test_{number}" for number in range(5)]
    write(renamed.path / "baselines", dict.fromkeys(names, (1, 2)), module="sub/test_b.py")
    assert "sub/test_b.py::test_4" not in renamed.run("--collect-only").out
    assert all(
        f"sub/test_b.py::{name}" in renamed.run("--collect-only", "-v").out for name in names
    )
