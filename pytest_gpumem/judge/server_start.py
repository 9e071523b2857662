"""Decide whether an inference server starts, and with which KV cache, from its own figures.

A real GPU uses memory that the virtual GPU cannot predict, so the cache's size there is a range.
"""

from __future__ import annotations

from dataclasses import replace
from textwrap import shorten
from typing import TYPE_CHECKING, Final

from pytest_gpumem.sizes import GIB, MIB, format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.measurement import ServerStart
    from pytest_gpumem.sizes import Tolerance

MARGIN: Final = GIB // 10
"""within this many bytes of its limit a start is not predicted: on one RTX 3090 the same command
started, and failed some minutes later with 0.08 GiB less (log files of vllm-offload-profiles)"""
# The next three are from public log files of 52 starts on real GPUs
# (benchmarks/results/published_servers.txt).
OUTSIDE: Final = 576 * MIB
"""upper bound in bytes of the memory outside of PyTorch that a server on one GPU uses before it
sizes its cache: kernels that are loaded at their first run. Measured: 0.24 to 0.51 GiB on an H100,
0.34 GiB on an A100"""
OUTSIDE_OF_SEVERAL: Final = 2304 * MIB
"""the same bound for each of several GPUs, with NCCL's buffers. Measured: 2.06 to 2.13 GiB on
H100s"""
GRAPH: Final = (200 << 10, 1350 << 10)
"""lower and upper bound in bytes of the additional memory that each CUDA graph uses on a real GPU.
Measured: 0.23 MiB on an L4, 0.33 to 0.96 MiB on an H100, 1.3 MiB on an A100"""
MAX_REFUSAL: Final = 160
"""maximum number of characters of the server's error that a verdict shows"""
ADVICE: Final = (
    "declare shorter requests (vLLM's max_model_len) or a larger share of the memory "
    "(gpu_memory_utilization, SGLang's mem_fraction_static), or take a larger card: gpumem run "
    "searches for values with which it starts"
)


def with_unknown(start: ServerStart, devices: int) -> ServerStart:
    """Return a start on the virtual GPU with the additional memory that a real GPU may use."""
    outside = OUTSIDE if devices == 1 else OUTSIDE_OF_SEVERAL
    graphs = [start.captured * nbytes for nbytes in GRAPH]
    if start.graphs:  # the server sets memory aside for graphs before it sizes the cache
        return replace(start, unseen=(graphs[0], outside + graphs[1]))
    # A server without a profiling run loads the kernels after it has allocated the cache.
    later = graphs[1] if start.activations else graphs[1] + outside
    return replace(start, unseen=(0, outside), unseen_later=later)


def overflow(start: ServerStart) -> int:
    """Return how many bytes a real GPU may lack after it has allocated the KV cache; 0 if none."""
    if start.free is None or start.unseen == (0, 0):
        return 0
    return max(start.unseen_later + MARGIN - start.free, 0)


def is_too_close(start: ServerStart) -> bool:
    """Return whether a start is too near to a limit to be predicted."""
    if start.unseen == (0, 0) or overflow(start):
        return bool(overflow(start))
    least, most = start.range
    return bool(start.needed) and least - MARGIN < start.needed <= most + MARGIN


def shortage(start: ServerStart) -> int:
    """Return how many bytes the KV cache lacks to start for sure; 0 or less if it lacks none."""
    return start.needed - start.range[0] + (MARGIN if start.unseen != (0, 0) else 0)


def why_not_started(starts: Sequence[ServerStart]) -> str:
    """Return, as a sentence, why a server does not start or may not start; "" if it starts."""
    for start in starts:
        if is_too_close(start):
            return f"it is too close to tell whether {start.server} starts: {_lack(start)}"
    for start in starts:
        if start.refusal:
            known = start.needed > start.cache
            reason = shorten(start.refusal, MAX_REFUSAL, placeholder=" ...")
            return f"{start.server} does not start: {_lack(start) if known else reason}"
        if start.needed and shortage(start) > 0:
            return f"{start.server} does not start on a real GPU: {_lack(start)}"
    return ""


def _lack(start: ServerStart) -> str:
    """Return what a start lacks, or may lack, as a clause."""
    if overflow(start):
        left = f"{(start.free or 0) / GIB:.2f} GiB of the GPU are left in the end"
        graphs = f"{start.captured:,} CUDA graphs" if start.captured else ""
        takers = " and ".join(filter(None, ("" if start.activations else "kernels", graphs)))
        if not takers:
            return left
        more = f"{start.unseen_later / GIB:.2f} GiB more"
        return f"{left}, and its {takers} may take {more} on a real GPU"
    least, most = (f"{max(nbytes, 0) / GIB:.2f}" for nbytes in start.range)
    left = f"{least} to {most}" if least != most else most
    return (
        f"one request of {start.length:,} tokens needs {start.needed / GIB:.2f} GiB of KV cache, "
        f"and {left} GiB are left"
    )


def too_few_tokens(starts: Sequence[ServerStart], limit: int | None) -> str:
    """Return a sentence if the KV cache may hold fewer tokens than ``limit``; else ""."""
    if limit is None or not starts:
        return ""
    start = min(starts, key=lambda each: each.least_tokens)
    if start.least_tokens >= limit:
        return ""
    return f"{cache_text(start)}, fewer than min_cache_tokens={limit}"


def cache_text(start: ServerStart) -> str:
    """Return a KV cache's size as text: "the KV cache holds 565,952 tokens"."""
    text = f"the KV cache holds {start.tokens:,} tokens"
    if start.least_tokens < start.tokens:
        return f"{text} ({start.least_tokens:,} or more on a real GPU)"
    return text


def fewer_tokens(starts: Sequence[ServerStart], old: int | None, tolerance: Tolerance) -> str:
    """Return a sentence if the KV cache shrank by more than the tolerance; else ""."""
    if not starts or old is None:
        return ""
    start = min(starts, key=lambda each: each.tokens)
    lost = (old - start.tokens) * start.cache // max(start.tokens, 1)
    if lost <= tolerance.allowance(start.cache):
        return ""
    return (
        f"the KV cache holds {old - start.tokens:,} tokens fewer ({format_size(lost)}): "
        f"{old:,} -> {start.tokens:,}"
    )
