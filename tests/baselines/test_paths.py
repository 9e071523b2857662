"""Where baseline files lie, and that one is replaced as a whole or stays as it was."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pytest_gpumem.baselines.paths import baseline_path, module_at, read_file, replace_file
from pytest_gpumem.baselines.store import BaselineStore, NewBaseline
from pytest_gpumem.errors import BaselineError
from pytest_gpumem.measurement import BaselineEntry, DeviceInfo, Peak, Provenance

T4 = DeviceInfo("virtual", "T4", 15_828_320_256, (7, 5), 40)
MADE = Provenance("2.15.0", "13.2", "92600", "virtual", "")
MODULE = "tests/test_m.py"


def changes(allocated, *, tests=("test_a",), module=MODULE):
    entry = BaselineEntry((Peak(allocated, allocated),), MADE)
    return [NewBaseline(T4, module, test, {"": entry}) for test in tests]


def temporaries(directory):
    return [
        path for path in directory.rglob(".*") if path.name not in {".gpumem.lock", ".gitignore"}
    ]


def place(module, key="virtual-T4"):
    return baseline_path(Path("b"), key, module).as_posix()


@pytest.mark.parametrize(
    ("module", "path"),
    [
        ("examples/test_memory.py", "examples/test_memory.json"),
        ("test_m-1.2_b.py", "test_m-1.2_b.json"),
        ("../../etc/passwd.py", "%2E%2E/%2E%2E/etc/passwd.json"),
        ("./test_m.py", "%2E/test_m.json"),
        (".hidden/test_m.py", "%2Ehidden/test_m.json"),
        ("/abs/test_m.py", "%2F/abs/test_m.json"),
        ("a//test_m.py", "a/%2F/test_m.json"),
        ("tést [1]\\x\x00:~.py", "t%C3%A9st%20%5B1%5D%5Cx%00%3A%7E.json"),
        ("docs/README.md", "docs/README.md~.json"),
        ("a.json/test_m.py", "a%2Ejson/test_m.json"),
        ("a.JSON/test_m.py", "a%2EJSON/test_m.json"),
        ("a" * 300 + "/b.py", "a" * 180 + "~98b8b1dbbd8f35c9d6ab/b.json"),
    ],
)
def test_a_module_has_its_file(module, path):
    expected = path.replace("98b8b1dbbd8f35c9d6ab", hash_of("a" * 300))
    assert place(module) == f"b/virtual-T4/{expected}"


def hash_of(text):
    return hashlib.sha256(text.encode()).hexdigest()[:20]


@given(st.text(max_size=20), st.text(max_size=20))
def test_a_files_path_tells_its_module_or_nothing(module, key):
    """Never another module: of one whose path tells nothing the file is read."""
    for name in (module, f"{module}.py", f"a/{module}.py"):
        assert module_at(Path("b"), baseline_path(Path("b"), key, name)) in {name, None}
    plain = "tests/models/test_m-1.2 [b].py"
    assert module_at(Path("b"), baseline_path(Path("b"), "virtual-T4", plain)) == plain


def test_a_device_key_does_not_escape_either():
    assert place("m.py", "../x") == "b/%2E%2E%2Fx/m.json"
    assert place("m.py", "..") == "b/%2E%2E/m.json"


# What is hard to keep apart is tried often; all other characters are tried too.
PIECES = st.sampled_from([*"/.~%aA\x00\\é\ud800", "..", ".py", ".json", ".JSON", "%2E", "a" * 170])
MODULES = st.lists(PIECES, max_size=12).map("".join) | st.text(st.characters(), max_size=20)


@settings(max_examples=500, deadline=None)
@given(MODULES, MODULES)
@example("a.py", "a")
@example("a.json/b.py", "a.py")
@example("README.md", "README.md.py")
@example("/a.py", "a.py")
@example("a/.py", "a/")
@example("%2E%2E/a.py", "../a.py")
@example("a" * 300 + ".py", "a" * 300)
@example("a" * 300 + ".py", "a" * 180 + "~" + hash_of("a" * 300) + ".py")
@example("a/" * 2000 + "b.py", "a/" * 2001 + "b.py")
@example("\udcc3\udca9.py", "é.py")
def test_no_module_escapes_and_no_two_share_a_file_or_hide_one(one, other):
    paths = [PurePosixPath(place(module)) for module in (one, other)]
    for path in paths:
        assert path.parts[:2] == ("b", "virtual-T4")
        assert len(path.parts) > 2
        assert not any(part.startswith(".") for part in path.parts)
        assert all(len(part) < 255 and part.isascii() and part.isprintable() for part in path.parts)
        assert len(str(path)) < 1300
    if one != other:
        assert paths[0] != paths[1]
        assert not paths[0].is_relative_to(paths[1])
        assert not paths[1].is_relative_to(paths[0])


@pytest.mark.parametrize("module", ["../../x.py", "a" * 400 + ".py", "a/" * 3000 + "b.py", "\0.py"])
def test_an_odd_module_is_really_written_inside(tmp_path, module):
    directory = tmp_path / "baselines"
    store = BaselineStore(directory)
    assert store.update(changes(1, module=module)).errors == ()
    assert [path.name for path in tmp_path.iterdir()] == ["baselines"]
    assert BaselineStore(directory).get("virtual-T4", module, "test_a").peaks == (Peak(1, 1),)


def test_a_module_that_lies_where_another_would_is_an_error(tmp_path):
    """On a file system that ignores case, "Test_M.py" and "test_m.py" are one file."""
    store = BaselineStore(tmp_path)
    store.update(changes(1))
    path = store.path("virtual-T4", "tests/Test_M.py")
    path.symlink_to(store.path("virtual-T4", MODULE))
    with pytest.raises(BaselineError, match="belongs to module"):
        store.get("virtual-T4", "tests/Test_M.py", "test_a")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_is_no_file_is_an_error_and_stays(tmp_path, make):
    store = BaselineStore(tmp_path)
    path = store.path("virtual-T4", MODULE)
    path.parent.mkdir(parents=True)
    make(path)
    kind = stat.S_IFMT(path.stat().st_mode)
    with pytest.raises(BaselineError, match="is not a regular file"):
        store.get("virtual-T4", MODULE, "test_a")
    (error,) = store.update(changes(1)).errors
    assert error.given == str(path)
    assert stat.S_IFMT(path.stat().st_mode) == kind


def test_a_file_that_may_not_be_read_is_an_error_and_stays(tmp_path, monkeypatch):
    store = BaselineStore(tmp_path)
    store.update(changes(1))
    path = store.path("virtual-T4", MODULE)
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", failing(errno.EACCES))
        (error,) = BaselineStore(tmp_path).update(changes(2)).errors
        with pytest.raises(BaselineError, match="cannot be read: Permission denied"):
            BaselineStore(tmp_path).get("virtual-T4", MODULE, "test_a")
    assert str(path) in str(error)
    assert path.read_bytes() == before


def failing(number):
    """A function that fails as the system does."""

    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize(
    ("where", "name"),
    [(os, "fsync"), (Path, "replace"), (Path, "chmod"), (Path, "unlink"), (Path, "open")],
    ids=lambda it: getattr(it, "__name__", it),
)
def test_a_write_that_fails_anywhere_leaves_the_old_file_alone(
    tmp_path, monkeypatch, where, name, number
):
    store = BaselineStore(tmp_path)
    store.update(changes(1))
    path = store.path("virtual-T4", MODULE)
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(where, name, failing(number))
        patch.setattr(Path, "read_bytes", lambda path: before)  # it opens files, too
        summary = store.update(changes(2))

    (error,) = summary.errors
    assert str(error) == (
        f"{path}: cannot be written, and was not changed: {os.strerror(number)}; free disk "
        "space or make the folder writable, then update the baselines again"
    )
    assert summary.changed == summary.files == ()
    assert path.read_bytes() == before
    assert temporaries(tmp_path) == []
    assert store.get("virtual-T4", MODULE, "test_a").peaks == (Peak(1, 1),)


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "mkdir", failing(errno.EROFS))
    store = BaselineStore(tmp_path / "baselines")
    (error,) = store.update([*changes(1), *changes(1, module="m.py")]).errors
    assert error.problem == "cannot be locked: Read-only file system"
    assert "--gpumem-baseline-dir" in error.remedy


def test_an_interrupted_write_leaves_the_old_file_alone(tmp_path, monkeypatch):
    store = BaselineStore(tmp_path)
    store.update(changes(1))
    before = store.path("virtual-T4", MODULE).read_bytes()

    def interrupt(descriptor):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.update(changes(2))
    assert store.path("virtual-T4", MODULE).read_bytes() == before
    assert temporaries(tmp_path) == []
    assert store.update(changes(2)).errors == ()


def test_a_folder_that_cannot_be_synced_is_no_error(tmp_path, monkeypatch):
    """The new file is in place by then, and some file systems do not know how."""
    path = tmp_path / "f"
    fsync = os.fsync
    synced = []

    def sync_files_alone(descriptor):
        folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        synced.append("folder" if folder else "file")
        if folder:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync_files_alone)
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert synced == ["file", "folder"]


def test_a_file_that_is_a_link_stays_one(tmp_path):
    real = tmp_path / "real" / "f.json"
    real.parent.mkdir()
    real.write_bytes(b"old")
    (tmp_path / "link").symlink_to(real)
    replace_file(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert real.read_bytes() == b"new"
    assert temporaries(tmp_path) == []


def test_a_folder_that_is_a_link_stays_one_even_with_nothing_behind_it(tmp_path):
    (tmp_path / "baselines").symlink_to(tmp_path / "elsewhere")
    store = BaselineStore(tmp_path / "baselines")
    assert store.get("virtual-T4", MODULE, "test_a") is None
    assert store.update(changes(1)).errors == ()
    assert (tmp_path / "baselines").is_symlink()
    assert baseline_path(tmp_path / "elsewhere", "virtual-T4", MODULE).is_file()


def test_a_file_keeps_its_mode_and_a_new_one_has_the_umasks(tmp_path):
    path = tmp_path / "f"
    umask = os.umask(0o027)
    try:
        replace_file(path, b"new")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o604)
        replace_file(path, b"newer")
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o604


def test_there_is_nothing_to_read_where_nothing_is(tmp_path):
    assert read_file(tmp_path / "f") is None
    (tmp_path / "link").symlink_to("f")
    assert read_file(tmp_path / "link") is None


def test_a_file_with_windows_line_ends_is_touched_only_where_a_figure_moved(tmp_path):
    """As git checks it out there; and an editor's byte order mark."""
    store = BaselineStore(tmp_path)
    store.update(changes(1, tests=("test_a", "test_b")))
    path = store.path("virtual-T4", MODULE)
    theirs = b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n")
    path.write_bytes(theirs)
    summary = BaselineStore(tmp_path).update(changes(1))
    assert (len(summary.unchanged), summary.files) == (1, ())
    assert path.read_bytes() == theirs
    summary = BaselineStore(tmp_path).update(changes(2))
    assert (len(summary.changed), summary.errors) == (1, ())
    assert b"\r" not in path.read_bytes()
    again = BaselineStore(tmp_path)
    assert again.get("virtual-T4", MODULE, "test_a").peaks == (Peak(2, 2),)
    assert again.get("virtual-T4", MODULE, "test_b").peaks == (Peak(1, 1),)
