"""``gpumem model``: a language model's steps, by its configuration alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from helpers.warm import HANGS

from pytest_gpumem.cli import config_model
from pytest_gpumem.errors import GpuMemError
from pytest_gpumem.sizes import MIB

TINY = {
    "model_type": "qwen2",
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
LAYER = 2 * 256 * 256 + 2 * 256 * 128 + 256 + 2 * 128 + 3 * 256 * 1024 + 2 * 256
PARAMETERS = 8192 * 256 + 4 * LAYER + 256


@pytest.fixture
def model(tmp_path):
    """Run the command with a configuration; return its status, output and errors."""
    pytest.importorskip("transformers")

    def run(*arguments, config=TINY):
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        # Not a fork of the warm process, whose own line would be among those of the peak.
        command = [sys.executable, "-m", "pytest_gpumem.cli.main", "model", "config.json"]
        return subprocess.run(
            [*command, *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=HANGS,
        )

    return run


def mib_of(category, output):
    """The size of a category in the first line of categories, in MiB."""
    return float(re.search(rf"{category} ([\d.]+) MiB", output)[1])


def test_inference_takes_the_weights_and_the_keys_and_values(model):
    ended = model("--cards=T4", "--only=inference", "--length=4096")
    assert ended.returncode == 0
    title, _, row, _, lead, categories = ended.stdout.splitlines()[:6]
    assert title.split() == ["card", "for", "a", "step", "inference"]
    assert row.startswith("T4 ")
    assert lead.startswith("inference on T4 takes ")
    assert mib_of("parameters", categories) == pytest.approx(2 * PARAMETERS / MIB, rel=0.01)
    keys_and_values = 2 * 4 * 4096 * 128 * 2 / MIB
    assert mib_of("activations", categories) > keys_and_values
    assert "transformers/cache_utils.py:" in ended.stdout  # the line that makes the cache longer
    assert "memory is predicted; kernels did not run" in ended.stdout


def test_training_has_the_optimizers_state_and_tries_what_saves_memory(model):
    ended = model("--cards=T4", "--only=training", "--batch=4")
    assert ended.returncode == 0
    assert mib_of("optimizer state", ended.stdout) == pytest.approx(4 * PARAMETERS / MIB, rel=0.01)
    peak = float(re.search(r"training on T4 takes ([\d.]+) MiB", ended.stdout)[1])
    assert float(re.search(r"with --checkpointing ([\d.]+) MiB", ended.stdout)[1]) < peak


def test_a_rank_of_fsdp2_has_its_share(model):
    ended = model("--cards=T4", "--world-size=8", "--checkpointing")
    state = mib_of("optimizer state", ended.stdout)
    assert state == pytest.approx(4 * PARAMETERS / 8 / MIB, rel=0.02)
    assert "inference" not in ended.stdout


def test_adapters_alone_are_trained(model):
    pytest.importorskip("peft")
    ended = model("--cards=T4", "--only=training", "--lora=8")
    assert mib_of("optimizer state", ended.stdout) < PARAMETERS / MIB


def test_the_largest_batch_is_searched_for_each_step(model):
    ended = model("--cards=T4", "--largest=--batch:1..3", "--only=inference")
    assert ended.returncode == 0
    assert re.search(r"inference:\ncard +for a step +--batch +reserved\n.*\nT4 .* 3 ", ended.stdout)


def test_a_model_that_does_not_fit_is_told_how_much_it_needs(model):
    larger = TINY | {"num_hidden_layers": 6, "hidden_size": 8192, "intermediate_size": 65536}
    ended = model("--cards=T4", "--only=inference", config=larger)
    assert ended.returncode == 1
    assert re.search(r"^T4 .* no$", ended.stdout, re.MULTILINE)
    assert "inference on T4 needs " in ended.stdout


def test_another_model_is_refused_in_a_sentence(model):
    ended = model("--only=inference", config={"model_type": "vit"})
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 2
    assert "name the configuration of a causal language model that transformers has" in ended.stderr


def test_what_transformers_refuses_is_told_in_a_sentence(gpumem, monkeypatch):
    def refused(*_):
        raise GpuMemError("config.json", "ValueError: Unrecognized configuration class", "")

    monkeypatch.setattr(config_model, "find_spec", bool)
    monkeypatch.setattr(config_model, "measured", refused)
    status, _, errors = gpumem("model", "config.json", "--only=inference")
    assert status == 2
    assert errors.splitlines()[-1] == (
        "gpumem: config.json: ValueError: Unrecognized configuration class; name the "
        "configuration of a causal language model that transformers has"
    )


@pytest.mark.parametrize(("missing", "arguments"), [("transformers", ()), ("peft", ("--lora=8",))])
def test_a_package_that_is_missing_is_named(gpumem, monkeypatch, missing, arguments):
    monkeypatch.setattr(config_model, "find_spec", lambda name: None if name == missing else 1)
    status, _, errors = gpumem("model", "config.json", *arguments)
    assert status == 2
    assert errors == f"gpumem: config.json: {missing} is not installed; pip install {missing}\n"


def test_ranks_write_no_text(gpumem, monkeypatch):
    monkeypatch.setattr(config_model, "find_spec", bool)
    status, _, errors = gpumem("model", "c.json", "--world-size=8", "--only=inference")
    assert status == 2
    assert "ranks are for training" in errors
