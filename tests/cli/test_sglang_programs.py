"""``gpumem run`` with SGLang: what it decides, and its refusals."""

from __future__ import annotations

import json

import pytest
from helpers import toy_sglang
from helpers.program_runs import gpumem_run

SERVE = """
import argparse
from sglang.srt.entrypoints.http_server import launch_server

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--share", type=float, default=0.9)
    parser.add_argument("--warm-up", action="store_true")
    parser.add_argument("--again", type=int, default=0)
    options = parser.parse_args()
    launch_server(options.mib, options.share)
    if options.again:
        launch_server(options.again, options.share)
        print("it goes on")
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run serve.py with options and its own arguments; return the status and the text."""
    toy_sglang.write(tmp_path)
    (tmp_path / "serve.py").write_text(SERVE, encoding="utf-8")
    monkeypatch.delenv("CI", raising=False)
    return lambda *options, own=(): gpumem_run(tmp_path, *options, "serve.py", *own)


def test_a_start_ends_with_what_the_server_decided(run, tmp_path):
    status, text = run("--card=T4", "--json=it.json")
    assert status == 0, text
    assert "SGLang 0.5.23 starts" in text
    assert "weights 0.06 GiB" in text
    assert "activations" not in text
    results = json.loads((tmp_path / "it.json").read_text(encoding="utf-8"))["results"]
    (start,) = next(filter(None, (result["measurement"]["servers"] for result in results)))
    assert (start["weights"], start["graphs_taken"], start["captured"]) == (64 << 20, 4 << 20, 1)
    assert start["tokens"] == start["cache"] // (64 << 10) - 100  # resized after the capture
    assert start["requested"] == start["cache"] + start["weights"]
    assert (start["length"], start["requests"]) == (1000, start["tokens"] // 1000)
    # It runs the model for the first time after it has sized its cache.
    assert start["unseen_later"] > start["unseen"][1]


def test_a_refusal_is_a_result(run):
    """The server would kill the process that prints it."""
    status, text = run("--card=T4", "--until-started", own=["--mib=13500"])
    assert status == 1
    # To delete SGLang's sockets before would wait for ever for the processes that it has killed.
    assert "sockets deleted" not in text.partition("SGLang 0.5.23 does not start")[0]
    assert "SGLang 0.5.23 does not start" in text
    assert "no start: SGLang 0.5.23 does not start: Loaded weights leave no GPU memory" in text
    assert "next: declare shorter requests" in text


def test_a_second_server_that_is_refused_ends_the_program(run):
    """The end of the first one is not taken for its own."""
    status, text = run("--card=T4", "--until-started", own=["--again=13500"])
    assert status == 1
    assert "Loaded weights leave no GPU memory" in text
    assert "it goes on" not in text


def test_too_little_memory_in_the_end_is_not_promised_and_larger_cards_are_tried(run):
    status, text = run("--card=T4", own=["--share=0.99"])
    assert status == 1
    assert "too close to tell whether SGLang 0.5.23 starts" in text
    assert "next: declare shorter requests" in text
    assert "gpumem: max_model_len" not in text
    assert "gpumem: card " in text


def test_a_server_that_ends_once_it_has_started_is_sent_no_request(run):
    assert run("--card=T4", "--until-started", own=["--warm-up"])[0] == 0
