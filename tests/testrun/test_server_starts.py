"""A marked test that starts an inference server: what the server decided is judged with it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from helpers import toy_vllm

from pytest_gpumem.devices import servers

SOURCE = """
import pytest

@pytest.mark.gpu_memory(min_cache_tokens=200_000)
def test_starts():
    from vllm import LLM
    LLM()

@pytest.mark.gpu_memory(min_cache_tokens=300_000)
def test_few():
    from vllm import LLM
    LLM()

@pytest.mark.gpu_memory
def test_refused():
    from vllm import LLM
    LLM(max_model_len=300_000)

@pytest.mark.gpu_memory(min_cache_tokens=1)
def test_no_server():
    import torch
    torch.ones(1 << 20, device="cuda")

@pytest.mark.gpu_memory
def test_another_error():
    from vllm import LLM
    with pytest.raises((RuntimeError, ValueError)):
        LLM(max_model_len=300_000)
    LLM()
    assert False

@pytest.mark.gpu_memory
def test_expected():
    from vllm import LLM
    with pytest.raises((RuntimeError, ValueError)):
        LLM(max_model_len=300_000)
"""


@pytest.mark.parametrize("one_process", ["0", "1"])
def test_a_server_in_a_test(suite, monkeypatch, one_process):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", one_process)
    toy_vllm.write(suite.path)
    options = "--gpumem-card=T4", "-v", "-rN", "-p", "no:randomly"
    session = suite.run_warm(*options, source=SOURCE)
    assert session.outcomes == {"passed": 2, "failed": 4}, session.out
    verdicts = session.verdicts()
    assert verdicts["test_starts (server profiling run)"] == "no baseline"
    assert verdicts["test_few (server profiling run)"] == "under limit"
    assert verdicts["test_refused"] == "no start"
    assert "(203,664 or more on a real GPU), fewer than min_cache_tokens=300000" in session.flat
    assert "one request of 300,000 tokens needs 18.31 GiB of KV cache" in session.flat
    assert "no inference server that is known started in this test" in session.flat
    assert not any(name.startswith("test_another_error") for name in verdicts)


def test_hooks_are_registered_once_for_many_tests(monkeypatch):
    calls = []
    library = SimpleNamespace(HOOKS={"json": lambda _watch, module: calls.append(module)})
    monkeypatch.setattr(servers, "LIBRARIES", (library,))
    watch = servers.ServerWatch()
    watch.install()
    watch.install()
    assert len(calls) == 1
