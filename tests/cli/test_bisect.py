"""``gpumem bisect``: the release that brought a growth, from environments of their own.

The environments are made by a stand-in for uv: a folder with a ``pytest`` that writes the report
of the version that was "installed" in it.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest
from helpers.judged import NOW, PLAIN, measured

from pytest_gpumem.cli.bisect import candidates, installation
from pytest_gpumem.cli.bisect.halving import Halving
from pytest_gpumem.cli.bisect.installation import (
    Environment,
    SetupError,
    UnreachedError,
    completed,
    reason_of,
)
from pytest_gpumem.judge.judge import judge
from pytest_gpumem.judge.result import Result
from pytest_gpumem.judge.verdict import Lookup, Policy
from pytest_gpumem.measurement import OutOfMemory
from pytest_gpumem.report.json_report import dumps
from pytest_gpumem.report.model import Report
from pytest_gpumem.sizes import MIB
from pytest_gpumem.version import __version__

if TYPE_CHECKING:
    from pathlib import Path

TEST = "tests/test_step.py::test_step"
RELEASES = ("1.0", "1.1", "1.2", "1.10", "2.0", "2.1", "3.0")

UV = """#!{python}
import json, os, sys
from pathlib import Path

words = sys.argv[1:]
with open({calls!r}, "a") as calls:
    calls.write(json.dumps(words) + "\\n")
if words[0] == "venv":
    folder = Path(words[-1])
    (folder / "bin").mkdir(parents=True)
    (folder / "site").mkdir()
    python = folder / "bin/python"
    python.write_text(f"#!/bin/sh\\necho {{folder}}/site\\n")
    python.chmod(0o755)
else:
    folder = Path(words[words.index("--python") + 1]).parents[1]
    (package,) = [word for word in words if "lib==" in word]
    version = package.partition("==")[2]
    if version in {broken!r}:
        sys.exit("error: no wheel of lib==" + version)
    reports = Path({reports!r})
    pytest = folder / "bin/pytest"
    pytest.write_text(
        "#!/bin/sh\\n"
        f"echo \\"$@\\" >> {{reports}}/runs\\n"
        'for word; do case $word in --gpumem-json=*) to=${{word#--gpumem-json=}};; esac; done\\n'
        f"if [ -f {{reports}}/{{version}}.json ]; then cp {{reports}}/{{version}}.json $to; else\\n"
        "echo 'E   ImportError: lib has no step'; exit 2; fi\\n"
    )
    pytest.chmod(0o755)
"""


class Suite:
    """A folder with tests, and what they would take with each version of a package."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reports = folder / "reports"
        self.reports.mkdir()
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.calls = folder / "calls"
        self.stand_in()

    def stand_in(self, broken=()):
        """Put the stand-in for uv on the path; versions that are broken do not install."""
        uv = self.bin / "uv"
        names = {"calls": str(self.calls), "reports": str(self.reports), "broken": list(broken)}
        uv.write_text(UV.format(python=sys.executable, **names), encoding="utf-8")
        uv.chmod(0o755)

    def takes(self, version, mib, *, out_of_memory=False, pinned=0, torch=NOW.torch):
        """Say what the test takes with a version, in MiB."""
        step = measured((int(mib * MIB), int(mib * MIB), pinned * MIB))
        step = replace(step, provenance=replace(NOW, torch=torch))
        if out_of_memory:
            step = replace(step, out_of_memory=OutOfMemory(0, MIB, 50 * MIB, ""))
        result = Result(TEST, judge(step, PLAIN, Lookup(), Policy()), step)
        text = dumps(Report((result,)), created="2026-11-23T06:00:00Z")
        (self.reports / f"{version}.json").write_text(text, encoding="utf-8")

    def tried(self):
        """The versions that were installed, in their order; it forgets them."""
        if not self.calls.exists():
            return []
        calls = [json.loads(line) for line in self.calls.read_text("utf-8").splitlines()]
        self.calls.unlink()
        found = [word for words in calls for word in words if words[0] == "pip"]
        return [word.partition("==")[2] for word in found if word.startswith("lib==")]


