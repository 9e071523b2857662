"""Baselines: what is written, what is left alone, and what is in the way."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal

import pytest
from helpers.sources import HELPER, WITHOUT

from pytest_gpumem.session.settings import folder_of_root

THREE = """
import os
SIZE = int(os.environ.get("SIZE", "100"))

@pytest.mark.gpu_memory(batch_size=4)
def test_one():
    mib(SIZE)

@pytest.mark.gpu_memory(batch_size=4)
def test_two():
    mib(200)

@pytest.mark.gpu_memory(batch_size=4)
def test_three():
    mib(SIZE * 3)
    assert "FAIL" not in os.environ
"""
UPDATE = "--gpumem-update-baselines"
FILE = "virtual-H100/test_it.json"


@pytest.fixture
def three(suite):
    """Three tests with baselines."""
    session = suite.run(UPDATE, source=THREE)
    assert session.outcomes == {"passed": 3}
    assert "gpumem: baselines: 3 created" in session.out
    assert f"gpumem: commit baselines/{FILE}\n" in session.out
    return suite


def test_an_update_says_what_was_created_changed_and_unchanged(three, monkeypatch):
    assert list(three.baselines()) == [FILE]
    assert three.baselined() == {
        "test_it.py::test_one": (100, 100),
        "test_it.py::test_two": (200, 200),
        "test_it.py::test_three": (300, 300),
    }
    content = json.loads(three.baselines()[FILE])
    assert content["format"] == 1
    assert content["tests"]["test_one"]["peak_allocated"] == [100 << 20]
    (made_with,) = content["provenance"].values()
    assert set(made_with) >= {"torch", "cuda", "cudnn", "driver"}

    monkeypatch.setenv("SIZE", "150")
    session = three.run(UPDATE)
    assert session.outcomes == {"passed": 3}
    assert "gpumem: baselines: 2 changed, 1 unchanged" in session.out
    assert "allocated: 100.00 MiB -> 150.00 MiB (+50.00 MiB)" in session.out
    assert three.baselined()["test_it.py::test_one"] == (150, 150)
    assert "to record baselines" not in session.out

    before = three.baselines()
    session = three.run(UPDATE)
    assert "gpumem: baselines: 3 unchanged" in session.out
    assert three.baselines() == before


def test_nothing_is_written_without_the_option(suite):
    session = suite.run(source=THREE)
    assert session.outcomes == {"passed": 3}
    assert suite.baselines() == {}
    assert not (suite.path / "baselines").exists()
    assert "gpumem: to record baselines: pytest test_it.py::test_one" in session.out


@pytest.mark.parametrize("arguments", [("-k", "test_one"), ("test_it.py::test_one",), ("-x",)])
def test_a_partial_run_touches_nothing_else(three, monkeypatch, arguments):
    monkeypatch.setenv("SIZE", "150")
    monkeypatch.setenv("FAIL", "1")
    before = three.baselined()
    three.run(UPDATE, *arguments)
    assert three.baselined() == {**before, "test_it.py::test_one": (150, 150)}


def test_a_failing_test_never_moves_its_baseline(three, monkeypatch):
    monkeypatch.setenv("SIZE", "150")
    monkeypatch.setenv("FAIL", "1")
    assert three.run(UPDATE).outcomes == {"passed": 2, "failed": 1}
    assert three.baselined()["test_it.py::test_three"] == (300, 300)
    monkeypatch.delenv("FAIL")
    session = three.run(UPDATE, "--lf")
    assert session.outcomes == {"passed": 1, "deselected": 2} or session.outcomes["passed"] == 1
    assert three.baselined() == {
        "test_it.py::test_one": (150, 150),
        "test_it.py::test_two": (200, 200),
        "test_it.py::test_three": (450, 450),
    }


FAILING = """
@pytest.fixture
def bad_end():
    yield
    raise ValueError("in the tear-down")

@pytest.mark.gpu_memory
def test_teardown(bad_end):
    mib(40)

@pytest.mark.xfail(strict=True)
@pytest.mark.gpu_memory
def test_xfail():
    mib(40)
    assert False

