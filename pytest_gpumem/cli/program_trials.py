"""Run a program several times: with values of an argument, on several cards, or as ranks."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Final, NamedTuple

from tabulate import tabulate

from pytest_gpumem.cli.outcome import FOUND, OK, Outcome
from pytest_gpumem.errors import GpuMemError, SpecError
from pytest_gpumem.fit.prober import outcome
from pytest_gpumem.fit.search import Probe, Search
from pytest_gpumem.judge.server_start import shortage
from pytest_gpumem.measurement import Peak
from pytest_gpumem.report.json_report import read_report
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.devices.cards import Card
    from pytest_gpumem.fit.search import Largest
    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.measurement import ServerStart

MAX_ERROR: Final = 400
"""characters of a program's error that are shown"""
GPUMEM_RUN: Final = ("-m", "pytest_gpumem.cli.main", "run")
"""arguments with which the Python interpreter runs ``gpumem run``"""
_ERROR: Final = re.compile(r"[\w.]+(Error|Exception)\b")
_FORM: Final = re.compile(r"(?P<flag>\S+):(?P<first>\d{1,12})\.\.(?P<last>\d{1,12})")


class Range(NamedTuple):
    """The values to search for a program's argument."""

    flag: str
    """the option before the value; if it ends in "=", the two are one word: "--batch_size=8" """
    first: int
    last: int

    def words(self, value: int) -> list[str]:
        """Return the argument with a value, as words of the command line."""
        if self.flag.endswith("="):
            return [f"{self.flag}{value}"]
        return [self.flag, str(value)]


def read_range(text: str) -> Range:
    """Parse the range of ``--largest``, or reject the text."""
    match = _FORM.fullmatch(text)
    if match is None or not 1 <= int(match["first"]) <= int(match["last"]):
        problem = "this is no argument with a first and a last value"
        remedy = "write for example --largest=--batch-size:1..64"
        raise SpecError(f"--largest={text}", problem, remedy)
    return Range(match["flag"], int(match["first"]), int(match["last"]))


class ProgramTrials(NamedTuple):
    """A program to run several times."""

    options: Sequence[str]
    """options of ``gpumem run``"""
    program: Sequence[str]
    """the program and its arguments"""

    def largest(self, values: Range, capacity: int | None) -> Largest:
        """Find an argument's largest value that fits in ``capacity`` bytes of reserved memory.

        If ``capacity`` is None, it is the memory of the device that a first run used.

        Raises:
            GpuMemError: the program failed for a reason other than memory, or the device does not
                report how much memory it has.
        """
        known: dict[int, tuple[Result, ...]] = {}
        if capacity is None:
            first = [*self.program, *values.words(values.first)]
            known[values.first] = measured(self.options, first)
            capacity = _memory_of(known[values.first])
        search = Search(capacity, start=values.first, limit=values.last)
        while (value := search.next()) is not None:
            words = [*self.program, *values.words(value)]
            results = known.pop(value, ()) or measured(self.options, words)
            search.add(_probe(value, results, capacity))
            sys.stderr.write(f"gpumem: {outcome(search.probes[-1], capacity)}\n")
        return search.result()

    def on_cards(self, cards: Sequence[Card], values: Range | None) -> Outcome:
        """Return a table with peaks, or the largest value, per card; raises like ``largest``."""
        rows, fits, tokens = [], True, False
        for card in cards:
            trials = self._replace(options=[*self.options, f"--card={card.name}"])
            starts: Sequence[ServerStart] = ()
            if values is not None:
                largest = trials.largest(values, card.usable_memory)
                answer, peak, value = str(largest.value), largest.peak, largest.value
            else:
                results = measured(trials.options, self.program)
                probe, starts = _probe(1, results, card.usable_memory), starts_of(results)
                answer, peak, value = "yes" if probe.fits else "no", probe.peak, int(probe.fits)
            fits &= bool(value)
            shown = format_size(peak.reserved) if value else ""
            least = min((start.least_tokens for start in starts), default=0)
            tokens |= bool(least)
            cells = (f"{least:,}" if value and least else "",)
            rows.append((card.name, format_size(card.usable_memory), answer, shown, *cells))
            sys.stderr.write(f"gpumem: {card.name}: {answer}\n")
        titles = ["card", "for a step", values.flag if values else "fits", "reserved"]
        titles += ["tokens in the KV cache"] * tokens
        align = ("left", *["right"] * (len(titles) - 1))
        cut = [row[: len(titles)] for row in rows]
        text = tabulate(cut, titles, disable_numparse=True, colalign=align)
        return Outcome(text, OK if fits else FOUND)

    def as_ranks(self, ranks: Sequence[int], *, update: bool) -> Outcome:
        """Run the program as each rank, showing its output; return a row per rank."""
        rows, failed = [], False
        for rank in ranks:
            with tempfile.TemporaryDirectory(prefix="gpumem-") as folder:
                report = Path(folder) / "gpumem.json"
                options = [*self.options, f"--rank={rank}", *["--update"] * update]
                command = [sys.executable, *GPUMEM_RUN, f"--json={report}", *options]
                failed |= bool(subprocess.run([*command, *self.program], check=False).returncode)
                results = _results(report)
            sizes, word = ["", ""], "failed"
            if results and results[0].measurement is not None:
                peak = results[0].measurement.peaks[0]
                sizes = [format_size(nbytes) for nbytes in (peak.allocated, peak.reserved)]
                word = results[0].verdict.kind.word
            rows.append((str(rank), *sizes, word))
        titles = ["rank", "peak allocated", "peak reserved", "verdict"]
        align = ("right", "right", "right", "left")
        text = tabulate(rows, titles, disable_numparse=True, colalign=align)
        return Outcome(text, FOUND if failed else OK)


