import ctypes
import json
import os
import sys
from pathlib import Path

from pytest_gpumem.baselines.store import BaselineStore, NewBaseline
from pytest_gpumem.measurement import BaselineEntry, DeviceInfo, Peak, Provenance

library = ctypes.CDLL(None)
folder, before, code = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
MADE = Provenance("2.15.0", "13.2", "92600", "virtual", "")
T4 = DeviceInfo("virtual", "T4", 15_828_320_256, (7, 5), 40)
MODULES = ("tests/deep/test_a.py", "test_b.py")
FILES = [BaselineStore(folder).path("virtual-T4", module) for module in MODULES]


def update(size):
    entry = BaselineEntry((Peak(size, size),), MADE)
    tests = [(module, f"test_{i}") for module in MODULES for i in range(30)]
    store = BaselineStore(folder, lock_timeout=600)
    return store.update([NewBaseline(T4, *test, {"": entry}) for test in tests]).errors


def content():
    return [path.read_bytes() if path.exists() else None for path in FILES]


def put(contents):
    for path, old in zip(FILES, contents, strict=True):
        path.unlink(missing_ok=True)
        if old is not None:
            path.write_bytes(old)


def hidden():
    return sorted({it.name for it in folder.rglob(".*")} - {".gpumem.lock", ".gitignore"})


def attempt(number):
    "The exit status of an update with a fault; None: it made fewer calls, and all went well."
    pid = os.fork()
    if pid == 0:
        library.fault_at(number, code)
        errors = update(2)
        made = library.faults_seen()
        os._exit(99 if made <= number and not errors else bool(errors))
    status = os.waitpid(pid, 0)[1]
    ended = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    return None if ended == 99 else ended


update(1)
old = content() if before == "old" else [None, None]
update(2)
new = content()
found = []
while True:
    put(old)
    status = attempt(len(found))
    if status is None:
        break
    files = zip(content(), old, new, strict=True)
    states = ["old" if a == b else "new" if a == c else "broken" for a, b, c in files]
    left = hidden()
    again = [*map(str, update(2)), *hidden()]
    found.append([status, states, left, again if content() == new else "is not updated"])
print(json.dumps(found))