@pytest.mark.xfail
@pytest.mark.gpu_memory
def test_xpass():
    mib(40)

@pytest.mark.gpu_memory
def test_skips():
    mib(40)
    pytest.skip("late")

@pytest.mark.gpu_memory(max_gib=0.01)
def test_out_of_memory():
    mib(40)

@pytest.mark.gpu_memory(max_allocated_gib=0.01)
def test_over_budget():
    mib(40)

@pytest.mark.gpu_memory(baseline=False)
def test_without():
    mib(40)
"""


def test_only_a_test_that_passed_in_every_phase_gets_a_baseline(suite):
    session = suite.run(UPDATE, source=FAILING)
    assert suite.baselined() == {}
    assert "gpumem: baselines: nothing to write" in session.out


def test_an_interrupted_run_keeps_what_it_has(suite):
    source = THREE.replace("mib(200)", "raise KeyboardInterrupt")
    suite.write("test_it.py", source)
    result = suite.pytester.inline_run(*WITHOUT, UPDATE, no_reraise_ctrlc=True)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert suite.baselined() == {"test_it.py::test_one": (100, 100)}
    assert suite.run(source=THREE).outcomes == {"passed": 3}  # the device was let go of


BROKEN = {
    "broken": ("{ not json", "line 1"),
    "newer": ('{"format": 99}', "newer"),
    "foreign": ('{"name": "x"}', "format"),
    "conflict": ("<<<<<<< HEAD\n{}\n=======\n", "conflict"),
}


@pytest.mark.parametrize("update", [False, True])
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_an_error_that_names_it_and_it_is_never_overwritten(suite, kind, update):
    content, words = BROKEN[kind]
    path = suite.write(f"baselines/{FILE}", content)
    before = path.read_bytes()
    options = [UPDATE] if update else []
    suite.write("test_other.py", "@pytest.mark.gpu_memory\ndef test_other(): mib(40)\n")
    session = suite.run(*options, source=THREE)
    assert path.read_bytes() == before
    assert session.ret == pytest.ExitCode.TESTS_FAILED
    assert session.outcomes == {"failed": 3, "passed": 1}
    assert session.verdicts()["test_it.py::test_one"] == "incomparable"
    assert f"baselines/{FILE}" in session.flat
    assert words in session.flat
    assert "restore" in session.flat
    assert "Traceback" not in session.out
    if update:
        assert list(suite.baselines()) == [FILE, "virtual-H100/test_other.json"]


def test_a_deep_file_of_another_device_does_not_stop_an_update(suite):
    """It ended the session with a RecursionError once, before a baseline was written."""
    path = suite.write("baselines/virtual-L4/test_it.json", '{"tests": ' + "[" * 100_000)
    content = path.read_bytes()
    session = suite.run(UPDATE, source=THREE)
    assert session.outcomes == {"passed": 3}
    assert session.ret == pytest.ExitCode.OK
    assert FILE in suite.baselines()
    assert path.read_bytes() == content


def test_a_folder_that_cannot_be_written_fails_the_session_in_one_line(suite):
    """A permission would not do: who runs the tests may be root."""
    (suite.path / "baselines/.gpumem.lock").mkdir(parents=True)
    session = suite.run(UPDATE, source=THREE)
    assert session.outcomes == {"passed": 3}
    assert session.ret == pytest.ExitCode.TESTS_FAILED
    assert "gpumem: baselines: 1 error" in session.out
    assert (
        ".gpumem.lock: cannot be locked: Is a directory; make the folder writable" in session.flat
    )
    assert "choose another with --gpumem-baseline-dir" in session.flat
    assert "Traceback" not in session.out + session.err
    assert "1 error" in suite.run(UPDATE, "-q").out


def test_a_file_in_place_of_the_folder_is_an_error_of_every_test(suite):
    (suite.path / "baselines").write_text("in the way")
    session = suite.run(UPDATE, source=THREE)
    assert session.outcomes == {"failed": 3}
    assert "cannot be read: Not a directory; move it away" in session.flat
    assert "Traceback" not in session.out + session.err
    assert (suite.path / "baselines").read_text() == "in the way"


ODD = """
import pytest
from helper import mib

