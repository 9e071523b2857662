"""Several processes at one folder, and a process that is killed: nothing is lost or half done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import filelock
import pytest
from helpers.warm import HANGS

import pytest_gpumem.errors
from pytest_gpumem.baselines.store import BaselineStore, NewBaseline
from pytest_gpumem.measurement import BaselineEntry, DeviceInfo, Peak, Provenance

ROOT = Path(pytest_gpumem.errors.__file__).parents[1]
T4 = DeviceInfo("virtual", "T4", 15_828_320_256, (7, 5), 40)
MADE = Provenance("2.15.0", "13.2", "92600", "virtual", "")
MODULE = "tests/test_m.py"


def entry(size):
    return BaselineEntry((Peak(size, size),), MADE)


def change(test, size=1, module=MODULE):
    return NewBaseline(T4, module, test, {"": entry(size)})


def before_locking(act, monkeypatch):
    """Let something happen between an update's first look and its lock, once."""
    acquire = filelock.FileLock.acquire

    def acquire_late(lock, *args, **kwargs):
        monkeypatch.setattr(filelock.FileLock, "acquire", acquire)
        act()
        return acquire(lock, *args, **kwargs)

    monkeypatch.setattr(filelock.FileLock, "acquire", acquire_late)


def test_what_another_process_wrote_meanwhile_is_kept(store, directory, monkeypatch):
    store.update([change("test_a")])
    before_locking(lambda: BaselineStore(directory).update([change("test_b", 5)]), monkeypatch)
    store.update([change("test_a", 7)])
    assert store.get("virtual-T4", MODULE, "test_b") == entry(5)
    assert store.get("virtual-T4", MODULE, "test_a") == entry(7)


def test_what_another_process_wrote_alike_is_not_written_again(store, directory, monkeypatch):
    store.update([change("test_a")])
    before_locking(lambda: BaselineStore(directory).update([change("test_a", 7)]), monkeypatch)
    summary = store.update([change("test_a", 7)])
    assert summary.files == summary.changed == ()
    assert [it.new for it in summary.unchanged] == [entry(7)]


def test_a_lock_that_is_not_given_back_is_an_error_that_says_so(directory):
    store = BaselineStore(directory, lock_timeout=0.05)
    store.update([change("test_a")])
    with filelock.FileLock(directory / ".gpumem.lock"):
        summary = store.update([change("test_a", 7), change("test_a", module="m.py")])
    (error,) = summary.errors
    assert str(error) == (
        f"{directory}/.gpumem.lock: another process has held it for 0.05 s; wait until "
        "that process has finished, and run this command again"
    )
    assert summary.created == summary.changed == summary.files == ()
    assert BaselineStore(directory).get("virtual-T4", MODULE, "test_a") == entry(1)


def test_two_names_of_a_folder_are_one_lock(directory, tmp_path):
    directory.mkdir()
    link = tmp_path / "link"
    link.symlink_to(directory)
    with filelock.FileLock(directory / ".gpumem.lock"):
        assert BaselineStore(link, lock_timeout=0.05).update([change("test_a")]).errors


