"""The baseline store: what is written, what is left alone, and what is said of it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_gpumem.baselines.paths import Key
from pytest_gpumem.baselines.store import BaselineStore, EntryUpdate, NewBaseline
from pytest_gpumem.errors import BaselineError
from pytest_gpumem.measurement import BaselineEntry, DeviceInfo, Peak, Provenance

T4 = DeviceInfo("virtual", "T4", 15_828_320_256, (7, 5), 40)
H200 = DeviceInfo("cuda", "NVIDIA H200", 150_000_000_000, (9, 0), 132)
MADE = Provenance("2.15.0", "13.2", "92600", "virtual", "")
MODULE = "examples/test_memory.py"


def entry(allocated=1000, reserved=2000, **fields):
    return BaselineEntry((Peak(allocated, reserved),), **{"provenance": MADE, **fields})


def change(test="test_a", *, device=T4, module=MODULE, **parts):
    """A change of a whole test (``whole``), of parts, or of both."""
    named = {"" if name == "whole" else name: it for name, it in parts.items()}
    return NewBaseline(device, module, test, named or {"": entry()})


def files_under(directory):
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)) for path in files if path.name != ".gitignore"}


def test_an_entry_comes_back_as_it_was(store, directory):
    two = BaselineEntry((Peak(1, 2), Peak(3, 2**63 - 1)), MADE, batch_size=32)
    store.update([change("TestX::test_y[a-1]", whole=two, forward=entry(5, 6))])

    again = BaselineStore(directory)
    assert again.get("virtual-T4", MODULE, "TestX::test_y[a-1]") == two
    assert again.get("virtual-T4", MODULE, "TestX::test_y[a-1]", "forward") == entry(5, 6)


def test_what_was_never_written_is_none(store):
    assert store.get("virtual-T4", MODULE, "test_a") is None
    store.update([change("test_a")])
    assert store.get("virtual-T4", MODULE, "test_b") is None
    assert store.get("virtual-T4", MODULE, "test_a", "forward") is None
    assert store.get("virtual-L4", MODULE, "test_a") is None


def test_a_file_is_text_that_a_reviewer_can_read(store, directory):
    parts = {"": entry(batch_size=32), "forward": entry(5, 6, batch_size=32)}
    store.update([NewBaseline(T4, MODULE, "TestX::test_y[a-1]", parts)])
    written = (directory / "virtual-T4/examples/test_memory.json").read_text()
    assert (
        written
        == """\
{
 "device": {
  "capability": [7, 5],
  "key": "virtual-T4",
  "name": "T4",
  "sm_count": 40,
  "total_memory": 15828320256
 },
 "format": 1,
 "module": "examples/test_memory.py",
 "provenance": {
  "torch-2.15.0+cu132": {
   "allocator": "",
   "cuda": "13.2",
   "cudnn": "92600",
   "driver": "virtual",
   "torch": "2.15.0"
  }
 },
 "tests": {
  "TestX::test_y[a-1]": {
   "batch_size": 32,
   "parts": {
    "forward": {
     "batch_size": 32,
     "peak_allocated": [5],
     "peak_reserved": [6],
     "provenance": "torch-2.15.0+cu132"
    }
   },
   "peak_allocated": [1000],
   "peak_reserved": [2000],
   "provenance": "torch-2.15.0+cu132"
  }
 }
}
"""
    )


def test_a_diff_shows_the_figure_that_moved_and_nothing_else(store):
    store.update([change("test_a"), change("test_b"), change("test_c")])
    path = store.path("virtual-T4", MODULE)
    before = path.read_text().splitlines()
    newer = replace(MADE, torch="2.16.0")
    same, moved = entry(provenance=newer), entry(1001)
    store.update([change("test_a", whole=same), change("test_b", whole=moved)])

    after = path.read_text().splitlines()
    assert len(before) == len(after)
    moved_lines = [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]
    assert moved_lines == [('   "peak_allocated": [1000],', '   "peak_allocated": [1001],')]


def test_an_update_says_what_became_of_each_entry(store):
    old = change("test_a", whole=entry(), gone=entry(1), stays=entry(2))
    store.update([old])
    new = change("test_a", whole=entry(1001), stays=entry(2), comes=entry(3))
    summary = store.update([new])

    def update(part, before, after):
        return EntryUpdate("virtual-T4", MODULE, "test_a", part, before, after)

    assert summary.changed == (update("", entry(), entry(1001)),)
    assert summary.created == (update("comes", None, entry(3)),)
    assert summary.removed == (update("gone", entry(1), None),)
    assert summary.unchanged == (update("stays", entry(2), entry(2)),)
    assert summary.errors == ()
    assert summary.files == (store.path("virtual-T4", MODULE),)


def test_a_summary_is_in_order_whatever_order_the_tests_ran_in(store):
    summary = store.update(
        [
            change("test_b"),
            change("test_a", device=H200),
            change("test_b", module="a/test_0.py"),
            change("test_a", whole=entry(), z=entry(), b=entry()),
        ]
    )
    assert [(it.device_key, it.module, it.test, it.part) for it in summary.created] == [
        ("cuda-NVIDIA-H200", MODULE, "test_a", ""),
        ("virtual-T4", "a/test_0.py", "test_b", ""),
        ("virtual-T4", MODULE, "test_a", ""),
        ("virtual-T4", MODULE, "test_a", "b"),
        ("virtual-T4", MODULE, "test_a", "z"),
        ("virtual-T4", MODULE, "test_b", ""),
    ]
    assert [path.name for path in summary.files] == [
        "test_memory.json",
        "test_0.json",
        "test_memory.json",
    ]


def test_nothing_but_what_a_change_names_is_touched(store, directory):
    store.update([change("test_a"), change("test_b", device=H200), change("test_c", module="m.py")])
    others = [store.path("cuda-NVIDIA-H200", MODULE), store.path("virtual-T4", "m.py")]
    before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in others]
    store.update([change("test_new")])
    assert [(path.read_bytes(), path.stat().st_mtime_ns) for path in others] == before
    assert store.get("virtual-T4", MODULE, "test_a") == entry()


def test_a_file_without_a_moved_figure_is_not_written_even_with_newer_provenance(store):
    store.update([change(whole=entry(batch_size=32))])
    path = store.path("virtual-T4", MODULE)
    path.write_text(path.read_text().replace("\n", "\r\n"), newline="")
    before = path.read_bytes()
    newer = entry(batch_size=32, provenance=replace(MADE, torch="2.16.0"))
    summary = store.update([change(whole=newer)])
    assert path.read_bytes() == before
    assert [it.new for it in summary.unchanged] == [newer]
    assert summary.changed == summary.files == ()


def test_an_update_of_nothing_makes_no_folder(store, directory):
    store.update([])
    assert not directory.exists()


def test_an_update_that_moves_nothing_needs_no_writable_folder(store, directory):
    store.update([change()])
    (directory / ".gpumem.lock").unlink()
    assert len(store.update([change()]).unchanged) == 1
    assert not (directory / ".gpumem.lock").exists()


@pytest.mark.parametrize(
    "moved",
    [entry(1001), entry(1000, 2001), entry(batch_size=1), BaselineEntry((Peak(1, 2),) * 2, MADE)],
    ids=["allocated", "reserved", "batch size", "devices"],
)
def test_a_moved_figure_is_a_change(store, directory, moved):
    store.update([change()])
    assert [it.new for it in store.update([change(whole=moved)]).changed] == [moved]
    assert BaselineStore(directory).get("virtual-T4", MODULE, "test_a") == moved


def test_the_store_knows_what_it_has_just_written(store):
    store.update([change()])
    assert store.get("virtual-T4", MODULE, "test_a") == entry()
    store.update([change(whole=entry(7))])
    assert store.get("virtual-T4", MODULE, "test_a") == entry(7)


def test_a_change_of_parts_alone_leaves_the_test_and_its_other_parts(store):
    store.update([change(whole=entry(), forward=entry(1), backward=entry(2))])
    summary = store.update([change(forward=entry(3))])
    assert summary.removed == ()
    found = [store.get("virtual-T4", MODULE, "test_a", it) for it in ("", "forward", "backward")]
    assert found == [entry(), entry(3), entry(2)]


def test_a_test_can_have_parts_alone(store, directory):
    store.update([change(forward=entry(1))])
    again = BaselineStore(directory)
    assert again.get("virtual-T4", MODULE, "test_a", "forward") == entry(1)
    assert again.get("virtual-T4", MODULE, "test_a") is None


def test_the_last_of_several_changes_of_a_test_counts(store):
    summary = store.update([change(whole=entry(1)), change(whole=entry(2))])
    assert [it.new for it in summary.created] == [entry(2)]
    assert store.get("virtual-T4", MODULE, "test_a") == entry(2)


def test_changes_of_a_test_and_of_its_parts_add_up(store):
    store.update([change(whole=entry(), forward=entry(1))])
    summary = store.update([change(whole=entry(2)), change(forward=entry(3))])
    assert summary.removed == ()
    assert [it.new for it in summary.changed] == [entry(2), entry(3)]


def test_a_change_of_nothing_leaves_no_trace(store, directory):
    store.update([NewBaseline(T4, MODULE, "test_empty", {}), change("test_a")])
    again = BaselineStore(directory)
    assert again.get("virtual-T4", MODULE, "test_a") == entry()
    assert "test_empty" not in store.path("virtual-T4", MODULE).read_text()


def test_a_newer_driver_keeps_the_label_when_every_entry_is_made_anew(store):
    store.update([change()])
    newer = replace(MADE, driver="580.1")
    store.update([change(whole=entry(7, provenance=newer))])
    document = json.loads(store.path("virtual-T4", MODULE).read_text())
    assert list(document["provenance"]) == ["torch-2.15.0+cu132"]
    assert document["provenance"]["torch-2.15.0+cu132"]["driver"] == "580.1"


def test_provenances_that_differ_have_labels_that_differ_and_stay(store, directory):
    store.update([change("test_a"), change("test_b")])
    newer = replace(MADE, driver="580.1")
    store.update([change("test_a", whole=entry(7, provenance=newer))])
    path = store.path("virtual-T4", MODULE)
    plain, hashed = json.loads(path.read_text())["provenance"]
    assert plain == "torch-2.15.0+cu132"
    assert hashed.startswith("torch-2.15.0+cu132-")

    store.update([change("test_b", whole=entry(8, provenance=newer))])
    assert list(json.loads(path.read_text())["provenance"]) == [hashed]
    again = BaselineStore(directory)
    assert again.get("virtual-T4", MODULE, "test_b") == entry(8, provenance=newer)


def test_a_torch_version_that_names_its_cuda_is_a_label_as_it_stands(store):
    made = replace(MADE, torch="2.15.0+cu130")
    store.update([change(whole=entry(provenance=made))])
    document = json.loads(store.path("virtual-T4", MODULE).read_text())
    assert list(document["provenance"]) == ["torch-2.15.0+cu130"]


def test_other_devices_that_have_a_baseline_are_named(store):
    store.update([change(device=T4), change(device=H200), change("test_b", device=H200)])
    assert store.other_devices("virtual-L4", MODULE, "test_a") == ("cuda-NVIDIA-H200", "virtual-T4")
    assert store.other_devices("virtual-T4", MODULE, "test_a") == ("cuda-NVIDIA-H200",)
    assert store.other_devices("virtual-T4", MODULE, "test_c") == ()
    assert store.other_devices("virtual-L4", MODULE, "test_a", "forward") == ()


def test_a_broken_file_of_another_device_is_no_error_here(store):
    store.update([change(device=T4), change(device=H200)])
    store.path("virtual-T4", MODULE).write_text("{")
    assert store.other_devices("virtual-L4", MODULE, "test_a") == ("cuda-NVIDIA-H200",)


def test_other_devices_are_none_where_there_is_no_folder(store):
    assert store.other_devices("virtual-L4", MODULE, "test_a") == ()


def test_a_broken_file_is_an_error_of_that_file_alone_and_stays(store, directory):
    store.update([change("test_a"), change("test_b", module="m.py")])
    broken = store.path("virtual-T4", MODULE)
    broken.write_text("<<<<<<< mine\n")
    summary = store.update([change("test_a", whole=entry(7)), change(module="m.py")])

    assert [error.given for error in summary.errors] == [str(broken)]
    assert broken.read_text() == "<<<<<<< mine\n"
    assert [it.module for it in summary.created] == ["m.py"]
    assert summary.changed == summary.unchanged == ()
    assert summary.files == (store.path("virtual-T4", "m.py"),)


def test_a_broken_file_is_read_once_and_raises_anew_for_each_test(store, monkeypatch):
    store.update([change()])
    store.path("virtual-T4", MODULE).write_text("{")
    reads = []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: reads.append(path) or read_bytes(path))
    raised = []
    for test in ("test_a", "test_b"):
        with pytest.raises(BaselineError, match="is not JSON") as caught:
            store.get("virtual-T4", MODULE, test)
        raised.append(caught.value)
    assert raised[0] is not raised[1]
    assert len(reads) == 1


@pytest.mark.parametrize(
    "bad",
    [
        *[entry(-1), entry(1.5), entry(True), entry(2**63), BaselineEntry((), MADE)],
        *[entry(batch_size=-1), entry(provenance=replace(MADE, cuda=None))],
    ],
)
def test_what_could_not_be_read_again_is_refused_and_the_rest_written(store, directory, bad):
    summary = store.update([change("test_bad", whole=bad), change("test_good")])
    assert [error.given for error in summary.errors] == [f"{MODULE}::test_bad"]
    assert "hooks" in summary.errors[0].remedy
    again = BaselineStore(directory)
    assert again.get("virtual-T4", MODULE, "test_good") == entry()
    assert again.get("virtual-T4", MODULE, "test_bad") is None


def test_a_device_that_could_not_be_read_again_is_refused(store, directory):
    summary = store.update([change(device=replace(T4, total_memory=-1)), change(device=H200)])
    assert [error.given for error in summary.errors] == [f"{MODULE}::test_a"]
    assert [it.device_key for it in summary.created] == [H200.key]


def test_names_of_any_characters_come_back(store, directory):
    name = 'TestÄ::test["\\\n\x00\ud800</script>\u202e]'
    store.update([change(name, module="tests/ü \ud800.py", **{"\u2028": entry(5)})])
    again = BaselineStore(directory)
    assert again.get("virtual-T4", "tests/ü \ud800.py", name, "\u2028") == entry(5)


def test_a_file_in_place_of_the_folder_is_an_error(store, directory):
    directory.write_text("mine")
    with pytest.raises(BaselineError, match="cannot be read: Not a directory"):
        store.get("virtual-T4", MODULE, "test_a")
    assert store.update([change()]).errors
    assert directory.read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_one_error(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    store = BaselineStore(tmp_path / "loop" / "baselines")
    assert store.update([change(), change(module="m.py")]).errors


def test_a_device_of_other_memory_is_recorded_when_the_file_is_written(store):
    store.update([change()])
    store.update([change(device=replace(T4, total_memory=5), whole=entry(7))])
    document = json.loads(store.path("virtual-T4", MODULE).read_text())
    assert document["device"]["total_memory"] == 5


def test_an_update_leaves_the_file_and_the_lock_and_nothing_else(store, directory):
    store.update([change()])
    assert files_under(directory) == {".gpumem.lock", "virtual-T4/examples/test_memory.json"}


def test_ten_thousand_tests_in_one_module_take_seconds(store, directory):
    changes = [change(f"test_{i}", whole=entry(i), forward=entry(i)) for i in range(10_000)]
    begin = time.process_time()
    assert len(store.update(changes).created) == 20_000
    again = BaselineStore(directory)
    assert all(again.get("virtual-T4", MODULE, f"test_{i}") == entry(i) for i in range(10_000))
    assert len(again.update([change("test_5", whole=entry(0))]).removed) == 1
    assert time.process_time() - begin < 10


def test_removing_reads_anew_keeps_the_rest_and_reports_what_it_cannot(store, directory):
    modules = ("a.py", "b.py")
    store.update(
        change(test, module=module, **{"": entry()})
        for module in modules
        for test in ("test_1", "test_2")
    )
    broken = directory / "virtual-T4/a.json"
    broken.write_text("<<<<<<< ours\n")
    keys = [Key("virtual-T4", module, "test_1") for module in (*modules, "absent.py")]
    (error,) = store.remove([*keys, Key("virtual-T4", "b.py", "test_absent")])
    assert "merge-conflict" in str(error)
    assert broken.read_text() == "<<<<<<< ours\n"
    assert store.get("virtual-T4", "b.py", "test_1") is None
    assert store.get("virtual-T4", "b.py", "test_2") == entry()
    assert not list(directory.rglob("*.tmp"))


def test_removing_nothing_writes_nothing(store, directory):
    store.update([change(**{"": entry()})])
    (path,) = directory.rglob("*.json")
    before = path.stat()
    assert not store.remove([Key(T4.key, MODULE, "test_b")])
    after = path.stat()  # not the time of access: the file is read
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