@pytest.mark.gpu_memory
@pytest.mark.parametrize("n", [
    pytest.param(1, id="a/b"), pytest.param(2, id="../../up"), pytest.param(3, id="x::y"),
    pytest.param(4, id="größe"), pytest.param(5, id="a b"), pytest.param(6, id="A B"),
    pytest.param(7, id="[]"), pytest.param(8, id="a\\\\nb"), pytest.param(9, id="</script>"),
])
def test_it(n):
    mib(100 * n)

@pytest.mark.gpu_memory
class TestIt:
    def test_it(self):
        mib(20)

class TestOther(TestIt):
    class TestInner:
        @pytest.mark.gpu_memory
        def test_it(self):
            mib(40)
"""


def test_names_never_collide_and_never_leave_the_folder(suite):
    suite.write("helper.py", f"import torch\n{HELPER}")
    suite.pytester.syspathinsert()
    suite.write("sub/test_it.py", ODD)
    suite.write("sub/deeper/test_it_too.py", ODD.replace("100 * n", "101 * n"))
    around = sorted(suite.path.parent.iterdir())
    session = suite.run(UPDATE)
    assert session.outcomes == {"passed": 24}
    assert sorted(suite.path.parent.iterdir()) == around
    assert list(suite.baselines()) == [
        "virtual-H100/sub/deeper/test_it_too.json",
        "virtual-H100/sub/test_it.json",
    ]
    assert len(suite.baselined()) == 24
    session = suite.run("-v")
    assert session.outcomes == {"passed": 24}
    assert set(session.verdicts().values()) == {"ok"}
    assert "24 ok" in session.out


def test_each_device_has_a_folder_of_its_own(three):
    before = three.baselines()
    session = three.run("--gpumem-card=T4")
    assert session.outcomes == {"passed": 3}
    assert set(session.verdicts().values()) == {"incomparable"}
    three.run("--gpumem-card=T4", UPDATE)
    after = three.baselines()
    assert set(after) == {FILE, "virtual-T4/test_it.json"}
    assert after[FILE] == before[FILE]


def test_workers_measure_the_same_and_the_controller_alone_writes(three, monkeypatch):
    pytest.importorskip("xdist")
    before = three.baselined()
    monkeypatch.setenv("SIZE", "150")
    session = three.run_warm("-n", "2", UPDATE, "-k", "one or two")
    assert session.outcomes == {"passed": 2}
    assert "gpumem: virtual GPU H100" in session.out
    assert "gpumem: memory is predicted; kernels do not run" in session.out
    assert "1 changed, 1 unchanged" in session.out
    assert three.baselined() == {**before, "test_it.py::test_one": (150, 150)}
    assert session.figures() == {"test_one": (150, 150), "test_two": (200, 200)}
    assert sorted(p.name for p in three.path.iterdir() if "baseline" in p.name) == ["baselines"]


@pytest.mark.parametrize(
    "options",
    [
        ["--gpumem-card=T4"],
        ["--gpumem-cards=T4,L4", "--gpumem-baseline-dir=of cards"],
        ["--gpumem-device=virtual", "-ogpumem_card=T4"],
    ],
)
def test_the_command_that_records_repeats_the_options_that_decide_what_is_compared(suite, options):
    """Without them it recorded for another card, and the next growth passed as incomparable."""
    session = suite.run(*options, "--gpumem-markdown=a.md", "--gpumem-html=a.html", source=THREE)
    (line,) = re.findall("to record baselines: pytest (.*)", session.out)
    arguments = shlex.split(line)
    assert set(options) <= set(arguments)
    assert line in (suite.path / "a.md").read_text()
    suite.run(*arguments)
    again = suite.run(*options)
    assert set(again.verdicts().values()) == {"ok"}
    grown = suite.run(*options, source=THREE.replace("mib(", "mib(9 + "))
    assert set(grown.verdicts().values()) == {"regressed"}
    for option in options:
        assert shlex.quote(option) in grown.flat.split("if this is intended, run ")[1]


def test_options_of_the_ini_file_are_not_repeated(suite):
    suite.write("pytest.ini", "[pytest]\ngpumem_card = T4\n")
    assert "--gpumem-card" not in suite.run(source=THREE).out


def test_packages_with_roots_of_their_own_share_a_folder_and_no_baseline(suite):
    """Both have a test_it.py with one test, as packages of a monorepo do."""
    option = "--gpumem-baseline-dir=../../baselines"
    for package, size in (("one", 5), ("two", 70)):
        suite.write(f"packages/{package}/pytest.ini", "[pytest]")
        suite.write(
            f"packages/{package}/test_it.py",
            f"import pytest, torch\n{HELPER}\n@pytest.mark.gpu_memory\ndef test_it(): mib({size})",
        )
        root = f"--rootdir=packages/{package}"
        path = f"packages/{package}/test_it.py"
        suite.run(root, "-c", f"packages/{package}/pytest.ini", path, option, UPDATE)
    for package in ("one", "two"):
        ini = f"packages/{package}/pytest.ini"
        session = suite.run("-c", ini, f"packages/{package}/test_it.py", option)
        assert "1 ok" in session.flat, session.out
    folders = [path.parent.name for path in (suite.path / "baselines").rglob("virtual-H100")]
    assert sorted(folders) == ["one", "two"]


@pytest.mark.parametrize("key", ["virtual-T4", "xpu-Max_1550-48000"])
def test_a_folder_above_the_root_has_one_for_each_root_if_it_is_no_roots_own(tmp_path, key):
    root = tmp_path / "package"
    root.mkdir()
    assert folder_of_root("../baselines", root) == "../baselines/package"
    assert folder_of_root("../of {torch}", root) == "../of {torch}/package"
    (tmp_path / "baselines" / key).mkdir(parents=True)
    for name in ("../baselines", str(tmp_path / "new"), "a/../b", "baselines"):
        assert folder_of_root(name, root) == name


TERMINATED = """
import os, signal

