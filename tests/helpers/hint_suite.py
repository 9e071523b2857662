"""Run sessions of one recorded test, and return its hints."""

from __future__ import annotations

import json

HEAD = """
import pytest, torch
from torch.nn import Linear, Sequential

N, BATCH = 1024, 8192
'''A layer's parameters are 4 MiB, its outputs 32 MiB.'''

def mib(n, device="cuda"):
    return torch.empty(int(n * 2**20), dtype=torch.uint8, device=device)

def net(layers=3, **options):
    made = [Linear(N, N, bias=False, device="cuda", **options) for _ in range(layers)]
    return Sequential(*made)

def batch(**options):
    return torch.randn(BATCH, N, device="cuda", **options)

"""


def recorded_hints(suite):
    """Return a function that runs a test, and returns hints with a word and the peak in MiB."""

    def run(word, body, marker=""):
        lines = body.strip("\n").splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip())
        source = "\n".join(f"    {line[indent:]}" for line in lines)
        mark = f"@pytest.mark.gpu_memory(baseline=False, {marker})"
        suite.write("test_it.py", f"{HEAD}\n{mark}\ndef test_it():\n{source}\n")
        session = suite.run("--gpumem-attribution=on", "--gpumem-json=report.json")
        assert session.outcomes == {"passed": 1}, session.out
        (result,) = json.loads((suite.path / "report.json").read_text())["results"]
        measurement = result["measurement"]
        noted = (*measurement["attributions"], measurement)
        found = [hint for record in noted for hint in record["hints"]]
        return [hint for hint in found if word in hint], session.figures()["test_it"][0]

    return run
