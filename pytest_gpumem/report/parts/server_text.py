"""Render an inference server's memory decisions at its start as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tabulate import tabulate

from pytest_gpumem.judge.server_start import is_too_close, why_not_started
from pytest_gpumem.sizes import GIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.measurement import ServerStart


def server_tables(results: Iterable[Result]) -> list[str]:
    """Return a table for each result in which a server started."""
    measured = (result.measurement for result in results)
    return [server_table(each.servers) for each in measured if each and each.servers]


def server_table(starts: Sequence[ServerStart]) -> str:
    """Return a line on whether the server starts, and a table with a column per device."""
    first = starts[0]
    answer = f"{first.server} starts"
    if any(map(is_too_close, starts)):
        answer = f"{first.server} may not start"
    elif why_not_started(starts):
        answer = f"{first.server} does not start"
    rows = [
        ("weights", *(_gib(start.weights) for start in starts)),
        ("activations of the profiling run", *(_gib(start.activations) for start in starts)),
        ("other memory that it counted", *(_gib(start.outside) for start in starts)),
        ("set aside for CUDA graphs", *(_gib(start.graphs) for start in starts)),
        ("may use", *(_gib(start.requested) for start in starts)),
        ("KV cache", *(_range(start) for start in starts)),
        ("tokens", *(_from(start.least_tokens, start.tokens) for start in starts)),
        (f"requests of {first.length:,} tokens", *(_requests(start) for start in starts)),
        ("CUDA graphs took", *(_gib(start.graphs_taken) for start in starts)),
    ]
    shown = [row for row in rows if any(row[1:])]
    titles = ["", *(f"cuda:{start.device}" for start in starts)]
    table = tabulate(
        *(shown, titles), disable_numparse=True, colalign=("left", *["right"] * len(starts))
    )
    return "\n".join([answer, table] if shown else [answer])


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes else ""


def _range(start: ServerStart) -> str:
    least, most = (f"{nbytes / GIB:.2f}" for nbytes in start.range)
    if not start.cache:
        return ""
    return f"{least} to {most} GiB" if least != most else f"{most} GiB"


def _requests(start: ServerStart) -> str:
    least = start.requests * start.least_tokens // start.tokens if start.tokens else 0
    return _from(least, start.requests)


def _from(least: int, most: int) -> str:
    if not most:
        return ""
    return f"{most:,}" if least == most else f"{least:,} to {most:,}"
