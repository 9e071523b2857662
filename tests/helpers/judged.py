"""Measurements and baselines to judge."""

from __future__ import annotations

from pytest_gpumem.judge.verdict import Lookup, Policy
from pytest_gpumem.measurement import BaselineEntry, DeviceInfo, Measurement, Peak, Provenance
from pytest_gpumem.sizes import MIB
from pytest_gpumem.spec import MemorySpec

T4 = DeviceInfo("virtual", "T4", 15_655_829_504, (7, 5), 40, context=116 * MIB)
NOW = Provenance("2.15.0", "13.2", "9.19.0", "virtual", "")
PLAIN = MemorySpec()
NOTHING = Lookup()
LENIENT = Policy()


def measured(*peaks, **others):
    """Return a measurement with a pair (allocated, reserved), in bytes, for each device."""
    zeros = tuple(Peak(0, 0) for _ in peaks)
    others = {"held": zeros, "retained": zeros, **others}
    return Measurement(T4, NOW, tuple(Peak(*peak) for peak in peaks), **others)


def known(*peaks, provenance=NOW, **declared):
    return Lookup(BaselineEntry(tuple(Peak(*peak) for peak in peaks), provenance, **declared))