@pytest.fixture
def suite(tmp_path, monkeypatch):
    made = Suite(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(made.bin), prepend=":")
    monkeypatch.setattr(candidates, "offered_releases", lambda *_, **__: list(reversed(RELEASES)))
    file = tmp_path / TEST.partition("::")[0]
    file.parent.mkdir()
    file.touch()
    for version in RELEASES:
        made.takes(version, 100 if version in RELEASES[:4] else 160)
    return made


def bisect(gpumem, *words):
    return gpumem("bisect", "lib", "1.0", "3.0", TEST, *words)


def test_it_names_the_first_release_that_takes_more_and_both_figures(gpumem, suite):
    status, output, errors = bisect(gpumem)
    assert status == 0, errors
    assert output.startswith(
        "lib 2.0 is the first that takes more:\n"
        f"peak allocated of {TEST}: 100.00 MiB -> 160.00 MiB (+60.00 MiB)\n"
    )
    assert suite.tried() == ["1.0", "3.0", "1.10", "2.0"]
    assert "7 releases of lib from 1.0 to 3.0: at most 5 to try" in errors
    assert "  1.10: 100.00 MiB, good\n" in errors


def test_the_answer_is_written_with_exact_bytes_for_programs(gpumem, suite):
    answer = suite.folder / "answer.json"
    assert bisect(gpumem, f"--json={answer}")[0] == 0
    found = json.loads(answer.read_text(encoding="utf-8"))
    assert found == {
        "package": "lib",
        "good": "1.0",
        "bad": "3.0",
        "skipped": [],
        "found": "2.0",
        "before": "1.10",
        "takes": "more",
        "nodeid": TEST,
        "part": "",
        "device": found["device"],
        "device_index": 0,
        "peak": "allocated",
        "bytes_before": 100 * MIB,
        "bytes_found": 160 * MIB,
        "cause": "",
    }
    suite.stand_in(broken=["1.10"])
    suite.takes("2.0", 50, out_of_memory=True)
    suite.takes("3.0", 50, out_of_memory=True)
    assert bisect(gpumem, f"--json={answer}", "--fresh")[0] == 0
    found = json.loads(answer.read_text(encoding="utf-8"))
    assert found["bytes_found"] is None
    suite.takes("3.0", 100)
    assert bisect(gpumem, f"--json={answer}", "--fresh")[0] == 1
    assert json.loads(answer.read_text(encoding="utf-8"))["found"] is None
    for version in RELEASES:
        suite.takes(version, 100 if version in RELEASES[4:] else 160)
    words = ("lib", "3.0", "1.0", TEST, f"--json={answer}", "--fresh")
    suite.stand_in()
    assert gpumem("bisect", *words)[0] == 0
    found = json.loads(answer.read_text(encoding="utf-8"))
    assert [found[name] for name in ("found", "takes", "before")] == ["2.0", "less", "1.10"]
    assert (found["bytes_before"], found["bytes_found"]) == (160 * MIB, 100 * MIB)


def test_a_search_goes_on_where_it_was_and_begins_anew_if_asked(gpumem, suite):
    first = bisect(gpumem)[1]
    suite.tried()
    kept = suite.folder / ".gpumem-bisect"
    for path in kept.glob("*/2.0.json"):
        path.unlink()  # as if the search had been interrupted there
    assert bisect(gpumem)[1] == first
    assert suite.tried() == ["2.0"]
    bisect(gpumem, "--fresh")
    assert len(suite.tried()) == 4
    assert (kept / ".gitignore").read_text(encoding="utf-8") == "*\n"
    suite.tried()
    bisect(gpumem, "--light")  # what was skipped without it may be installed
    assert suite.calls.exists()


@pytest.mark.parametrize("named", [TEST, "tests"])
def test_what_an_edited_test_takes_is_measured_anew(gpumem, suite, named):
    file = suite.folder / "tests/test_step.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text("first = 1\n")
    gpumem("bisect", "lib", "1.0", "3.0", named)
    assert len(suite.tried()) == 4
    gpumem("bisect", "lib", "1.0", "3.0", named)
    assert suite.tried() == []
    file.write_text("second = 2\n")
    gpumem("bisect", "lib", "1.0", "3.0", named)
    assert len(suite.tried()) == 4


