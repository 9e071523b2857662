"""Two snapshots' lines, paired: other folders, other machines, lines that moved."""

from __future__ import annotations

from pytest_gpumem.attribution.dumps.growth import growth_by_device
from pytest_gpumem.attribution.dumps.held import NOWHERE, Held, Place


def held(*places, device=0):
    """A device of which each place has the bytes that stand beside it."""
    total = sum(size for _, size in places)
    return Held(device, total, total, True, dict(places), dict.fromkeys(dict(places), 1))


def lines(old, new):
    (device,) = growth_by_device([old], [new])
    return [(line.place, line.old, line.new) for line in device.lines]


def at(path, line, function="forward"):
    return Place(path, function, line)


def test_the_largest_growth_comes_first_and_lines_of_one_side_count_as_nothing_on_the_other():
    first, second = at("model.py", 3), at("model.py", 9, "head")
    assert lines(held((first, 5), (NOWHERE, 7)), held((first, 6), (second, 4))) == [
        (second, 0, 4),
        (first, 5, 6),
        (NOWHERE, 7, 0),
    ]


def test_files_of_another_machine_are_the_same():
    old = held((at("/home/ann/p/src/model.py", 3), 5), (at("/home/ann/p/model.py", 3), 1))
    new = held((at("/ci/src/model.py", 3), 6), (at("/ci/model.py", 3), 1))
    assert [(old, new) for _, old, new in lines(old, new)] == [(5, 6), (1, 1)]


def test_files_of_one_name_in_other_folders_are_not():
    old = held((at("/a/x/model.py", 3), 5))
    new = held((at("/b/y/model.py", 3), 6), (at("/b/z/model.py", 3), 7))
    assert len(lines(old, new)) == 3


def test_lines_that_moved_are_the_same():
    old = held((at("m.py", 3), 5), (at("m.py", 4), 6))
    assert [(a, b) for _, a, b in lines(old, held((at("m.py", 8), 5), (at("m.py", 9), 7)))] == [
        (6, 7),
        (5, 5),
    ]
    three = held((at("m.py", 13), 5), (at("m.py", 14), 6), (at("m.py", 20), 1))
    assert [(place.line, a, b) for place, a, b in lines(old, three)] == [
        (20, 0, 1),
        (14, 6, 6),
        (13, 5, 5),
    ]


def test_a_files_name_is_short(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    library = at("/x/lib/python3.12/site-packages/lib/attn.py", 1)
    own = at(str(tmp_path / "src/model.py"), 1)
    names = {place.path for place, *_ in lines(held((library, 1), (own, 1)), held((own, 2)))}
    assert names == {"lib/attn.py", "src/model.py"}


def test_a_device_of_one_side_is_compared_with_nothing_and_empty_ones_are_left_out():
    devices = growth_by_device([held((NOWHERE, 5)), held(device=2)], [held((NOWHERE, 6), device=1)])
    assert [(it.device, it.difference) for it in devices] == [(0, -5), (1, 6)]
