"""How long steps and marked tests take on the virtual GPU.

    python benchmarks/step_time.py [--repeats 7]

First a ResNet-50 step, batch 32, with and without a measurement around it, by turns; then what
pytest takes for a marked test that does nothing, against the same test unmarked (sessions of
ten and of 1,010 tests, so that what a session costs once is told apart from what a test costs).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from provenance import line, publish
from tabulate import tabulate

CARD = "H100"
STEPS = 10
TESTS = {
    "unmarked": "import torch\ndef test_it(n):\n    pass\n",
    "marked, empty": "import pytest, torch\n@pytest.mark.gpu_memory\ndef test_it(n):\n    pass\n",
    "marked, 1 tensor": (
        "import pytest, torch\n@pytest.mark.gpu_memory(max_gib=1, baseline=False)\n"
        "def test_it(n):\n    torch.empty(1 << 20, device='cuda')\n"
    ),
}
GENERATE = "def pytest_generate_tests(metafunc):\n    metafunc.parametrize('n', range({count}))\n"


def steps(repeats: int) -> list[list[object]]:
    """Time ResNet-50's steps in this process."""
    from pytest_gpumem.meter.block import measure, use_virtual_gpu

    use_virtual_gpu(CARD, values="off")
    import torch
    import torchvision

    model = torchvision.models.resnet50().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(32, 3, 224, 224, device="cuda")
    y = torch.randint(0, 1000, (32,), device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    def plain() -> None:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()

    def measured() -> None:
        with measure():
            plain()

    plain()
    times: dict[str, list[float]] = {"plain": [], "measured": []}
    for _ in range(repeats):
        for name, run in (("plain", plain), ("measured", measured)):
            started = time.perf_counter()
            run()
            times[name].append(1000 * (time.perf_counter() - started))
    plain_ms, measured_ms = (statistics.median(times[name]) for name in ("plain", "measured"))
    return [
        [
            "ResNet-50 step, batch 32",
            f"{plain_ms / STEPS:.1f}",
            f"{min(times['plain']) / STEPS:.1f}",
        ],
        [
            f"one measurement around {STEPS} steps, in all",
            f"{measured_ms - plain_ms:.1f}",
            f"{min(times['measured']) - min(times['plain']):.1f}",
        ],
    ]


def session(folder: Path) -> float:
    """Run pytest on the folder and return its milliseconds."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "gpumem",
        "--gpumem-device=virtual", str(folder),
    ]  # fmt: skip
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    started = time.perf_counter()
    subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True)
    return 1000 * (time.perf_counter() - started)


def sessions(repeats: int, few: int = 10, many: int = 1010) -> list[list[object]]:
    """Time sessions of few and of many tests of each kind."""
    times: dict[tuple[str, int], list[float]] = {(k, n): [] for k in TESTS for n in (few, many)}
    with tempfile.TemporaryDirectory() as name:
        folders = {}
        for kind, count in times:
            folder = folders[kind, count] = Path(name) / f"{len(folders)}"
            folder.mkdir()
            (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
            (folder / "conftest.py").write_text(GENERATE.format(count=count), encoding="utf-8")
            (folder / "test_it.py").write_text(TESTS[kind], encoding="utf-8")
        for _ in range(repeats):
            for key, folder in folders.items():
                times[key].append(session(folder))
    rows = []
    for kind in TESTS:
        pairs = zip(times[kind, many], times[kind, few], strict=True)
        each = [(more - less) / (many - few) for more, less in pairs]
        rows.append([f"test, {kind}", f"{statistics.median(each):.2f}", f"{min(each):.2f}"])
    for kind in ("unmarked", "marked, empty"):
        values = times[kind, few]
        row = f"whole session of {few} tests, {kind} (imports torch)"
        rows.append([row, f"{statistics.median(values):.0f}", f"{min(values):.0f}"])
        values = times[kind, many]
        row = f"whole session of {many} tests, {kind}"
        rows.append([row, f"{statistics.median(values):.0f}", f"{min(values):.0f}"])
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    table = sessions(max(3, repeats // 2)) + steps(repeats)
    text = [
        f"Time on the virtual GPU ({CARD}), ms: medians of {repeats} runs, by turns",
        f"(of {max(3, repeats // 2)} sessions of pytest)",
        line("torchvision"),
        "",
        tabulate(
            table,
            ["what", "median", "least"],
            disable_numparse=True,
            colalign=("left", "right", "right"),
        ),
        "",
        f"load when measured: {os.getloadavg()[0]:.1f}",
    ]
    publish("step_time", "\n".join(text))


if __name__ == "__main__":
    main()
