"""``gpumem accept``: baselines from a report, to the byte those that the run would have written."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.git import commit, git
from helpers.virtual_gpu import virtual_card

from pytest_gpumem.cli.accept.expression import chooser
from pytest_gpumem.errors import SpecError
from pytest_gpumem.recording.allocator_view import VIEW
from pytest_gpumem.report.json_report import dumps, read_report

UPDATE = "--gpumem-update-baselines"
REPORT = "--gpumem-json=r.json"
WHEN = "2026-11-23T10:00:00Z"


@pytest.fixture
def gpumem(gpumem, capsys):
    """Run the command; return its status, its output and its errors, without those of sessions."""

    def run(*arguments):
        capsys.readouterr()
        return gpumem(*arguments)

    return run


def sources(suite, *, grown):
    """Two modules, one of them in a folder; of the grown one every test but one is another."""

    def pick(before, after):
        return after if grown else before

    suite.write(
        "test_it.py",
        f"""
        @pytest.mark.gpu_memory(batch_size={pick(8, 16)})
        def test_batch(): mib(5)

        @pytest.mark.gpu_memory
        def test_grows(gpu_memory):
            with gpu_memory.measure("inner"):
                held = mib({pick(40, 90)})
            held = mib(3)

        @pytest.mark.gpu_memory
        def test_shrinks(): mib({pick(90, 40)})

        @pytest.mark.gpu_memory
        def test_within(): torch.empty({pick(4000, 9000)}, device="cuda")

        @pytest.mark.gpu_memory
        def test_same(): mib(7)

        @pytest.mark.gpu_memory
        def test_{pick("gone", "new")}(): mib(2)
        """,
    )
    suite.write(
        "pkg/test_more.py",
        f"""
        import pytest, torch

        @pytest.mark.gpu_memory(card="T4")
        @pytest.mark.parametrize("n", [1, 30])
        def test_on_a_card(n):
            held = torch.empty({pick(1, 2)} * n << 20, dtype=torch.uint8, device="cuda")

        @pytest.mark.gpu_memory(devices=2)
        def test_two():
            held = [torch.empty({pick(10, 50)} << 20, dtype=torch.uint8, device=f"cuda:{{i}}")
                    for i in range(2)]
        """,
    )


@pytest.fixture
def grown(suite):
    """A repository whose baselines are those of the commit before, and the report of this one."""
    git("init", "-q", "-b", "main")
    suite.write(".gitignore", "*.json\n!baselines/**/*.json\n__pycache__\n.pytest_cache\n")
    sources(suite, grown=False)
    assert suite.run(UPDATE).ret == 0
    commit("one")
    sources(suite, grown=True)
    commit("two")
    assert suite.run(REPORT).outcomes["failed"] >= 2
    return suite


def updated(suite, *arguments):
    """What the update of such a run writes; the baselines are then as they were."""
    suite.run(UPDATE, *arguments)
    written = suite.baselines()
    restored()
    return written


def restored():
    git("checkout", "-q", "--", "baselines")
    git("clean", "-qfd", "baselines")


def test_files_are_to_the_byte_those_that_the_update_of_the_run_would_have_written(grown, gpumem):
    before = grown.baselines()
    all_of_them = updated(grown)
    within = ("test_it.py::test_within", "pkg/test_more.py::test_on_a_card[1]")
    moved = updated(grown, *(f"--deselect={test}" for test in within))
    assert grown.baselines() == before
    status, out, err = gpumem("accept", "r.json", "--yes")
    assert (status, err) == (0, "")
    assert grown.baselines() == moved != all_of_them
    for words in ("grew, in MiB", "shrank, in MiB", "appeared, in MiB", "test_new", "cause: "):
        assert words in out
    assert "batch size 8 -> 16" in out
    restored()
    assert gpumem("accept", "r.json", "--yes", "--all")[0] == 0
    assert grown.baselines() == all_of_them
    status, out, err = gpumem("accept", "r.json", "--yes", "--all")
    assert (status, out) == (0, "gpumem: nothing to accept: no figure differs from its baseline\n")


def test_files_of_a_real_gpu_are_those_of_its_update_too(suite, gpumem):
    """There tests are recorded for a report, also what passes. The virtual GPU is taken for one."""
    git("init", "-q", "-b", "main")
    suite.write(".gitignore", "r.json\n__pycache__\n")
    cuda = "--gpumem-device=cuda"
    with virtual_card("H100", 2):
        sources(suite, grown=False)
        assert suite.run(UPDATE, cuda).ret == 0
        commit("one")
        sources(suite, grown=True)
        commit("two")
        assert suite.run(REPORT, cuda).outcomes["failed"] >= 2
        within = ("test_it.py::test_within", "pkg/test_more.py::test_on_a_card[1]")
        moved = updated(suite, cuda, *(f"--deselect={test}" for test in within))
        all_of_them = updated(suite, cuda)
    before = suite.baselines()
    status, _, err = gpumem("accept", "r.json", "--yes")
    assert (status, err) == (0, "")
    assert suite.baselines() == moved != before
    restored()
    assert gpumem("accept", "r.json", "--yes", "--all")[0] == 0
    assert suite.baselines() == all_of_them != moved
    assert {name.partition("/")[0] for name in moved} == {"cuda-NVIDIA-H100-80GB-HBM3"}


SEARCHES = """
@pytest.mark.gpu_memory
def test_largest(gpu_memory):
    mib(1)
    gpu_memory.largest(lambda n: mib(SIZE * n), start=1)