@pytest.mark.parametrize("folder", [".venv/lib", "env/lib/site-packages/lib"])
def test_what_is_installed_in_a_folder_of_tests_is_none_of_them(gpumem, suite, folder):
    """The search's own environments lie there too, one after the other."""
    file = suite.folder / folder / "module.py"
    file.parent.mkdir(parents=True)
    file.write_text("first = 1\n")
    gpumem("bisect", "lib", "1.0", "3.0", ".")
    assert len(suite.tried()) == 4
    file.write_text("second = 2\n")
    gpumem("bisect", "lib", "1.0", "3.0", ".")
    assert suite.tried() == []


def test_a_report_that_was_cut_short_is_measured_anew(gpumem, suite):
    first = bisect(gpumem)[1]
    suite.tried()
    (path,) = (suite.folder / ".gpumem-bisect").glob("*/2.0.json")
    path.write_text(path.read_text(encoding="utf-8")[:100], encoding="utf-8")
    assert bisect(gpumem)[1] == first
    assert suite.tried() == ["2.0"]


def test_releases_that_do_not_install_or_run_are_skipped_and_named(gpumem, suite):
    suite.stand_in(broken=["1.10"])
    (suite.reports / "2.0.json").unlink()
    status, output, errors = bisect(gpumem)
    assert status == 0
    assert (
        "lib 2.1 takes more, and 1.2 does not; these versions between them were skipped: 1.10, 2.0"
        in output
    )
    assert "  1.10: skipped, this version cannot be installed: no wheel of lib==1.10\n" in errors
    assert "  2.0: skipped, its tests do not run: ImportError: lib has no step (" in errors


def test_an_end_that_cannot_be_tried_ends_the_search_with_its_reason(gpumem, suite):
    suite.stand_in(broken=["3.0"])
    status, output, errors = bisect(gpumem)
    assert (status, output) == (2, "")
    assert "lib 3.0: the search needs both ends" in errors
    assert "no wheel of lib==3.0" in errors


def test_an_end_in_which_no_test_is_measured_ends_the_search(gpumem, suite):
    text = dumps(Report(()), created="2026-11-23T06:00:00Z")
    (suite.reports / "3.0.json").write_text(text, encoding="utf-8")
    status, output, errors = bisect(gpumem)
    assert (status, output) == (2, "")
    assert "lib 3.0: the search needs both ends" in errors
    assert "no test was measured with this version" in errors


def test_nothing_that_grew_is_told_with_the_table(gpumem, suite):
    suite.takes("3.0", 100.5)  # within the tolerance
    status, output, _ = bisect(gpumem)
    assert status == 1
    assert output.startswith("nothing grew between lib 1.0 and 3.0\n")


def test_growth_of_several_releases_leads_to_the_largest_and_names_the_rest(gpumem, suite):
    suite.takes("1.1", 110)
    suite.takes("1.2", 110)
    suite.takes("1.10", 110)
    status, output, _ = bisect(gpumem)
    assert status == 0
    assert "110.00 MiB -> 160.00 MiB (+50.00 MiB)" in output
    assert "+10.00 MiB of the growth came between 1.0 and 1.10: search there too" in output


def test_a_newer_release_that_takes_less_is_found_from_the_other_end(gpumem, suite):
    for version in RELEASES[4:]:
        suite.takes(version, 60)
    status, output, _ = gpumem("bisect", "lib", "3.0", "1.0", TEST)
    assert status == 0
    assert output.startswith(
        "lib 2.0 is the first that takes less:\n"
        f"peak allocated of {TEST}: 100.00 MiB -> 60.00 MiB (-40.00 MiB)\n"
    )


@pytest.mark.parametrize(("before", "words"), [(0, "0 B"), (64, "64.00 MiB")])
def test_growth_of_pinned_memory_alone_is_found(gpumem, suite, before, words):
    for version in RELEASES:
        suite.takes(version, 100, pinned=before if version in RELEASES[:4] else 128)
    status, output, _ = bisect(gpumem)
    assert status == 0
    assert output.startswith(
        f"lib 2.0 is the first that takes more:\npeak pinned of {TEST}: {words} -> 128.00 MiB (+"
    )


