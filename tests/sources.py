"""Source text that inner sessions' test files begin with."""

from __future__ import annotations

HELPER = """
def mib(n, device="cuda"):
    return torch.empty(int(n * 2**20), dtype=torch.uint8, device=device)
"""
