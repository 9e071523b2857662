"""``gpumem verify``: compare the virtual GPU's predictions with this machine's GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tabulate import tabulate

from pytest_gpumem.cli.outcome import FOUND, OK, Outcome, write_json
from pytest_gpumem.devices.cards import CARDS, LIMITS, card_file_text, estimated_context
from pytest_gpumem.errors import DeviceError
from pytest_gpumem.report.text import mib, printable
from pytest_gpumem.session.output_files import require_replaceable
from pytest_gpumem.version import __version__

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

HELP: Final = (
    "measure steps on this machine's GPU, and compare them with the virtual GPU's predictions"
)
DESCRIPTION: Final = (
    f"{HELP[0].upper()}{HELP[1:]}. Twenty steps (matrix products, attention, convolutions, "
    "optimizers, mixed precision, a compiled step) run on the GPU, then on a virtual GPU "
    "of the same model, with the same torch and cuDNN. Exit status 1: a prediction of "
    "peak allocated memory is wrong by more than 1 %, or a step failed on one of the two "
    "GPUs."
)
FORMAT: Final = 1
BEGINNING: Final = rb'\{\s*"format": \d+,\s*"gpumem": ".*",\s*"card": '
"""pattern for the first bytes of a file that ``--json`` may replace"""
LIMIT: Final = 0.01
"""relative difference of peak allocated above which the command fails"""
FIGURES: Final = ("allocated", "reserved")
CHILD: Final = ("-m", "pytest_gpumem.cli.verify.measuring")
TIMEOUT: Final = 1800
"""seconds for a child process"""


@dataclass(frozen=True)
class Row:
    """A step's figures in bytes, on the GPU and on the virtual GPU; only "error" if it failed."""

    name: str
    measured: Mapping[str, Any]
    predicted: Mapping[str, Any]

    @property
    def error(self) -> str:
        """Where and why the step failed; "" if it ran on both GPUs."""
        for where, figures in (("GPU", self.measured), ("virtual GPU", self.predicted)):
            if "error" in figures:
                return f"{self.name}: on the {where}: {figures['error']}"
        return ""

    def difference(self, figure: str) -> int:
        """Return predicted minus measured, in bytes."""
        return int(self.predicted[figure]) - int(self.measured[figure])

    def relative(self, figure: str) -> float:
        """Return the prediction's difference relative to the measured figure."""
        return self.difference(figure) / max(int(self.measured[figure]), 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write all figures to this file, for an issue"
    )


def run(arguments: argparse.Namespace) -> Outcome:
    """Measure the steps on both GPUs, and return the comparison."""
    if arguments.json is not None:
        require_replaceable(arguments.json, BEGINNING, f"--json={arguments.json}")
    with tempfile.TemporaryDirectory(prefix="gpumem-verify-") as name:
        folder = Path(name)
        _print_line("on the GPU:")
        measured = measure_in_child(folder / "measured.json", ())
        card = card_of(measured["device"], folder)
        _print_line(f"on a virtual GPU ({card[0]}):")
        predicted = measure_in_child(folder / "predicted.json", (card[1],))
    rows = [
        Row(step, figures, predicted["steps"].get(step, {"error": "this step did not run"}))
        for step, figures in measured["steps"].items()
    ]
    if arguments.json is not None:
        head = {"format": FORMAT, "gpumem": __version__, "card": card[0]}
        write_json(arguments.json, {**head, "measured": measured, "predicted": predicted})
    status = (
        FOUND if any(row.error or abs(row.relative("allocated")) > LIMIT for row in rows) else OK
    )
    return Outcome(text_of(rows, measured, card[0]), status)


def measure_in_child(out: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Run the battery in a new process; return its figures."""
    command = [sys.executable, *CHILD, str(out), *arguments]
    subject = "gpumem verify"
    # Inductor tries kernels only when it compiles for the first time, not if an earlier process
    # filled its cache. Both processes must do the same, so each gets its own cache.
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(out.with_suffix(".inductor"))}
    try:
        done = subprocess.run(command, check=False, timeout=TIMEOUT, env=environment)
        status = done.returncode
    except subprocess.TimeoutExpired:
        remedy = "read the last lines that it printed"
        raise DeviceError(subject, f"its process ran longer than {TIMEOUT} s", remedy) from None
    if status or not out.exists():
        remedy = "this command needs a GPU that torch sees, and pytest-gpumem's native library"
        raise DeviceError(subject, f"its process ended with status {status} (see above)", remedy)
    document: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return document


def card_of(device: Mapping[str, Any], folder: Path) -> tuple[str, str]:
    """Return a GPU's name for display, and the virtual GPU's card: a name or a file's path."""
    for card in CARDS.values():
        if card.device_name == device["device_name"] and card.sm_count == device["sm_count"]:
            return card.name, card.name
    capability = tuple(device["capability"])
    if capability not in LIMITS:
        problem = "the virtual GPU does not support compute capability {}.{}".format(*capability)
        raise DeviceError(device["device_name"], problem, "update pytest-gpumem")
    fields = {**device, "context": estimated_context(capability, device["sm_count"])}
    path = folder / "this-gpu.toml"
    path.write_text(card_file_text(fields), encoding="utf-8")
    return f"{device['device_name']}, which the table of cards lacks", str(path)


def text_of(rows: Sequence[Row], measured: Mapping[str, Any], card: str) -> str:
    """Render the table and the verdict."""
    ran = [row for row in rows if not row.error]
    cells = []
    for row in ran:
        pairs = [(mib(row.measured[figure]), percent(row, figure)) for figure in FIGURES]
        cells.append((row.name, *pairs[0], *pairs[1]))
    titles = ("step", "allocated, MiB", "predicted", "reserved, MiB", "predicted")
    align = ("left", "right", "right", "right", "right")
    table = tabulate(cells, titles, disable_numparse=True, colalign=align if cells else None)
    provenance = measured.get("provenance", {})
    device = measured["device"]["device_name"]
    versions = ", ".join(
        f"{name} {provenance[key]}"
        for name, key in (("torch", "torch"), ("CUDA", "cuda"), ("cuDNN", "cudnn"))
        if provenance.get(key)
    )
    head = f"{device} ({versions}) and its prediction as {card}"
    failed = [f"failed: {row.error}" for row in rows if row.error]
    verdicts = [verdict(ran, figure) for figure in FIGURES] if ran else []
    text = "\n".join([head, "", table, "", *failed, *verdicts])
    return "\n".join(map(printable, text.splitlines()))


def percent(row: Row, figure: str) -> str:
    """Format a prediction's difference for the table: "the same", "+0.02 %"."""
    return "the same" if not row.difference(figure) else f"{100 * row.relative(figure):+.2f} %"


def verdict(rows: Sequence[Row], figure: str) -> str:
    """Return a sentence on how well one figure is predicted in all steps."""
    same = sum(not row.difference(figure) for row in rows)
    worst = max(rows, key=lambda row: abs(row.relative(figure)))
    sentence = f"{figure}: equal to the byte in {same} of {len(rows)} steps"
    if worst.difference(figure):
        sentence += f"; worst {100 * worst.relative(figure):+.2f} % ({worst.name})"
    return sentence


def _print_line(line: str) -> None:
    print(f"gpumem verify: {line}", file=sys.stderr, flush=True)  # noqa: T201 - progress