def test_a_torch_that_begins_to_count_pinned_memory_is_no_growth(gpumem, suite):
    for version in RELEASES:
        old = version in RELEASES[:4]
        suite.takes(version, 100, pinned=0 if old else 128, torch="2.9.1" if old else "2.10.0")
    status, output, _ = bisect(gpumem)
    assert (status, output.startswith("nothing grew")) == (1, True)


def test_a_test_that_runs_out_of_memory_is_bad(gpumem, suite):
    for version in RELEASES[2:]:
        suite.takes(version, 50, out_of_memory=True)
    output = bisect(gpumem)[1]
    assert "lib 1.2 is the first that takes more" in output
    assert "100.00 MiB -> out of memory" in output


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("lib", "1.0", "3.0"), "a package, two releases and a test are needed"),
        (("lib", "3.0", "3.0", TEST), "these are the same release"),
        (("lib", "1.0", "9.0", TEST), "lib 9.0: the package index has no such release"),
        (("lib", "first", "3.0", TEST), "'first' is not a version"),
        (("./lib", "1.0", "3.0", TEST), "the commits of a repository with git bisect run pytest"),
        (("lib", "1.0", "3.0", "tests/test_no.py::test_step"), "has no such file or folder; name"),
        (("lib", "1.0", "3.0", TEST, "tests/no"), "has no such file or folder; name a test"),
    ],
)
def test_arguments_that_cannot_be_used_are_told(gpumem, suite, words, problem):
    status, output, errors = gpumem("bisect", *words)
    assert (status, output) == (2, "")
    assert problem in errors
    assert not suite.calls.exists()


def test_a_module_s_name_is_pytest_s_to_find(gpumem, suite):
    status, output, errors = gpumem("bisect", "lib", "1.0", "3.0", "lib.tests", "--", "--pyargs")
    assert (status, errors.count("no such file")) == (0, 0)
    assert output.startswith("lib 2.0 is the first that takes more:")


def test_builds_of_a_release_for_another_index_are_not_tried(gpumem, suite, monkeypatch):
    offered = [*RELEASES, "1.1+cpu", "2.0+cpu"]
    monkeypatch.setattr(candidates, "offered_releases", lambda *_, **__: offered)
    assert "7 releases of lib from 1.0 to 3.0" in bisect(gpumem)[2]
    suite.takes("1.1+cpu", 160)
    assert "lib 1.1+cpu is the first" in gpumem("bisect", "lib", "1.0", "1.1+cpu", TEST)[1]


PIP_WITHOUT_NETWORK = """
import sys
if sys.argv[-1] == "lib":
    print("Available versions: 2.0")  # of a folder of wheels
for left in (1, 0):
    print(f"WARNING: Retrying (Retry(total={left}, read=None)) after connection broken by "
          "'NewConnectionError: Connection refused': /simple/lib/", file=sys.stderr)
"""


def test_without_a_network_no_release_is_said_to_be_missing(gpumem, tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}{PIP_WITHOUT_NETWORK}", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(candidates.sys, "executable", str(program))
    (tmp_path / "test_it.py").touch()
    for package in ("lib", "other"):
        status, output, errors = gpumem("bisect", package, "1.0", "2.0", "test_it.py")
        assert (status, output) == (2, "")
        assert f"gpumem bisect {package}: pip cannot reach the package index (" in errors
        assert "Connection refused" in errors
        assert "; connect to the network, or correct pip's proxy" in errors


def test_a_release_that_no_index_answered_for_is_tried_again(gpumem, suite):
    first = bisect(gpumem)[1]
    (path,) = (suite.folder / ".gpumem-bisect").glob("*/2.0.json")
    path.unlink()
    said = "error: Request failed after 3 retries\n  cause: Failed to fetch: https://pypi.org/lib/"
    uv = suite.bin / "uv"
    uv.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 2\n", encoding="utf-8")
    status, output, errors = bisect(gpumem)
    assert (status, output) == (2, "")
    assert (
        "gpumem: lib 2.0: no package index answers: Request failed after 3 retries: Failed to "
        "fetch: https://pypi.org/lib/; connect to the network, and repeat the command"
    ) in errors
    suite.stand_in()
    suite.tried()
    assert bisect(gpumem)[1] == first
    assert suite.tried() == ["2.0"]


