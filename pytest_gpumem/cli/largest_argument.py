"""``gpumem run --largest``: the largest value of a program's argument that fits, by running it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pytest_gpumem.cli.outcome import FOUND, OK, Outcome
from pytest_gpumem.errors import GpuMemError, SpecError
from pytest_gpumem.fit.prober import outcome
from pytest_gpumem.fit.search import Probe, Search
from pytest_gpumem.measurement import Peak

if TYPE_CHECKING:
    from collections.abc import Sequence

_FORM: Final = re.compile(r"(?P<flag>\S+):(?P<first>\d{1,12})\.\.(?P<last>\d{1,12})")


class Range(NamedTuple):
    """The values of a program's argument that are searched."""

    flag: str
    """the argument before a value; "--batch_size=" makes one word of both"""
    first: int
    last: int

    def words(self, value: int) -> list[str]:
        """Return the argument with a value."""
        if self.flag.endswith("="):
            return [f"{self.flag}{value}"]
        return [self.flag, str(value)]


def read_range(text: str) -> Range:
    """Return the range of ``--largest``.

    Raises:
        SpecError: it is none.
    """
    match = _FORM.fullmatch(text)
    if match is None or not 1 <= int(match["first"]) <= int(match["last"]):
        raise SpecError(
            f"--largest={text}",
            "this is no argument with a first and a last value",
            "write for example --largest=--batch-size:1..64",
        )
    return Range(match["flag"], int(match["first"]), int(match["last"]))


def search(values: Range, options: Sequence[str], program: Sequence[str], capacity: int) -> Outcome:
    """Run a program with values of its argument; return the largest that fits, in words.

    Args:
        values: the argument and its values.
        options: of ``gpumem run``.
        program: the program's words.
        capacity: bytes that the program may reserve.

    Raises:
        GpuMemError: the program failed for another reason than memory.
    """
    bracket = Search(capacity, start=values.first, limit=values.last)
    while (value := bracket.next()) is not None:
        bracket.add(_probe(value, options, [*program, *values.words(value)]))
        sys.stderr.write(f"gpumem: {outcome(bracket.probes[-1], capacity)}\n")
    largest = bracket.result()
    return Outcome(f"{values.flag} {largest}", OK if largest.value else FOUND)


def _probe(value: int, options: Sequence[str], program: Sequence[str]) -> Probe:
    with tempfile.TemporaryDirectory(prefix="gpumem-") as folder:
        report = Path(folder) / "gpumem.json"
        gpumem = [sys.executable, "-m", "pytest_gpumem.cli.main", "run", f"--json={report}"]
        ended = subprocess.run(
            [*gpumem, *options, *program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        results: list[dict[str, Any]] = []
        if report.exists():
            results = json.loads(report.read_bytes())["results"]
    refused = any(result["verdict"]["kind"] == "out of memory" for result in results)
    if not results or (ended.returncode and not refused):
        own = ended.stdout.partition("\ngpumem: ")[0].rstrip()
        raise GpuMemError(
            " ".join(program),
            f"the program ended with status {ended.returncode}: {own.rpartition(chr(10))[2]}",
            "mend the program, or name an argument that the program has",
        )
    peaks = [
        Peak(peak["allocated"], peak["reserved"])
        for result in results
        for peak in result["measurement"]["peaks"]
    ]
    peak = max(peaks, key=lambda peak: peak.reserved)
    return Probe(value, not refused, peak, peak)