@pytest.mark.parametrize("number", range(4))
@pytest.mark.gpu_memory
def test_numbered(number):
    mib(10 + number)
    if number == 3:
        os.kill(int(os.environ["CONTROLLER"]), signal.SIGTERM)
        signal.pause()
"""
CONTROLLER = """
import os

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        os.environ["CONTROLLER"] = str(os.getpid())
"""


@pytest.mark.parametrize("workers", ["-n0", "-n1"])
def test_sigterm_loses_no_finished_test(suite, workers):
    suite.write("conftest.py", CONTROLLER)
    session = suite.run_warm(UPDATE, workers, source=TERMINATED)
    assert session.ret == 128 + signal.SIGTERM
    assert "Exit: SIGTERM" in session.out
    names = {f"test_it.py::test_numbered[{number}]" for number in range(3)}
    assert set(suite.baselined()) == names


def test_a_session_that_writes_nothing_leaves_sigterm_alone(suite):
    suite.write("conftest.py", CONTROLLER)
    session = suite.run_warm("-n0", source=TERMINATED)
    assert session.ret == -signal.SIGTERM


def test_a_baseline_has_the_same_bytes_alone_and_after_other_tests(suite):
    suite.write(
        "test_it.py",
        """
        @pytest.fixture(scope="session", autouse=True)
        def prepared(): pass  # its memory is looked at

        @pytest.mark.gpu_memory
        def test_first(): mib(3)

        @pytest.mark.gpu_memory
        def test_second():
            held = mib(5)
            torch.nn.Linear(100, 100).cuda()
        """,
    )
    update = "--gpumem-update-baselines"
    suite.run_warm(update)
    (together,) = suite.baselines().values()
    shutil.rmtree(suite.path / "baselines")
    suite.run_warm(update, "-k", "second")
    (alone,) = suite.baselines().values()
    entries = [json.loads(content)["tests"]["test_second"] for content in (together, alone)]
    assert entries[0] == entries[1]
