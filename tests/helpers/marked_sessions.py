"""Sessions of one marked test whose body is given in lines, and what leaks."""

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
    """The session of one test with a marker's arguments and a body, behind a head."""
    lines = "\n".join(f"    {line}" for line in body)
    source = f"{head}\n@pytest.mark.gpu_memory({mark})\ndef test_it({fixtures}):\n{lines}\n"
    return suite.run(*args, source=source)


def leaked(suite, *body, mark="max_leak_mib=0", **more):
    """The same, of a test that is to leave nothing."""
    return one_test(suite, *body, mark=mark, **more)