def read_rank_list(text: str, world_size: int) -> list[int]:
    """Parse ``--ranks``, dropping duplicates; reject numbers that are not ranks."""
    words = text.split(",")
    ranks = [int(word) for word in words if re.fullmatch(r"\d{1,7}", word)]
    if len(ranks) < len(words) or max(ranks) >= world_size:
        remedy = "write for example --world-size=8 --ranks=0,7"
        raise SpecError(f"--world-size={world_size} --ranks={text}", "these are not ranks", remedy)
    return list(dict.fromkeys(ranks))


def _results(report: Path) -> tuple[Result, ...]:
    return read_report(report).report.results if report.exists() else ()


def measured(options: Sequence[str], program: Sequence[str]) -> tuple[Result, ...]:
    """Run a program, and return its results, also if it ran out of memory.

    Raises:
        GpuMemError: the program failed for a reason other than memory.
    """
    with tempfile.TemporaryDirectory(prefix="gpumem-") as folder:
        report = Path(folder) / "gpumem.json"
        ended = subprocess.run(
            [
                *(sys.executable, *GPUMEM_RUN),
                *(f"--json={report}", "--until-started"),
                *options,
                *program,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        results = _results(report)
    if not results or (ended.returncode and not any(each.verdict.does_not_fit for each in results)):
        error = printed_error(ended.stdout.partition("\ngpumem: ")[0])
        problem = f"the program ended with status {ended.returncode}: {error}"
        remedy = "correct the program, or name an argument that the program has"
        raise GpuMemError(" ".join(program), problem, remedy)
    return results


def _memory_of(results: Sequence[Result]) -> int:
    """Return the bytes of the device that a program ran on."""
    (device,) = {result.measurement.device for result in results if result.measurement}
    if not device.total_memory:
        problem = f"{device.name} does not report how much memory it has"
        raise SpecError("--largest", problem, "declare a limit, as --max-gib=8")
    return device.usable_memory


def printed_error(printed: str) -> str:
    """Return the error at the end of a program's output, or its last line."""
    lines = printed.rstrip().splitlines()
    errors = [number for number, line in enumerate(lines) if _ERROR.match(line)]
    text = " ".join(lines[errors[-1] if errors else -1 :])
    return shorten(text, MAX_ERROR, placeholder=" ...")


def starts_of(results: Sequence[Result]) -> Sequence[ServerStart]:
    """Return the starts of a server in a program's results; empty without a server."""
    measurements = (result.measurement for result in results)
    return next((each.servers for each in measurements if each and each.servers), ())


def _probe(value: int, results: Sequence[Result], capacity: int) -> Probe:
    """Return the memory that a run needed; for a server, with a KV cache for one request.

    A server's cache takes all that is left of ``capacity`` bytes, so the measured peak says nothing
    about ``value``.
    """
    fits = not any(result.verdict.does_not_fit for result in results)
    needs = [capacity + shortage(each) for each in starts_of(results) if each.needed]
    if needs:
        peak = Peak(max(needs), max(needs))
        return Probe(value, fits, peak, peak)
    peaks = [peak for result in results if result.measurement for peak in result.measurement.peaks]
    highest = max(peaks, key=lambda peak: peak.reserved)
    peak = Peak(highest.allocated, highest.reserved)
    return Probe(value, fits, peak, peak)
