"""Tests selected by their baselines: those that fit a card."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.baselines.paths import device_keys
from pytest_gpumem.baselines.store import WHOLE_TEST, BaselineStore
from pytest_gpumem.devices.cards import CARDS
from pytest_gpumem.errors import BaselineError
from pytest_gpumem.measurement import device_key
from pytest_gpumem.nodeids import split_nodeid
from pytest_gpumem.plugin.pytest_item import is_marked, unique_nodeid

if TYPE_CHECKING:
    import pytest

    from pytest_gpumem.session.settings import Settings


def recorded_peak(store: BaselineStore, preferred: str, nodeid: str) -> int | None:
    """Return the peak reserved of a test's baseline; None without one that can be read.

    The baseline is that of the ``preferred`` device's key, else the largest of any device.
    """
    peaks = {}
    for key in device_keys(store.directory):
        try:
            entry = store.get(key, *split_nodeid(nodeid), WHOLE_TEST)
        except BaselineError:
            continue
        if entry is not None:
            peaks[key] = max(peak.reserved for peak in entry.peaks)
    return peaks.get(preferred, max(peaks.values(), default=None))


def select(
    items: list[pytest.Item], settings: Settings
) -> tuple[list[pytest.Item], list[pytest.Item], str]:
    """Return the tests with baselines that fit the card of ``--gpumem-select-fits``.

    Returns:
        also those that are left out, and a sentence.
    """
    store, card = BaselineStore(settings.baseline_dir), CARDS[settings.select_fits]
    fitting: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    unknown = marked = 0
    for item in items:
        peak = None
        if is_marked(item):
            marked += 1
            peak = recorded_peak(store, device_key("virtual", card.name), unique_nodeid(item))
            unknown += peak is None
        fits = peak is not None and peak <= card.usable_memory
        (fitting if fits else left_out).append(item)
    sentence = (
        f"{len(fitting)} of {marked} marked tests fit a {card.name} according to their baselines"
    )
    if unknown:
        sentence += f"; {unknown} without baseline left out"
    return fitting, left_out, sentence