UPLOADS = {
    "lib": {"1.0": "2025-01-01", "1.1": "2025-02-01", "1.2": "2025-03-01", "2.0": "2025-04-01"},
    "lib-zoo": {
        "0.1": "2024-12-01",
        "0.2": "2025-02-01",
        "0.3": "2025-02-02",
        "0.4": "2025-02-20",
        "0.5rc1": "2025-02-21",
        "0.6": "2025-06-01",
    },
}


@pytest.fixture
def index(monkeypatch):
    """A package index that tells when files were uploaded."""

    class Index(BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.strip("/").rpartition("/")[2]
            releases = UPLOADS.get(name)
            self.send_response(200 if releases else 404)
            self.end_headers()
            if not releases:
                return
            files = [
                {
                    "filename": f"{name.replace('-', '_')}-{version}-py3-none-any.whl",
                    "upload-time": f"{day}T10:00:00.123456Z",
                }
                for version, day in releases.items()
            ]
            withdrawn = {**files[-1], "filename": "lib_zoo-0.31.tar.gz", "yanked": "broken"}
            withdrawn["upload-time"] = "2025-02-03T00:00:00Z"
            old = {"filename": "lib-of-old.exe", "upload-time": "2001-01-01T00:00:00Z"}
            files += [withdrawn, old]
            self.wfile.write(json.dumps({"files": files}).encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Index)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple/")
    candidates._upload_times.cache_clear()
    yield
    server.shutdown()
    server.server_close()


@pytest.mark.usefixtures("index")
def test_a_package_that_is_released_together_is_of_the_day(gpumem, suite):
    monthly = {"1.0": "0.1", "1.1": "0.3", "1.2": "0.4", "2.0": "0.4"}
    for version, other in monthly.items():
        assert candidates.release_of_the_day("lib", version, "lib_zoo") == other
    words = ("bisect", "lib", "1.0", "1.1", TEST)
    status, output, _ = gpumem(*words, "--as-of", "lib_zoo")
    assert status == 1, output  # nothing grew
    calls = [json.loads(line) for line in suite.calls.read_text("utf-8").splitlines()]
    installed = [set(words) & {"lib_zoo==0.1", "lib_zoo==0.3"} for words in calls if "pip" in words]
    assert installed == [{"lib_zoo==0.1"}, {"lib_zoo==0.3"}]
    # Without the option, the answers are not those of another question.
    assert gpumem(*words)[0] == 1
    assert suite.tried() == ["1.0", "1.1", "1.0", "1.1"]


@pytest.mark.usefixtures("index")
def test_upload_times_that_are_not_told_are_an_error(gpumem, suite):
    command = ("bisect", "lib", "1.0", "2.1", TEST, "--as-of")
    status, _, errors = gpumem(*command, "lib_zoo")
    assert status == 2
    assert "--as-of lib_zoo lib 2.1: the index does not tell when this release" in errors
    assert suite.tried() == ["1.0"]  # the other end, whose day is told
    status, _, errors = gpumem(*command, "unknown")
    assert status == 2
    assert "--as-of unknown: the package index does not tell upload times at http" in errors
    assert "PIP_INDEX_URL" in errors
    assert not suite.tried()


def test_tests_run_without_baselines_and_options_behind_two_dashes_are_pytest_s(gpumem, suite):
    bisect(gpumem, "--device=virtual", "--with", "numpy<2", "--", "-k", "step")
    run = (suite.reports / "runs").read_text(encoding="utf-8").splitlines()[0]
    assert run.startswith(f"{TEST} -k step ")
    for option in ("--gpumem-device=virtual", "--gpumem-attribution=on", "no-baselines"):
        assert option in run
    installs = [json.loads(line) for line in suite.calls.read_text("utf-8").splitlines()]
    assert "numpy<2" in installs[1]


@pytest.mark.parametrize("first_bad", range(1, 20))
def test_a_search_finds_the_first_bad_version_in_few_trials(first_bad):
    search = Halving([str(number) for number in range(20)])
    most = search.trials_left
    trials = 0
    while (index := search.next_index) is not None:
        search.note(index, is_bad=index >= first_bad)
        trials += 1
    assert (search.first_bad, search.untried) == (first_bad, [])
    assert trials <= most == 5


def test_a_search_has_the_skipped_versions_that_may_be_the_first_bad_one():
    search = Halving(list("abcdefg"), skipped={2, 3, 4})
    while (index := search.next_index) is not None:
        search.note(index, is_bad=index >= 4)
    assert (search.last_good, search.first_bad, search.untried) == (1, 5, ["c", "d", "e"])


def test_this_package_s_requirements_are_installed_with_the_torch_that_is_here(monkeypatch):
    monkeypatch.setattr(installation, "installed_version", lambda _: "2.15.0+cu130")
    assert "torch==2.15.0" in completed(["transformers==4.37.2"])
    own = completed(["torch==2.9.1", "pytest<9"])
    assert own[:2] == ["torch==2.9.1", "pytest<9"]
    assert not [line for line in own[2:] if line.startswith(("torch", "pytest"))]


def test_the_environment_has_this_package_and_its_plugin(tmp_path, monkeypatch):
    monkeypatch.setattr(installation.shutil, "which", lambda _: None)  # no uv
    made = Environment(tmp_path / "environment", tmp_path / "log")
    commands = []
    plain_run = Environment._run

    def run(self, command):
        commands.append(command)
        if "install" in command:
            return ""
        return plain_run(self, [*command, "--without-pip"] if "venv" in command else command)

    monkeypatch.setattr(Environment, "_run", run)
    made.make(["lib==1.0"])
    program = (
        "from importlib.metadata import entry_points, version; import pytest_gpumem.version; "
        "print(version('pytest-gpumem'), *entry_points(group='pytest11', name='gpumem'))"
    )
    command = [str(made.python), "-c", program]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.startswith(f"{__version__} EntryPoint(name='gpumem'")
    assert commands[1][:5] == [str(made.python), "-m", "pip", "install", "--quiet"]
    made.remove()
    assert not made.folder.exists()


@pytest.fixture
def set_up_that_fails(tmp_path, monkeypatch):
    """An environment whose installer ends with a message."""

    def failing(said):
        uv = tmp_path / "uv"
        uv.write_text(f"#!/bin/sh\nprintf %s {shlex.quote(said)} >&2\nexit 1\n", encoding="utf-8")
        uv.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        return Environment(tmp_path / "environment", tmp_path / "log")

    return failing


def test_a_set_up_without_a_network_has_the_reason_of_pip_s_last_try(set_up_that_fails):
    said = (
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'Refused': /lib/\n"
        "ERROR: Could not find a version that satisfies the requirement lib==9\n"
    )
    with pytest.raises(UnreachedError, match="^connection broken by 'Refused': /lib/$"):
        set_up_that_fails(said).make(["lib==9"])


def test_a_set_up_that_fails_has_the_installer_s_reason(set_up_that_fails):
    made = set_up_that_fails("ERROR: no such thing")
    with pytest.raises(SetupError, match="no such thing"):
        made.make(["lib==9"])
    command, *said = made.log.read_text(encoding="utf-8").splitlines()
    assert command.startswith("$ ")
    assert "no such thing" in "".join(said)


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (
            "WARNING: old\nERROR: Could not find lib==9\nERROR: No matching distribution",
            "Could not find lib==9",
        ),
        ("  × No solution found\n  ╰─▶ no lib==9", "No solution found: no lib==9"),  # noqa: RUF001
        ("error: No solution\n  cause: no lib==9\n  cause: other", "No solution: no lib==9"),
        ("boom", "boom"),
        ("", "exit status 3"),
    ],
)
def test_the_reason_is_the_installer_s_first_error(output, reason):
    assert reason_of(output, 3) == reason


def test_the_answer_replaces_no_file_of_others(gpumem, suite):
    mine = suite.folder / "mine.json"
    mine.write_text("{}")
    status, _, errors = bisect(gpumem, f"--json={mine}")
    assert status == 2
    assert f"--json={mine}: this file exists, and was not written by this option" in errors
    assert (mine.read_text(), suite.tried()) == ("{}", [])
