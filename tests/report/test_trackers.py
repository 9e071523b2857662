"""The figures as github-action-benchmark and Bencher read them."""

from __future__ import annotations

import json

from helpers.sample_report import sample

from pytest_gpumem.report.trackers.formats import bencher, benchmark_action
from pytest_gpumem.sizes import MIB

PLAIN = "tests/training/test_models.py::test_gpt2_step on virtual-T4"


def test_github_action_benchmark_has_a_row_a_figure_in_mib():
    results = sample().results
    rows = {row["name"]: row for row in json.loads(benchmark_action(results))}
    peak = results[0].measurement.peaks[0]
    row = rows[f"{PLAIN}: peak allocated"]
    assert (row["unit"], row["value"] * MIB) == ("MiB", peak.allocated)
    assert row["extra"].startswith(f"{peak.allocated} bytes; torch 2.15.0+cu132, CUDA 13.2")
    assert rows[f"{PLAIN}: peak reserved"]["value"] * MIB == peak.reserved
    assert f"{PLAIN.replace('step', 'step_retains[8] (forward)')}: peak reserved" in rows


def test_bencher_has_both_measures_in_bytes_of_each_device():
    results = sample().results
    benchmarks = json.loads(bencher(results))
    peak = results[0].measurement.peaks[0]
    assert benchmarks[PLAIN] == {
        "peak-allocated": {"value": peak.allocated},
        "peak-reserved": {"value": peak.reserved},
    }
    several = "tests/training/test_models.py::test_data_parallel on virtual-H100, device "
    assert {f"{several}0", f"{several}1"} <= benchmarks.keys()


def test_a_step_that_ran_out_of_memory_has_no_figure():
    assert "test_gpt2_large" not in bencher(sample().results)
    assert "test_gpt2_large" not in benchmark_action(sample().results)


def test_without_results_both_are_empty():
    assert (json.loads(bencher([])), json.loads(benchmark_action([]))) == ({}, [])
