"""Render lines about a whole session for the terminal: its device, counts, the next command.

Each function returns text without a trailing newline. It fits 80 columns if names allow; control
characters in names from outside are escaped.
"""

from __future__ import annotations

import posixpath
from collections import Counter
from typing import TYPE_CHECKING

from pytest_gpumem.judge.verdict import DECLINED, MISSING
from pytest_gpumem.report.parts.session_words import (
    FEW,
    comparison_sentences,
    counts,
    tells_more_than_table,
)
from pytest_gpumem.report.parts.styles import StyledText
from pytest_gpumem.report.text import printable, wrapped
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.measurement import DeviceInfo


def header(
    device: DeviceInfo | None,
    *,
    reason: str = "",
    fails: bool = False,
    cards: Sequence[str] = (),
) -> list[str]:
    """Return the sentences for the session's header.

    ``reason`` says why there is no device, ``fails`` whether marked tests fail then. ``cards`` are
    further cards that tests name.
    """
    if device is None:
        outcome = "fail, because CI is set" if fails else "are skipped"
        return [f"no device, so marked tests {outcome}: {printable(reason)}"]
    major, minor = device.capability
    figures = f"{format_size(device.total_memory)}, capability {major}.{minor}"
    description = f"{printable(device.name)} ({figures}, {device.sm_count} SMs)"
    if device.is_predicted:
        besides = f"; other tests name {', '.join(cards)}" if cards else ""
        predicted = "memory is predicted; kernels do not run"
        return [f"virtual GPU {description}{besides}", predicted]
    return [description]


def quiet_line(
    results: Sequence[Result], *, skipped_tests: int = 0, skipped_files: int = 0
) -> list[StyledText]:
    """Return one line on tests that failed or were not compared with a baseline; [] if none.

    Tests whose baseline is written by this session are not counted.

    ``skipped_tests`` and ``skipped_files`` count marked tests, and whole files of them, that were
    skipped because there is no device or it was hidden.
    """
    reasons = Counter(
        result.verdict.uncompared
        for result in results
        if result.verdict.uncompared not in {"", DECLINED}
        and not (result.verdict.failed or result.verdict.is_written)
    )
    missing = reasons.pop(MISSING, 0)
    uncompared = sum(reasons.values())
    parts = [f"{missing} without baseline"] * bool(missing)
    parts += [f"{uncompared} with an unusable baseline"] * bool(uncompared)
    parts += [f"{skipped_tests} skipped"] * bool(skipped_tests)
    files = "1 file" if skipped_files == 1 else f"{skipped_files} files"
    parts += [f"{files} skipped"] * bool(skipped_files)
    failed = [result for result in results if result.verdict.failed and not result.expected]
    if not failed and not parts:
        return []
    separator = [StyledText("; ")] if failed and parts else []
    unheld = f"not compared: {', '.join(parts)} (run without -q for the reasons)"
    return [
        StyledText("gpumem: "),
        *counts(failed),
        *separator,
        *([StyledText(unheld)] if parts else []),
    ]


def comparison_lines(results: Sequence[Result], *, width: int = 80) -> list[str]:
    """Return a line per device on how many results were compared with baselines."""
    sentences = comparison_sentences(results) if tells_more_than_table(results) else {}
    lines = []
    for key, sentence in sentences.items():
        subject = f"baselines on {key}" if len(sentences) > 1 else "baselines"
        lines.append(wrapped("gpumem: ", f"{subject}: {sentence}", width))
    return lines


def snapshots(results: Sequence[Result], *, width: int = 80) -> list[str]:
    """Return lines with the snapshots' folder, and why some could not be written."""
    files = list(dict.fromkeys(result.snapshot for result in results if result.snapshot))
    errors = list(
        dict.fromkeys(result.snapshot_error for result in results if result.snapshot_error)
    )
    lines = []
    if files:
        number = "1 snapshot" if len(files) == 1 else f"{len(files)} snapshots"
        lines.append(f"gpumem: {number} in {printable(posixpath.dirname(files[0]) or '.')}")
    lines += [wrapped("gpumem: no snapshot: ", error, width) for error in errors[:FEW]]
    if len(errors) > FEW:
        lines.append(f"gpumem: and {len(errors) - FEW} more snapshots could not be written")
    return lines
