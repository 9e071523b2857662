"""An update of baselines that is killed, or to which the system says no, at any of its calls."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from helpers.paths import HELPERS
from helpers.sources import program
from helpers.virtual_gpu import run_python

SOURCE = HELPERS / "faults.c"


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """A library that is preloaded: one call that changes what is on disk fails, or is the last."""
    compiler = os.environ.get("CC", "").split() or [shutil.which("cc") or shutil.which("gcc") or ""]
    if not compiler[0]:
        pytest.skip("needs a C compiler")
    library = tmp_path_factory.mktemp("faults") / "libfaults.so"
    command = [*compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return library


SCRIPT = program("faulty_updates.py")


def outcomes(folder, library, before, code):
    """Of an update of two files with a fault at its first, second, ... call, each: the status it
    ended with, each file's state, the files left behind, and what the next update says."""
    done = run_python(SCRIPT, str(folder), before, str(code), LD_PRELOAD=str(library))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("before", ["old", "nothing"])
def test_killed_at_any_call_it_leaves_each_file_old_or_new(tmp_path, faults, before):
    found = outcomes(tmp_path, faults, before, 0)
    assert len(found) > 20
    assert {status for status, *_ in found} == {-9}
    assert {tuple(states) for _, states, *_ in found} == {
        ("old", "old"),
        ("old", "new"),  # "test_b.py" is written first
        ("new", "new"),
    }
    assert {name for *_, left, _ in found for name in left} == {".gpumem.tmp"}
    assert [again for *_, again in found if again] == []


@pytest.mark.parametrize("before", ["old", "nothing"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS], ids=["full", "read-only"])
def test_refused_any_call_it_leaves_nothing_behind_and_says_so(tmp_path, faults, before, code):
    found = outcomes(tmp_path, faults, before, code)
    assert len(found) > 20
    for status, states, left, again in found:
        assert status in (0, 1)
        assert set(states) <= {"old", "new"}
        assert left == again == []
        if status == 0:  # the folder's name was not synced, or the lock not given back
            assert states == ["new", "new"]
    assert sum(status == 1 for status, *_ in found) > 10


READ_ONLY = """
import os, sys
from pathlib import Path
from pytest_gpumem.baselines.store import BaselineStore, NewBaseline
from pytest_gpumem.measurement import BaselineEntry, DeviceInfo, Peak, Provenance

folder, closed = Path(sys.argv[1]), sys.argv[2]
MADE = Provenance("2.15.0", "13.2", "92600", "virtual", "")
T4 = DeviceInfo("virtual", "T4", 15_828_320_256, (7, 5), 40)
store = BaselineStore(folder)
path = store.path("virtual-T4", "test_a.py")

def change(size):
    return NewBaseline(T4, "test_a.py", "test_it", {"": BaselineEntry((Peak(size, size),), MADE)})

store.update([change(1)])
assert store.get("virtual-T4", "test_a.py", "test_it")  # and all that reading needs is imported
before = path.read_bytes()
folder.chmod(0o777)
(folder / ".gpumem.lock").chmod(0o666 if closed != "lock" else 0)
{"device": path.parent}.get(closed, path).chmod({"device": 0o555, "file": 0}.get(closed, 0o644))
if os.geteuid() == 0:  # whom no mode keeps from writing
    pid = os.fork()
    if pid:
        status = os.waitpid(pid, 0)[1]
        assert path.read_bytes() == before
        sys.exit(os.WEXITSTATUS(status))
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
print(*store.update([change(2)]).errors)
print(sorted(it.name for it in folder.rglob("*") if it.suffix in {".json", ".lock"}), flush=True)
"""


@pytest.mark.parametrize(
    ("closed", "problem"),
    [
        ("lock", ".gpumem.lock: cannot be locked: Permission denied; make the folder writable"),
        ("device", "test_a.json: cannot be written, and was not changed: Permission denied; free"),
        ("file", "test_a.json: cannot be read: Permission denied; move it away"),
    ],
)
def test_a_folder_or_a_file_without_permission_is_an_error(closed, problem):
    """As another user than root, who may write everywhere."""
    with tempfile.TemporaryDirectory() as name:  # tmp_path is within a folder of this user's own
        folder = Path(name)
        folder.chmod(0o755)
        done = run_python(READ_ONLY, str(folder / "baselines"), closed)
        for path in (*folder.rglob("*"), folder):
            path.chmod(0o755)
    assert done.returncode == 0, done.stderr
    error, names = done.stdout.splitlines()
    assert problem in error
    assert names == "['.gpumem.lock', 'test_a.json']"