@pytest.mark.gpu_memory(batch_sizes=(2, 8))
def test_sizes(gpu_memory):
    mib(SIZE * gpu_memory.batch_size)

@pytest.mark.gpu_memory(max_leak_mib=1)
def test_steady():
    mib(SIZE)

@pytest.mark.gpu_memory
def test_pinned():
    torch.empty(SIZE << 12, dtype=torch.uint8).pin_memory()

@pytest.mark.gpu_memory(baseline=False)
def test_without(): mib(SIZE)
"""


@pytest.mark.parametrize("strict", [(), ("--gpumem-provenance=fail",)])
def test_searches_slopes_pinned_memory_and_a_new_toolchain_are_written_as_by_the_update(
    suite, gpumem, strict
):
    """With --gpumem-provenance=fail also a baseline of which only the toolchain changed."""
    git("init", "-q", "-b", "main")
    suite.write(".gitignore", "r.json\n__pycache__\n")
    suite.write("test_it.py", SEARCHES.replace("SIZE", "1024"))
    suite.write("test_same.py", "@pytest.mark.gpu_memory\ndef test_same(): mib(7)\n")
    suite.run(UPDATE)
    for path in suite.path.glob("baselines/*/*.json"):
        path.write_text(path.read_text().replace('"torch": "2.', '"torch": "1.'))
    commit("one")
    suite.write("test_it.py", SEARCHES.replace("SIZE", "1500"))
    commit("two")
    suite.run(REPORT, *strict)
    new = updated(suite, *strict)
    before = suite.baselines()
    changed = {name for name in new if new[name] != before[name]}
    assert changed == {f"virtual-H100/test_{it}.json" for it in ("it", *("same",) * len(strict))}
    assert ('"peak_pinned"' in new["virtual-H100/test_it.json"]) is bool(VIEW.pinned_stats().owned)
    assert gpumem("accept", "r.json", "--yes")[::2] == (0, "")
    assert suite.baselines() == new


def test_named_tests_are_accepted_alone(grown, gpumem):
    named = updated(grown, "test_it.py::test_grows")
    assert gpumem("accept", "r.json", "--yes", "-k", "it.py and grows")[0] == 0
    assert grown.baselines() == named


def test_the_changes_are_shown_in_the_characters_of_the_terminal(suite):
    git("init", "-q")
    for size in ("3", "é"):
        line = f'x = torch.empty({size} << 20, device="cuda")'
        suite.write("test_it.py", f"é = 30\n@pytest.mark.gpu_memory\ndef test_a():\n    {line}\n")
        commit(size)
        if size == "3":
            suite.run(UPDATE)
    suite.run(REPORT)
    done = subprocess.run(
        [sys.executable, "-m", "pytest_gpumem", "accept", "r.json"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert " changed: 3 << 20 -> \\xe9 << 20 (other edits are not known)\n" in done.stdout


def test_a_name_that_no_test_has_is_an_error(grown, gpumem):
    before = grown.baselines()
    status, out, err = gpumem("accept", "r.json", "--yes", "-k", "grows and batch")
    assert (status, out) == (2, "")
    assert "-k grows and batch: no test of the report has this name; gpumem report lists" in err
    assert grown.baselines() == before


@pytest.mark.parametrize(
    ("typed", "status", "told"),
    [
        (b"y\n", 0, "gpumem: written: baselines/virtual-H100/test_it.json"),
        (b"n\n", 1, "[y/N] n\ngpumem: nothing was written; --yes writes the baselines"),
        (b"\n", 1, "gpumem: nothing was written; --yes writes the baselines"),
        (b"\x04", 1, "[y/N] \ngpumem: nothing was written; --yes writes the baselines"),
        (b"\x03", 130, "[y/N] ^C"),
    ],
)
def test_in_a_terminal_the_command_asks(recorded, typed, status, told):
    """After the table of changes; the end of the input and an interruption are no yes."""
    command = [sys.executable, "-m", "pytest_gpumem", "accept", "r.json"]
    process, screen = pty.fork()
    if not process:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it
        os.execv(command[0], command)
    seen = b""
    # A newline ends a wait that began after the signal had come.
    newline = threading.Timer(1, os.write, (screen, b"\n"))
    with suppress(OSError):  # Linux: the terminal's other end is closed
        while data := os.read(screen, 1 << 16):
            seen += data
            if seen.endswith(b"[y/N] "):
                os.write(screen, typed)
                newline.start()
    newline.cancel()
    os.close(screen)
    ended = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    text = seen.decode().replace("\r", "")
    assert (ended, told in text) == (status, True), text
    assert text.index("test_a ") < text.index("write these baselines? [y/N] ")
    assert bool(recorded.baselines()) is (status == 0)


def test_without_a_yes_nothing_is_written(grown, gpumem):
    before = grown.baselines()
    status, out, _ = gpumem("accept", "r.json")
    assert status == 1
    assert "test_grows" in out
    assert out.endswith("gpumem: nothing was written; --yes writes the baselines\n")
    assert grown.baselines() == before


def test_a_baseline_folder_of_torchs_version_and_a_root_below_the_top_are_written(grown, gpumem):
    """A package with a root of its own, and its part of a folder above."""
    package = grown.path / "packages" / "one"
    package.mkdir(parents=True)
    (package / "pytest.ini").write_text(
        "[pytest]\ngpumem_baseline_dir = ../../baselines/torch-{torch}\n"
    )
    (package / "test_here.py").write_text(
        "import pytest, torch\n@pytest.mark.gpu_memory\n"
        "def test_here(): torch.empty(1 << 20, device='cuda')\n"
    )
    commit("three")
    grown.run("--gpumem-json=p.json", str(package), "-c", str(package / "pytest.ini"))
    own = updated(grown, str(package), "-c", str(package / "pytest.ini"))
    (origin,) = read_report("p.json").report.origins
    assert (origin.root, origin.folder.split("/")[0]) == ("packages/one", "baselines")
    os.chdir(package)
    status, _, err = gpumem("accept", "../../p.json", "--yes")
    assert (status, err) == (0, "")
    os.chdir(grown.path)
    assert grown.baselines() == own


# What is refused


FAILING = """
@pytest.mark.gpu_memory
def test_fails_too():
    mib(50)
    yield_after()

