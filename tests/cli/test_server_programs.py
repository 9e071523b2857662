"""``gpumem run`` with an inference server: what it decides, what would let it start."""

from __future__ import annotations

import json
import re

import pytest
from helpers import toy_vllm
from helpers.program_runs import gpumem_run

SERVE = """
import argparse
from vllm import LLM

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--max-model-len", type=int, default=1024)
    options = parser.parse_args()
    llm = LLM("", options.mib, options.ranks, options.max_model_len)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run serve.py with options and its own arguments; return the status and the text.

    The engine runs in the program's process, or in one of its own, as by default.
    """
    toy_vllm.write(tmp_path)
    (tmp_path / "serve.py").write_text(SERVE, encoding="utf-8")
    monkeypatch.delenv("CI", raising=False)

    def run(*options, own=(), processes=False):
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", f"{processes:d}")
        return gpumem_run(tmp_path, *options, "serve.py", *own)

    return run


@pytest.mark.parametrize("processes", [False, True])
def test_a_start_ends_with_what_the_server_decided(run, tmp_path, processes):
    status, text = run("--card=T4", "--json=it.json", processes=processes)
    assert status == 0, text
    assert "vLLM 0.33.0 starts" in text
    for row in ("weights 0.06 GiB", "activations of the profiling run 0.03 GiB", "KV cache 12."):
        assert row in text
    results = json.loads((tmp_path / "it.json").read_text(encoding="utf-8"))["results"]
    (start,) = next(filter(None, (result["measurement"]["servers"] for result in results)))
    assert (start["weights"], start["activations"]) == (64 << 20, 32 << 20)
    assert (start["outside"], start["graphs"], start["graphs_taken"]) == (
        8 << 20,
        16 << 20,
        4 << 20,
    )
    assert start["needed"] == 1024 * (64 << 10)
    assert start["tokens"] == start["cache"] // (16 * (64 << 10)) * 16
    assert start["requests"] == start["tokens"] // 1024
    by_part = {result["part"]: result["measurement"] for result in results}
    (peak,) = by_part["server profiling run"]["peaks"]
    assert peak["allocated"] == 96 << 20
    (attribution,) = by_part["server profiling run"]["attributions"]
    assert {site["code"] for site in attribution["breakdown"]["sites"]} == {
        "return torch.empty(mib * MIB, dtype=torch.uint8, device=device)"
    }


def test_a_server_that_takes_more_fails_with_the_line_and_the_tokens(run):
    status, text = run("--card=T4", "--baseline=kept", "--name=it", "--update")
    assert (status, "baselines: 2 created" in text) == (0, True), text
    status, text = run("--card=T4", "--baseline=kept", "--name=it")
    assert (status, "ok: 212,880 tokens in the KV cache" in text) == (0, True), text
    status, text = run("--card=T4", "--baseline=kept", "--name=it", own=["--mib=128"])
    assert status == 1
    assert "regressed" in text
    assert "gpu_worker.py:9 (empty)" in text
    assert "note: the KV cache holds 1,536 tokens fewer (96.01 MiB)" in text


def test_too_few_tokens_fail(run):
    status, text = run("--card=T4", "--min-cache-tokens=300000")
    assert status == 1
    assert "under limit: the KV cache holds 212,880 tokens (203,664 or more on a real GPU)" in text
    assert "fewer than min_cache_tokens=300000" in text
    assert run("--card=T4", "--min-cache-tokens=200000")[0] == 0


def test_a_refusal_says_what_would_let_it_start(run):
    """Each row comes from a start; the program's argument is replaced."""
    status, text = run("--card=T4", own=["--max-model-len=300000"])
    assert status == 1
    assert "vLLM 0.33.0 does not start: one request of 300,000 tokens needs 18.31 GiB" in text
    assert "gpumem: max_model_len=" in text
    assert "what starts tokens in the KV cache" in text
    assert "card L4" not in text.partition("what starts")[2]  # not large enough
    assert "card A10G" in text or "card RTX" in text or "card V100-32GB" in text


def test_a_start_too_close_to_its_limit_is_not_promised(run):
    status, text = run("--card=T4", own=["--max-model-len=210000"])
    assert status == 1
    assert "vLLM 0.33.0 may not start" in text
    assert "too close to tell whether vLLM 0.33.0 starts" in text
    assert "gpumem: max_model_len=2" in text


def test_the_weights_do_not_fit(run):
    status, text = run("--card=T4", "--until-started", own=["--mib=20000"], processes=True)
    assert status == 1
    assert "no start: vLLM 0.33.0 does not start: CUDA out of memory. Tried to allocate" in text
    assert "what starts" not in text


def test_two_devices(run):
    status, text = run("--card=T4", "--devices=2", "--json=it.json", own=["--ranks=2"])
    assert status == 0
    assert "cuda:0 cuda:1" in text
    assert "weights 0.06 GiB 0.06 GiB" in text


def test_cards_and_the_largest_length(run):
    status, text = run("--cards=T4,L4", own=["--max-model-len=300000"])
    assert status == 1
    assert "tokens in the KV cache" in text
    rows = text.partition("tokens in the KV cache")[2]
    assert "T4 14.44 GiB no" in rows
    assert "L4 21.77 GiB yes" in rows
    status, text = run("--card=T4", "--largest=--max-model-len:202000..204000")
    assert status == 0
    largest = int(re.search(r"--max-model-len (\d+) fits", text)[1])
    assert 200_000 < largest < 212_880  # within 0.1 GiB of the limit no start is promised


def test_a_refusal_without_any_memory_for_the_cache_is_in_the_report(run, tmp_path):
    """Then the cache's figure is negative."""
    status, text = run("--card=T4", "--until-started", "--json=it.json", own=["--mib=9500"])
    assert (status, "one request of 1,024 tokens needs 0.06 GiB" in text) == (1, True)
    results = json.loads((tmp_path / "it.json").read_text(encoding="utf-8"))["results"]
    assert results[0]["measurement"]["servers"][0]["cache"] < 0


def test_a_server_starts_whose_figures_cannot_be_read(run, tmp_path):
    """Another release may not have what its start is read from."""
    path = tmp_path / "vllm/v1/core/kv_cache_utils.py"
    renamed = path.read_text(encoding="utf-8").replace("get_max_concurrency_for_", "another_")
    path.write_text(renamed, encoding="utf-8")
    status, text = run("--card=T4")
    assert status == 0
    assert "gpumem: figures of vLLM 0.33.0 cannot be read (AttributeError: module" in text


def test_a_killed_server_has_told_the_peaks_of_its_start(run, tmp_path):
    serve = SERVE + "    llm.process.kill()\n    llm.process.join()\n"
    (tmp_path / "serve.py").write_text(serve, encoding="utf-8")
    status, text = run("--card=T4", processes=True)
    assert status == 0
    assert "vLLM 0.33.0 starts" in text
    assert "its peaks are those until it had started" in text
