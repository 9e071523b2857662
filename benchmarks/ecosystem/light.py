"""Do libraries' training steps take the same bytes without NVIDIA's packages, with each torch?

    python -m benchmarks.ecosystem.light [TORCH ...] [--library NAME ...]

For each torch, uv makes three environments, with the names of ``gpumem light --excludes``: with all
packages, without NVIDIA's but cuDNN, without NVIDIA's. Each runs the libraries' tests (run.py). An
environment is deleted after its run. The tables of the versions that are named replace theirs in
benchmarks/results/ecosystem_light_torches.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import LIGHT, RESULTS, ROOT, excludes, output_of, publish, table, where

TORCHES = ("2.6.0", "2.9.1", "2.11.0", "2.15.0")
LIBRARIES = ("accelerate", "bitsandbytes", "peft", "timm", "torchaudio", "torchvision")
LACKING = {"2.15.0": {"torchaudio"}}
"""libraries without a release for a torch"""
OF_TORCH = {"torchaudio"}
"""libraries that have torch's version, and do not say that they need it"""
VERSIONS = """
import json, sys
from importlib.metadata import version
print(json.dumps({name: version(name) for name in sys.argv[1:]}))
"""


def make_environment(
    folder: Path, torch: str, wanted: list[str], wheel: str, options: list[str] | None
) -> str:
    """Make an environment of a kind; return its Python."""
    excluded = excludes(folder, options)
    output_of("uv", "venv", "--quiet", "--python", sys.executable, str(folder / "env"))
    install = ["uv", "pip", "install", "--quiet", "--python", str(folder / "env"), *excluded]
    pinned = [f"{name}=={torch}" if name in OF_TORCH else name for name in wanted]
    output_of(*install, f"torch=={torch}", wheel, *pinned)
    return str(folder / "env/bin/python")


def peaks(python: str, folder: Path, wanted: list[str]) -> dict[tuple[str, str], str]:
    """Run libraries' tests; return allocated and reserved bytes of each part of a test.

    A library whose tests fail has what its session said in place of its tests.
    """
    command = [python, "-m", "benchmarks.ecosystem.run", f"--reports={folder}", *wanted]
    said = subprocess.run(
        command, cwd=ROOT, env=os.environ, check=False, stdout=subprocess.PIPE, text=True
    ).stdout
    came = {}
    for library in wanted:
        outcome = re.search(rf"(?m)^{library} \S+: (.*), \d+ s$", said)
        if outcome is None or outcome[1] != "works":
            came[library, "all"] = outcome[1] if outcome else "not installed"
            print(said)
            continue
        report = json.loads((folder / f"{library}.json").read_text(encoding="utf-8"))
        for result in report["results"]:
            came[library, test_of(result)] = "{allocated:,} / {reserved:,}".format(
                **result["measurement"]["peaks"][0]
            )
    return came


def test_of(result: dict[str, Any]) -> str:
    """Return a test's name, with the part of it."""
    name = result["nodeid"].rpartition("::")[2]
    return f"{name} ({result['part']})" if result["part"] else name


def text_of(torch: str, libraries: list[str], wheel: str) -> str:
    """Return the table of a torch."""
    began = "; ".join(f"{name} {value}" for name, value in where().items())
    wanted = [name for name in libraries if name not in LACKING.get(torch, ())]
    measured = {}
    versions: dict[str, str] = {}
    for kind, options in LIGHT.items():
        with tempfile.TemporaryDirectory(prefix="light-") as name:
            python = make_environment(Path(name), torch, wanted, wheel, options)
            own = json.loads(output_of(python, "-c", VERSIONS, "torch", *wanted))
            assert own == (versions or own), (own, versions)
            versions = own
            measured[kind] = peaks(python, Path(name), wanted)
            print(torch, kind, measured[kind], flush=True)
    whole, *others = measured.values()
    rows = []
    for (library, test), figures in whole.items():
        compared = [other.get((library, test), "did not run") for other in others]
        same = ["the same" if it == figures else it for it in compared]
        rows.append([f"{library} {versions[library]}", test, figures, *same])
    drawn = table(rows, ["library", "test", *LIGHT])
    return f"torch {versions['torch']}; {began}\n{drawn}"


def main() -> None:
    """Run the versions that are named, and keep the tables of the others."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("torches", nargs="*", default=TORCHES, metavar="TORCH")
    parser.add_argument("--library", action="append", choices=LIBRARIES, help="all, if none is")
    options = parser.parse_args()
    path = RESULTS / "ecosystem_light_torches.txt"
    tables = {}
    if path.exists():
        before = path.read_text(encoding="utf-8").rstrip().split("\n\n")[1:]
        tables = {re.match(r"torch ([\d.]+)", text)[1]: text for text in before}
    title = (
        f"{__doc__.splitlines()[0]}\nAllocated and reserved bytes of libraries' tests "
        "(benchmarks/ecosystem) on virtual cards."
    )
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder]
        output_of(*build, str(ROOT))
        (wheel,) = Path(folder).glob("*.whl")
        for torch in options.torches:
            tables[torch] = text_of(torch, options.library or list(LIBRARIES), str(wheel))
            in_order = sorted(tables, key=lambda it: [int(part) for part in it.split(".")])
            texts = [title, *(tables[it] for it in in_order)]
            publish("ecosystem_light_torches", "\n\n".join(texts))


if __name__ == "__main__":
    main()
