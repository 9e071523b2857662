"""Run sessions of one marked test, given the lines of its body."""

from __future__ import annotations

LEAKS = """
CACHE = []

@pytest.mark.gpu_memory(max_leak_mib=0)
def test_leaks():
    for _ in range(5):
        CACHE.append(torch.empty(16 << 20, dtype=torch.uint8, device="cuda"))

@pytest.mark.gpu_memory
def test_after():
    mib(1)
"""


def one_test(suite, *body, mark, head="", fixtures="", args=()):
    """Run a session of one test; ``head`` is code before it, ``mark`` the marker's arguments."""
    lines = "\n".join(f"    {line}" for line in body)
    source = f"{head}\n@pytest.mark.gpu_memory({mark})\ndef test_it({fixtures}):\n{lines}\n"
    return suite.run(*args, source=source)


def leaked(suite, *body, mark="max_leak_mib=0", **more):
    """Run a session of one test that must leave no memory behind."""
    return one_test(suite, *body, mark=mark, **more)
