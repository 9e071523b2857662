"""Tests of one to four GPUs, packed on eight: by a simulated clock, and in workers.

benchmarks/scale/packing.py has 500 tests.
"""

from __future__ import annotations

import pytest
from helpers.packing import figures, lower_bound, made_up, suite, wall_time
from helpers.virtual_gpu import virtual_card

from pytest_gpumem.devices.sharing import gpu_ledger


@pytest.mark.parametrize(("workers", "most"), [(1, 1.0), (4, 1.2), (8, 1.6), (32, 2.6)])
@pytest.mark.parametrize("seed", range(3))
def test_the_wall_time_is_near_the_best_packings(workers, most, seed):
    """No GPU is taken beyond its memory, nor a test beside one that is alone: wall_time looks."""
    tests = made_up(150, seed)
    assert 1 <= wall_time(tests, workers) / lower_bound(tests, workers) <= most


def test_overtaking_and_spreading_shorten_it(monkeypatch):
    tests = made_up(150)
    assert wall_time(tests, 4) < wall_time(tests, 4, spread=False)
    packed = wall_time(tests, 32)
    monkeypatch.setattr(gpu_ledger, "MAX_OVERTAKEN", 0)
    assert packed < 0.9 * wall_time(tests, 32)


def test_no_figure_differs_from_the_serial_runs(suite_folder, monkeypatch):
    """Workers find eight virtual GPUs as they would real ones."""
    pytest.importorskip("xdist")
    monkeypatch.setenv("TMPDIR", str(suite_folder.path))
    common = ("--gpumem-device=cuda", "--gpumem-attribution=off")
    packed = ("--gpumem-packing=baselines", "-n", "2", "--gpumem-json=packed.json")
    with virtual_card("H100", 8):
        serial = ("--gpumem-update-baselines", "--gpumem-json=serial.json")
        assert suite_folder.run(*common, *serial, source=suite(16)).ret == 0
        session = suite_folder.run_apart(*common, *packed)
    assert session.outcomes == {"passed": 16}, session.out
    expected = figures(suite_folder.path / "serial.json")
    assert len(expected) == 16
    assert {len(peaks) for peaks in expected.values()} == {1, 2, 3, 4}
    assert figures(suite_folder.path / "packed.json") == expected


@pytest.fixture
def suite_folder(request):
    return request.getfixturevalue("suite")