@pytest.fixture
def broken():
    yield
    raise OSError("torn")

@pytest.mark.gpu_memory
def test_torn(broken): mib(2)

@pytest.mark.gpu_memory(max_gib=0.01)
def test_too_large(): mib(50)

@pytest.mark.gpu_memory(max_allocated_gib=0.01)
def test_over(): mib(50)

@pytest.mark.gpu_memory
@pytest.mark.xfail
def test_expected(): mib(2)

@pytest.mark.gpu_memory
def test_new(): mib(2)
"""


def test_tests_that_failed_otherwise_are_refused_by_name(suite, gpumem):
    git("init", "-q")
    suite.write("test_it.py", FAILING)
    commit("one")
    suite.run(REPORT)
    status, out, err = gpumem("accept", "r.json", "--yes")
    assert (status, out) == (2, "")
    assert "test_it.py::test_too_large on virtual-H100 is not accepted: it ran out of memory" in err
    assert "test_over on virtual-H100 is not accepted: it is over its budget" in err
    assert "test_torn on virtual-H100 is not accepted: it failed for a reason other than" in err
    assert "test_expected" not in err
    assert "test_new" not in err
    assert suite.baselines() == {}
    assert gpumem("accept", "r.json", "--yes", "-k", "torn")[0] == 2
    err = gpumem("accept", "r.json", "--yes", "-k", "expected or test_new")[2]
    assert "test_expected on virtual-H100 is not accepted: it is marked xfail" in err
    assert suite.baselines() == {}
    assert gpumem("accept", "r.json", "--yes", "-k", "test_new")[0] == 0
    assert list(suite.baselined()) == ["test_it.py::test_new"]


def test_tests_that_are_refused_can_be_left_out(suite, gpumem):
    git("init", "-q")
    suite.write("test_it.py", FAILING)
    commit("one")
    suite.run(REPORT)
    status, out, err = gpumem("accept", "r.json", "--yes", "--skip-refused")
    assert status == 0
    assert out.endswith("gpumem: written: baselines/virtual-H100/test_it.json\n")
    assert "test_torn on virtual-H100 is not accepted: it failed for a reason other than" in err
    assert list(suite.baselined()) == ["test_it.py::test_new"]
    status, out, _ = gpumem("accept", "r.json", "--yes", "--skip-refused", "-k", "not new")
    assert status == 0
    assert out == "gpumem: nothing to accept: no other figure differs from its baseline\n"
    assert list(suite.baselined()) == ["test_it.py::test_new"]


def test_tests_without_figures_are_named(suite, gpumem):
    """They failed or were skipped before they had a peak: nothing can be written for them."""
    git("init", "-q")
    suite.write(
        "test_it.py",
        """
        @pytest.mark.gpu_memory
        def test_new(): mib(2)

        @pytest.mark.gpu_memory
        def test_wrong(): assert mib(2) is None

        @pytest.mark.gpu_memory
        def test_later(): pytest.skip("not now")
        """,
    )
    commit("one")
    suite.run(REPORT)
    wrong = "test_it.py::test_wrong has no figures: it failed for a reason other than its memory"
    for name, reason in (("wrong", wrong), ("later", "test_later has no figures: it was skipped")):
        status, out, err = gpumem("accept", "r.json", "--yes", "-k", name)
        assert (status, out) == (2, "")
        assert f"{reason}\ngpumem: nothing was written; --skip-refused accepts" in err
    assert suite.baselines() == {}
    status, _, err = gpumem("accept", "r.json", "--yes")
    assert (status, err) == (0, f"gpumem: {wrong}\n")
    assert list(suite.baselined()) == ["test_it.py::test_new"]


@pytest.fixture
def recorded(suite):
    """A repository with a report of a test without a baseline."""
    git("init", "-q", "-b", "main")
    suite.write(".gitignore", "r.json\n")
    suite.write("test_it.py", "@pytest.mark.gpu_memory\ndef test_a(): mib(3)\n")
    commit("one")
    assert suite.run(REPORT).ret == 0
    return suite


def refused(gpumem, suite, *arguments):
    before = suite.baselines()
    status, out, err = gpumem("accept", "r.json", "--yes", *arguments)
    assert (status, out) == (2, "")
    assert suite.baselines() == before
    assert "Traceback" not in err
    return " ".join(err.split())


def test_another_commit_is_refused_unless_any_is_wanted(recorded, gpumem):
    first = git("rev-parse", "HEAD").strip()
    recorded.write("other.txt", "x")
    commit("two")
    second = git("rev-parse", "HEAD").strip()
    err = refused(gpumem, recorded)
    assert f"r.json: is from commit {first[:12]}, but {second[:12]} is checked out" in err
    assert f"git switch --detach {first[:12]}, or write --any-commit" in err
    assert gpumem("accept", "r.json", "--yes", "--any-commit")[0] == 0
    assert list(recorded.baselined()) == ["test_it.py::test_a"]


def test_the_merge_that_ci_tests_is_of_the_pull_requests_own_commit(recorded, gpumem, monkeypatch):
    git("checkout", "-qb", "topic")
    recorded.write("test_it.py", "@pytest.mark.gpu_memory\ndef test_a(): mib(4)\n")
    commit("two")
    head = git("rev-parse", "HEAD").strip()
    git("checkout", "-q", "main")
    recorded.write("other.txt", "x")
    commit("three")
    git("merge", "-q", "--no-ff", "-m", "merge", "topic")
    monkeypatch.setenv("GITHUB_REF", "refs/pull/7/merge")
    assert recorded.run(REPORT).ret == 0
    git("checkout", "-q", "topic")
    (origin,) = read_report("r.json").report.origins
    assert origin.head == head != origin.commit
    assert gpumem("accept", "r.json", "--yes")[0] == 0


def rewritten(change):
    saved = read_report("r.json")
    Path("r.json").write_text(dumps(change(saved.report), created=WHEN))


def test_a_commit_that_is_not_here_is_told_so(recorded, gpumem):
    """There git could not switch to it; and a report from anywhere puts no words into a command."""
    for commit_, words in (("0" * 40, "0" * 12), ("x; rm -rf . ", "x; rm -rf . ")):
        rewritten(
            lambda report, name=commit_: replace(
                report, origins=(replace(report.origins[0], commit=name),)
            )
        )
        err = refused(gpumem, recorded)
        assert f"is from commit {words.strip()}" in err
        assert "which this repository does not have; run git fetch if this is the repository" in err
        assert "git switch" not in err


def test_a_device_without_baselines_is_refused_unless_it_is_named(recorded, gpumem):
    recorded.run(UPDATE, "--gpumem-card=T4")
    err = refused(gpumem, recorded)
    assert (
        "there are baselines for virtual-T4 only: --device=virtual-H100 also accepts this device"
        in err
    )
    assert gpumem("accept", "r.json", "--yes", "--device=virtual-H100")[0] == 0
    assert len(recorded.baselines()) == 2


def test_figures_of_another_card_than_the_marker_s_are_refused(recorded, gpumem):
    rewritten(
        lambda report: replace(
            report, results=tuple(replace(result, card="T4") for result in report.results)
        )
    )
    assert "is not accepted: it declares card='T4'" in refused(gpumem, recorded)


@pytest.mark.parametrize(
    ("origin", "problem"),
    [
        (
            {"unfinished": "it was interrupted"},
            "is from a run that did not finish: it was interrupted",
        ),
        ({"root": "elsewhere"}, "is from another project: there is no file elsewhere/test_it.py"),
        ({"folder": "../out"}, "names a folder of baselines that is not in this repository"),
        ({"folder": "/tmp/out"}, "names a folder of baselines that is not in this repository"),
        ({"folder": ".git/hooks"}, "names a folder of baselines that is not in this repository"),
        ({"folder": "link"}, "names a folder of baselines that is not in this repository"),
        ({"folder": ""}, "names a folder of baselines that is not in this repository"),
        ({"folder": "a\0b"}, "names a folder of baselines that is not in this repository"),
    ],
)
def test_a_report_that_is_cut_short_or_of_elsewhere_is_refused(recorded, gpumem, origin, problem):
    (recorded.path / "link").symlink_to(recorded.path.parent)
    rewritten(lambda report: replace(report, origins=(replace(report.origins[0], **origin),)))
    assert problem in refused(gpumem, recorded)
    assert list(recorded.path.parent.glob("virtual-*")) == []


def test_broken_newer_old_and_foreign_files_are_refused(recorded, gpumem):
    whole = Path("r.json").read_text()
    for text, problem in (
        (whole[: len(whole) // 2], "is not JSON"),
        ("", "is empty"),
        ("<html><b>404</b>", "is not JSON"),
        (whole.replace('"format": 1', '"format": 2'), "was written by a newer pytest-gpumem"),
        ("[" * 100_000, "is nested too deeply"),
        ('{"format": 1, "gpumem": "x", "results": 4}', "is not a report of pytest-gpumem"),
        (whole.replace('"ranks": 0', '"ranks": -1'), "is not a report of pytest-gpumem"),
        (whole.replace('"origin": 0', '"origin": 9'), "has a result from a run that"),
    ):
        assert text != whole
        Path("r.json").write_text(text)
        assert problem in refused(gpumem, recorded)
    Path("r.json").write_text(json.dumps({**json.loads(whole), "origins": []}))
    assert "does not name its commit" in refused(gpumem, recorded)
    Path("r.json").unlink()
    assert "cannot be read: No such file" in refused(gpumem, recorded)


def test_a_baseline_that_cannot_be_read_keeps_all_from_being_written(recorded, gpumem):
    recorded.write("test_also.py", "@pytest.mark.gpu_memory\ndef test_b(): mib(3)\n")
    commit("two")
    recorded.run(REPORT)
    broken = recorded.write("baselines/virtual-H100/test_it.json", "{")
    assert "is not JSON" in refused(gpumem, recorded)
    assert broken.read_text() == "{\n"


def test_one_file_that_cannot_be_written_keeps_all_from_being_written(recorded, gpumem):
    """Of three files, one lies in a folder that cannot be made."""
    recorded.write("test_also.py", "@pytest.mark.gpu_memory\ndef test_b(): mib(3)\n")
    recorded.write(
        "zoo/test_b.py",
        "import pytest, torch\n"
        "@pytest.mark.gpu_memory\n"
        "def test_b(): torch.empty(9, device='cuda')\n",
    )
    commit("two")
    recorded.run(REPORT)
    (Path("baselines") / "virtual-H100").mkdir(parents=True)
    (Path("baselines") / "virtual-H100" / "zoo").symlink_to("/proc/nowhere")
    assert "zoo/test_b.json: cannot be written, and was not changed: " in refused(gpumem, recorded)
    assert not list(Path("baselines").rglob("*.gpumem.tmp*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no report: there is nothing to accept"),
        (["--run=https://example.org/x"], "this is not the address of a GitHub Actions run"),
        (["r.json", "--run=1"], "--run=1: with --run, reports come from that run only"),
        (["r.json", "-k", "a and"], "-k a and: this is no expression of names"),
    ],
)
def test_bad_arguments_are_named(recorded, gpumem, arguments, message):
    status, out, err = gpumem("accept", *arguments)
    assert (status, out) == (2, "")
    assert message in err


def test_expressions_are_pytests():
    assert chooser("a and not b")("x::Atest")
    assert not chooser("a and not b")("x::a_b")
    assert chooser("(one or two) and [1]")("t.py::two[1]")
    for bad in (
        "",
        "not",
        "(a",
        "a b",
        "a)",
        "and",
        "a (b)",
        "(" * 500 + "a" + ")" * 500,
        "not " * 30_000 + "a",
    ):
        with pytest.raises(SpecError):
            chooser(bad)


# From a run of GitHub Actions


GH = """#!/bin/sh
printf '%s\\n' "$@" > "$GH_LOG"
[ -z "$GH_FAILS" ] || { echo "HTTP 404: Not Found" >&2; exit 1; }
while [ "$1" != --dir ]; do shift; done
mkdir -p "$2/gpu-memory" && cp "$GH_REPORT" "$2/gpu-memory/gpumem.json"
echo '{"other": 1}' > "$2/gpu-memory/junit.json"
"""


@pytest.fixture
def gh(recorded, monkeypatch, tmp_path_factory):
    """A stand-in for gh on the search path, which downloads r.json."""
    folder = tmp_path_factory.mktemp("bin")
    program = folder / "gh"
    program.write_text(GH)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("GH_LOG", str(folder / "log"))
    monkeypatch.setenv("GH_REPORT", str(recorded.path / "r.json"))
    return folder


def test_a_run_of_github_is_accepted_by_its_address(recorded, gh, gpumem):
    url = "https://github.com/o/r/actions/runs/123"
    status, _, err = gpumem("accept", "--run", url, "--artifact", "gpu-memory", "--yes")
    assert (status, err) == (0, "")
    assert list(recorded.baselined()) == ["test_it.py::test_a"]
    words = (gh / "log").read_text().split()
    assert words[:3] == ["run", "download", "123"]
    assert words[5:] == ["--repo", "github.com/o/r", "--pattern", "gpu-memory"]


def test_what_gh_says_and_a_missing_gh_are_told(recorded, gh, gpumem, monkeypatch):
    monkeypatch.setenv("GH_FAILS", "1")
    status, _, err = gpumem("accept", "--run", "123")
    assert (status, "gh says: HTTP 404: Not Found" in err) == (2, True)
    monkeypatch.setenv("PATH", os.path.dirname(subprocess.getoutput("command -v git")) + "/none")  # noqa: PTH120
    status, _, err = gpumem("accept", "--run", "123")
    assert (status, "the gh command is not on the search path" in err) == (2, True)


# The command that reports print


def test_failures_and_summaries_print_the_command_with_the_artifacts_name(grown, monkeypatch):
    for name, value in (
        ("GITHUB_ACTIONS", "true"),
        ("GITHUB_SERVER_URL", "https://github.com"),
        ("GITHUB_REPOSITORY", "o/r"),
        ("GITHUB_RUN_ID", "123"),
        ("GITHUB_STEP_SUMMARY", str(grown.path / "summary.md")),
    ):
        monkeypatch.setenv(name, value)
    command = "gpumem accept --run https://github.com/o/r/actions/runs/123 --artifact gpu-memory"
    session = grown.run(REPORT, "--gpumem-artifact=gpu-memory")
    assert f"    {command}\n" in session.out + "\n"
    assert f"on another machine: {command}" in session.out
    assert f"```sh\n{command}\n```" in (grown.path / "summary.md").read_text()
    (accept,) = {r.verdict.accept for r in read_report("r.json").results if r.verdict.failed}
    assert accept == command
    assert "gpumem accept" not in grown.run("--gpumem-artifact=gpu-memory").out


def test_elsewhere_the_command_names_the_artifacts_file(grown, monkeypatch):
    assert "gpumem accept" not in grown.run(REPORT).out
    assert "gpumem accept gpu/r.json" in grown.run(REPORT, "--gpumem-artifact=gpu").out
    monkeypatch.setenv("CI", "true")
    assert "    gpumem accept r.json" in grown.run(REPORT).out
