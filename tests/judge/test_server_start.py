"""What is said of an inference server's start, by the figures that it found."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.judged import LENIENT, NOTHING, known, measured

from pytest_gpumem.judge.judge import judge
from pytest_gpumem.judge.server_start import (
    GRAPH,
    MARGIN,
    OUTSIDE,
    OUTSIDE_OF_SEVERAL,
    cache_text,
    fewer_tokens,
    is_too_close,
    overflow,
    shortage,
    too_few_tokens,
    why_not_started,
    with_unknown,
)
from pytest_gpumem.judge.verdict import Kind
from pytest_gpumem.measurement import ServerStart
from pytest_gpumem.sizes import GIB, MIB, Tolerance
from pytest_gpumem.spec import MemorySpec

START = ServerStart(
    "vLLM 0.33.0",
    device=0,
    total=24 * GIB,
    requested=20 * GIB,
    weights=15 * GIB,
    cache=4 * GIB,
    needed=GIB,
    tokens=32768,
    requests=4,
    length=8192,
)
HALF = (0, 512 * MIB)


@pytest.mark.parametrize(
    ("cache", "unseen", "answer"),
    [
        (GIB, (0, 0), ""),  # a real GPU: the server has answered
        (GIB + 512 * MIB + MARGIN, HALF, ""),
        (GIB + 512 * MIB + MARGIN - 1, HALF, "too close"),
        (GIB - MARGIN, HALF, "too close"),
        (GIB, HALF, "too close"),
        (GIB - MARGIN - 1, HALF, "does not start on a real GPU"),
    ],
)
def test_a_start_near_its_limit_is_not_promised(cache, unseen, answer):
    start = replace(START, cache=cache, unseen=unseen)
    assert answer in why_not_started([start])
    assert is_too_close(start) == (answer == "too close")
    assert (shortage(start) > 0) == bool(answer)


def test_a_real_gpu_uses_more():
    """Of graphs that the server has measured, its cache has less; of others, the device has."""
    start = replace(START, captured=1000, free=2 * GIB, activations=MIB)
    assert with_unknown(START, 1).unseen == (0, OUTSIDE)
    assert with_unknown(START, 2).unseen == (0, OUTSIDE_OF_SEVERAL)
    measured_graphs = with_unknown(replace(start, graphs=MIB), 1)
    assert measured_graphs.unseen == (1000 * GRAPH[0], OUTSIDE + 1000 * GRAPH[1])
    assert measured_graphs.unseen_later == 0
    later = with_unknown(start, 1)
    assert (later.unseen, later.unseen_later) == ((0, OUTSIDE), 1000 * GRAPH[1])
    assert (overflow(later), is_too_close(later)) == (0, False)
    without_profile = with_unknown(replace(start, activations=0), 1)
    assert without_profile.unseen_later == OUTSIDE + 1000 * GRAPH[1]
    refusal = why_not_started([replace(without_profile, free=GIB)])
    assert "its kernels and 1,000 CUDA graphs may take 1.85 GiB more" in refusal
    eager = with_unknown(replace(start, activations=0, captured=0, free=GIB // 2), 1)
    assert "its kernels may take 0.56 GiB more on a real GPU" in why_not_started([eager])
    eager = with_unknown(replace(start, captured=0, free=0), 1)
    assert why_not_started([eager]).endswith("0.00 GiB of the GPU are left in the end")
    full = replace(later, free=GIB)
    assert overflow(full) == later.unseen_later + MARGIN - GIB
    assert why_not_started([full]) == (
        "it is too close to tell whether vLLM 0.33.0 starts: 1.00 GiB of the GPU are left in the "
        "end, and its 1,000 CUDA graphs may take 1.29 GiB more on a real GPU"
    )
    assert why_not_started([replace(start, free=0)]) == ""  # a real GPU: it has started


def test_a_refusal_has_a_reason():
    refused = replace(START, cache=GIB // 2, refusal="To serve at least one request ...")
    assert why_not_started([START, refused]) == (
        "vLLM 0.33.0 does not start: one request of 8,192 tokens needs 1.00 GiB of KV cache, and "
        "0.50 GiB are left"
    )
    full = replace(START, needed=0, refusal="CUDA out of memory. Tried to allocate " + 40 * "more ")
    text = why_not_started([full])
    assert text.startswith("vLLM 0.33.0 does not start: CUDA out of memory. Tried to allocate more")
    assert text.endswith(" ...")


def test_a_service_needs_tokens_on_a_real_gpu():
    start = replace(START, unseen=HALF)
    assert cache_text(START) == "the KV cache holds 32,768 tokens"
    assert cache_text(start) == "the KV cache holds 32,768 tokens (28,672 or more on a real GPU)"
    assert too_few_tokens([start], 28_672) == too_few_tokens([start], None) == ""
    assert too_few_tokens([START, start], 28_673).endswith("fewer than min_cache_tokens=28673")
    assert too_few_tokens([], 1) == ""


def test_a_cache_may_shrink_within_the_tolerance():
    tolerance = Tolerance(relative=0, absolute=MIB)
    token = 4 * GIB // 32768
    assert fewer_tokens([START], 32768 + MIB // token, tolerance) == ""
    assert fewer_tokens([START], 32768 + MIB // token + 1, tolerance) == (
        "the KV cache holds 9 tokens fewer (1.12 MiB): 32,777 -> 32,768"
    )
    assert fewer_tokens([START], None, tolerance) == fewer_tokens([], 9, tolerance) == ""


def test_verdicts_on_a_start():
    """A refusal comes first, then the limit, then the baseline: its peaks, then its tokens."""
    peak = (15 * GIB, 15 * GIB)
    started = measured(peak, servers=(START,))
    refused = measured(peak, servers=(replace(START, refusal="memory"),))
    limited = MemorySpec(min_cache_tokens=40_000)
    verdict = judge(refused, limited, NOTHING, LENIENT)
    assert (verdict.kind, verdict.failed, verdict.comparisons) == (Kind.NO_START, True, ())
    verdict = judge(started, limited, NOTHING, LENIENT)
    assert (verdict.kind, verdict.failed) == (Kind.UNDER_LIMIT, True)
    for old, kind in ((32_768, Kind.WITHIN), (33_000, Kind.REGRESSED)):
        verdict = judge(started, MemorySpec(), known(peak, cache_tokens=old), LENIENT)
        assert verdict.kind is kind
    verdict = judge(started, MemorySpec(), known((GIB, GIB), cache_tokens=33_000), LENIENT)
    assert verdict.headline.startswith("regressed: peak allocated grew")
    assert "232 tokens fewer" in str(verdict.notes[0])
    assert (
        "32,768 tokens in the KV cache, with"
        in judge(started, MemorySpec(), NOTHING, LENIENT).headline
    )
