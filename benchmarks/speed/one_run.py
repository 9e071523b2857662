"""What a suite of small tests costs: 100 tests that train an MLP and check its loss.

    python -m benchmarks.speed.one_run [--tests 100] [--repeats 3] [--dry]

Each session is a process of its own. Times are those of the processor, the shortest of a few
rounds. Each body writes a line as it runs: the table has how often it ran.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import line, publish, session, table

SUITE = """
import pytest, torch

{marker}
@pytest.mark.parametrize("number", range({count}))
def test_step(number):
    with open("runs", "a") as runs:
        runs.write("x")
    torch.manual_seed(number)
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
    ).to("{device}")
    optimizer = torch.optim.Adam(net.parameters())
    x = torch.randn(32, 64).to("{device}")
    for _ in range(3):
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.isfinite(loss)
"""
MARKER = "@pytest.mark.gpu_memory"


class Case(NamedTuple):
    """One kind of session."""

    name: str
    marker: str
    device: str
    options: tuple[str, ...] = ()


CASES = (
    Case("on the CPU, unmarked", "", "cpu"),
    Case("comparing, values off", MARKER, "cuda", ("--gpumem-values=off",)),
    Case("comparing", MARKER, "cuda"),
    Case("comparing, values full", MARKER, "cuda", ("--gpumem-values=full",)),
    Case("recording", MARKER, "cuda", ("--gpumem-update-baselines",)),
)


def seconds_of(case: Case, folder: Path, count: int) -> tuple[float, int]:
    """Run a session; return its processor time, and how often a body ran."""
    source = SUITE.format(marker=case.marker, count=count, device=case.device)
    (folder / "test_steps.py").write_text(source, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    runs = folder / "runs"
    runs.write_text("", encoding="utf-8")
    done = session(folder, *case.options)
    if done.status and case.options != ("--gpumem-values=off",):
        sys.exit(done.output)
    return done.cpu, len(runs.read_text())


def main() -> None:
    """Time all of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tests", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dry", action="store_true", help="record nothing")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seconds_of(CASES[-1], folder, options.tests)  # the baselines to compare with
        for case in CASES:
            rounds = [seconds_of(case, folder, options.tests) for _ in range(options.repeats)]
            rows.append([case.name, f"{min(rounds)[0]:.1f}", f"{rounds[0][1]}"])
            print(*rows[-1], flush=True)
    drawn = table(rows, ["a session", "CPU s", "bodies that ran"], "lr")
    head = f"{options.tests} small tests (an MLP, Adam, three steps, an assertion on the loss)"
    publish("one_run", f"{head}\n{line()}\n\n{drawn}", keep=not options.dry)


if __name__ == "__main__":
    main()
