"""What is tried after a server refused to start; test_server_programs.py starts servers."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from pytest_gpumem.cli import server_search
from pytest_gpumem.cli.server_search import ServerSearch
from pytest_gpumem.devices.cards import CARDS
from pytest_gpumem.devices.variables import SERVER_ARGUMENTS
from pytest_gpumem.errors import SpecError
from pytest_gpumem.judge.verdict import Kind, Verdict
from pytest_gpumem.measurement import ServerStart
from pytest_gpumem.sizes import GIB

CARD = CARDS["T4"]
REFUSED = ServerStart(
    "vLLM 0.33.0",
    device=0,
    total=CARD.total_memory,
    requested=12 * GIB,
    cache=4 * GIB,
    needed=8 * GIB,
    tokens=4096,
    length=8192,
)


@pytest.fixture
def search(monkeypatch):
    """Search with a server whose start ``starts`` tells of, by its card and arguments.

    Return what is found, and the trials.
    """

    def run(starts, refused=REFUSED):
        trials = []

        def measured(options, program):
            assert program == ["serve.py"]
            (card,) = (it.removeprefix("--card=") for it in options if it.startswith("--card="))
            arguments = json.loads(os.environ[SERVER_ARGUMENTS])
            trials.append(arguments or card)
            ok = starts(card, arguments)
            start = replace(refused, cache=refused.needed) if ok else refused
            kind = Kind.NO_BASELINE if ok else Kind.NO_START
            return (
                SimpleNamespace(
                    measurement=SimpleNamespace(servers=(start,)),
                    verdict=Verdict(kind, not ok, ""),
                ),
            )

        monkeypatch.setattr(server_search, "measured", measured)
        monkeypatch.delenv(SERVER_ARGUMENTS, raising=False)
        table = ServerSearch(["--values=off"], ["serve.py"], CARD).table(refused)
        assert SERVER_ARGUMENTS not in os.environ
        return [line.split("  ")[0] for line in table.splitlines()[2:]], trials

    return run


def test_shorter_requests_another_share_and_a_larger_card_are_tried(search):
    found, trials = search(lambda *_: True)
    card = trials.pop()
    assert CARDS[card].total_memory > CARD.total_memory + REFUSED.needed - REFUSED.cache
    assert trials == [{"max_model_len": 4096}]  # a share of 16 of 14.57 GiB is none
    assert found == ["max_model_len=4096", f"card {card}"]


def test_the_share_that_is_enough_is_tried(search):
    refused = replace(REFUSED, needed=5 * GIB)
    found, trials = search(lambda card, arguments: "gpu_memory_utilization" in arguments, refused)
    shares = [it["gpu_memory_utilization"] for it in trials if "gpu_memory_utilization" in it]
    assert shares == [0.9]  # 13 of 14.57 GiB
    assert found == ["gpu_memory_utilization=0.9"]


def test_cards_are_tried_from_small_to_large_until_it_starts(search, capsys):
    found, trials = search(lambda card, _: CARDS[card].total_memory > 24 * GIB)
    sizes = [CARDS[it].total_memory for it in trials if isinstance(it, str)]
    assert sizes == sorted(sizes)
    assert [size > 24 * GIB for size in sizes] == [False] * (len(sizes) - 1) + [True]
    assert len(sizes) > 1
    assert found == [f"card {trials[-1]}"]
    told = [line for line in capsys.readouterr().err.splitlines() if ": card " in line]
    assert told[0] == f"gpumem: card {trials[-len(sizes)]}: does not start"
    assert told[-1] == f"gpumem: card {trials[-1]}: starts"


def test_where_no_request_s_need_is_known_only_cards_are_tried(search):
    """As of SGLang."""
    found, trials = search(lambda *_: True, replace(REFUSED, needed=0))
    assert found == [f"card {card}" for card in trials]
    assert len(trials) == 1


def test_a_program_that_fails_otherwise_is_told(search, capsys):
    def fails(*_):
        raise SpecError("serve.py", "it has no such argument", "write another")

    assert search(fails)[0] == []
    told = capsys.readouterr().err
    assert "gpumem: max_model_len=4096: serve.py: it has no such argument" in told
