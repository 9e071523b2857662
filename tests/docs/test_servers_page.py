"""The page on servers is true: its test runs, with a package that has vLLM's names."""

from __future__ import annotations

from helpers import toy_vllm
from helpers.pages import blocks

PAGE = "how-to/servers.md"


def test_the_test_of_the_page_runs(suite):
    toy_vllm.write(suite.path)
    (source,) = blocks(PAGE, "python")
    session = suite.run_warm("--gpumem-baseline-dir=none", source=source)
    assert session.outcomes == {"passed": 1}, session.out
    assert "tokens in the KV cache" in session.flat or "server profiling run" in session.flat
    few = source.replace("10_000", "20_000_000")
    session = suite.run_warm(source=few)
    assert "fewer than min_cache_tokens=20000000" in session.flat
