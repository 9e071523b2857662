"""Baselines for tests of the commands that read them."""

from __future__ import annotations

from dataclasses import replace

from pytest_gpumem.baselines.store import BaselineStore, NewBaseline
from pytest_gpumem.measurement import BaselineEntry, DeviceInfo, Peak, Provenance
from pytest_gpumem.sizes import MIB

T4 = DeviceInfo("virtual", "T4", 15_655_829_504, (7, 5), 40)
NOW = Provenance("2.15.0", "13.2", "9.19.0", "virtual", "")
BEFORE = replace(NOW, torch="2.14.0")


def write(folder, tests, *, module="tests/test_a.py", device=T4, provenance=NOW):
    """Write baselines; ``tests`` maps each test to its peaks in MiB or to an entry."""
    made = {
        name: it
        if isinstance(it, BaselineEntry)
        else BaselineEntry((Peak(*(int(n * MIB) for n in it)),), provenance)
        for name, it in tests.items()
    }
    changes = [NewBaseline(device, module, name, {"": entry}) for name, entry in made.items()]
    assert not BaselineStore(folder).update(changes).errors