def run(script, *arguments):
    """Run a script in a process of its own."""
    command = [sys.executable, "-c", PRELUDE + script, *map(str, arguments)]
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen(
        command,
        env={**os.environ, **paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


PRELUDE = """
import json, os, resource, signal, sys, time
from pathlib import Path
from pytest_gpumem.baselines.store import BaselineStore, NewBaseline
from pytest_gpumem.measurement import BaselineEntry, DeviceInfo, Peak, Provenance

MADE = Provenance("2.15.0", "13.2", "92600", "virtual", "")
T4 = DeviceInfo("virtual", "T4", 15_828_320_256, (7, 5), 40)
store = BaselineStore(Path(sys.argv[1]), lock_timeout=600)

def change(test, allocated):
    entry = BaselineEntry((Peak(allocated, allocated),), MADE)
    return NewBaseline(T4, "tests/test_m.py", test, {"": entry})
"""


def output(process):
    out, err = process.communicate(timeout=HANGS)
    assert process.returncode == 0, err
    return json.loads(out)


def test_two_processes_that_update_at_once_lose_nothing(tmp_path):
    script = """
(Path(sys.argv[1]) / sys.argv[2]).touch()
while len(list(Path(sys.argv[1]).glob("ready-*"))) < 2:
    time.sleep(0.001)
errors = []
for i in range(60):
    errors += map(str, store.update([change(f"{sys.argv[2]}-{i}", i)]).errors)
print(json.dumps(errors))
"""
    processes = [run(script, tmp_path, name) for name in ("ready-a", "ready-b")]
    assert [output(process) for process in processes] == [[], []]
    store = BaselineStore(tmp_path)
    for name in ("ready-a", "ready-b"):
        for i in range(60):
            assert store.get("virtual-T4", MODULE, f"{name}-{i}").peaks == (Peak(i, i),)


KILL = """
def trace(limit):
    "Kill this process at the given line, counted from where it begins to replace the file."
    begun = False
    def step(frame, event, argument):
        nonlocal limit
        limit -= event == "line"
        if limit < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return step
    def call(frame, event, argument):
        nonlocal begun
        begun = begun or frame.f_code.co_name == "replace_file"
        ours = any(it in frame.f_code.co_filename for it in ("baseline_disk", "pathlib"))
        return step if begun and ours else None
    return call

def killed_at(limit, update):
    pid = os.fork()
    if pid == 0:
        sys.settrace(trace(limit))
        update()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])

def update():
    assert not store.update([change("test_a", 2)]).errors

folder = Path(sys.argv[1])
path = store.path("virtual-T4", "tests/test_m.py")
if sys.argv[2] == "old":
    store.update([change("test_a", 1)])
old = path.read_bytes() if path.exists() else None
update()
new = path.read_bytes()
states = []
while True:
    path.unlink(missing_ok=True)
    if old is not None:
        path.write_bytes(old)
    if not killed_at(len(states) * 2, update):
        break
    found = path.read_bytes() if path.exists() else None
    states.append("old" if found == old else "new" if found == new else "broken")
    if len(states) % 10 == 0:
        update()
        if path.read_bytes() != new:
            states.append("cannot be updated any more")
update()
hidden = sorted(it.name for it in folder.rglob(".*"))
print(json.dumps({"states": states, "hidden": hidden}))
"""


@pytest.mark.parametrize("before", ["old", "nothing"])
def test_an_update_that_is_killed_anywhere_leaves_the_old_file_or_the_new_one(tmp_path, before):
    found = output(run(KILL, tmp_path, before))
    states = found["states"]
    assert len(states) > 50
    assert set(states) == {"old", "new"}
    assert found["hidden"] == [".gitignore", ".gpumem.lock"]


FULL = """
store.update([change("test_a", 1)])
path = store.path("virtual-T4", "tests/test_m.py")
before = path.read_bytes()
signal.signal(signal.SIGXFSZ, getattr(signal, sys.argv[2]))
pid = os.fork()
if pid == 0:
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
    errors = store.update([change("test_a", 2)]).errors
    os._exit(len(errors))
status = os.waitpid(pid, 0)[1]
leftovers = {it.name: it.stat().st_size for it in path.parent.glob(".*")}
same = path.read_bytes() == before
store.update([change("test_a", 3)])
after = sorted(it.name for it in path.parent.iterdir())
print(json.dumps([status, leftovers, same, after]))
"""


@pytest.mark.parametrize(
    ("action", "status", "leftovers"),
    [("SIG_IGN", 1 << 8, {}), ("SIG_DFL", 25, {".gpumem.tmp": 300})],
    ids=["error", "killed"],
)
def test_a_disk_that_is_full_in_the_midst_of_a_write_costs_nothing(
    tmp_path, action, status, leftovers
):
    """A limit on file sizes ends a write half done: as an error, or by killing the process."""
    ended, left, same, after = output(run(FULL, tmp_path, action))
    assert ended & ~0x80 == status
    assert left == leftovers
    assert same
    assert after == ["test_m.json"]
