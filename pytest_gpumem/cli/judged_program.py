"""Judge a program like a marked test, with a baseline, limits and reports, without pytest.

The program runs once, so nothing that needs a second run is found
(docs/explanation/second-runs.md).
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_gpumem.cli.phases import Phases
from pytest_gpumem.devices.cards import find_card
from pytest_gpumem.devices.children import watch_this_fork
from pytest_gpumem.errors import GpuMemError, SpecError
from pytest_gpumem.report.parts.update_text import update_summary
from pytest_gpumem.report.serialize import to_text
from pytest_gpumem.report.terminal import session_text
from pytest_gpumem.session.memory_session import MemorySession
from pytest_gpumem.session.origin import session_origin
from pytest_gpumem.session.outputs import github_lines, publish
from pytest_gpumem.session.results import SessionResults
from pytest_gpumem.session.settings import OPTIONS, add_options_of_run, read_settings
from pytest_gpumem.session.terminal_summary import failure_text
from pytest_gpumem.spec import spec_from_marks
from pytest_gpumem.testrun.marked_item import Attempt
from pytest_gpumem.testrun.rerun import Runner

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from pytest_gpumem.devices.children import ChildWatch
    from pytest_gpumem.devices.select import Choice
    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.measurement import Measurement
    from pytest_gpumem.session.settings import Option
    from pytest_gpumem.testrun.run import Run

LIMITS: Final = (
    *("max_gib", "max_allocated_gib", "max_reserved_gib", "max_pinned_gib", "max_host_gib"),
)
"""the marker's limits in GiB that are also options of ``gpumem run``"""
DECLARED: Final = (*LIMITS, "min_cache_tokens")
"""the marker's limits that are also options of ``gpumem run``"""
MEASURED: Final = {
    "card": None,
    "device": None,
    "devices": 1,
    "world_size": None,
    "rank": None,
    "values": "auto",
}
"""options that affect the measurement, with their defaults"""
SETTINGS: Final = {option.name: option.of_run for option in OPTIONS if option.of_run}
"""the plugin's options that ``gpumem run`` has, each with its name in ``gpumem run``"""


def add_test_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that make a program a test."""
    judged = parser.add_argument_group(
        "the program as a test", "the exit status is 1 where its memory regressed or does not fit"
    )
    add_options_of_run(judged)
    judged.add_argument(
        "--phases",
        action="store_true",
        help="judge apart: load, first step, later steps, evaluation, checkpoint",
    )
    judged.add_argument(
        "--name", help="the name of the baseline, in the place of the program's arguments"
    )
    for limit in LIMITS[1:]:
        judged.add_argument(
            flag_of(limit), type=float, metavar="GIB", help=f"limit, as the marker's {limit}"
        )
    judged.add_argument(
        "--min-cache-tokens",
        type=int,
        metavar="N",
        help="tokens that an inference server's KV cache must hold at least",
    )


def flag_of(limit: str) -> str:
    """Return the option for a limit: "--max-gib" for "max_gib"."""
    return f"--{limit.replace('_', '-')}"


def option_words(arguments: argparse.Namespace) -> list[str]:
    """Return the given options of ``gpumem run`` that affect the measurement and the comparison."""
    words = ["--phases"] * arguments.phases
    for name in (*MEASURED, "baseline", "name", *DECLARED, "tolerance"):
        value = getattr(arguments, name)
        if value is not None and value != MEASURED.get(name):
            words.append(f"{flag_of(name)}={value}")
    return words


def program_words(arguments: argparse.Namespace) -> list[str]:
    """Return the program and its arguments, as given to ``gpumem run``."""
    return [*["-m"] * arguments.module, arguments.script, *arguments.args]


def is_judged(arguments: argparse.Namespace) -> bool:
    """Return whether an option requests a verdict or a report, not only the peaks."""
    names = *SETTINGS.values(), "phases", *DECLARED[1:]
    return any(getattr(arguments, name) not in {None, False} for name in names)


class ProgramItem:
    """A program with the interface of a marked test (:class:`MarkedItem`)."""

    declared = True

    def __init__(self, nodeid: str, script: str, run: Callable[[], None]) -> None:
        """Store the program's name in baselines, its file or module, and the function to run it."""
        self.nodeid, self.argument = nodeid, ""  # the launcher alone is its command line
        self._script = script
        self.runtest = run

    def location(self) -> tuple[str, int]:
        """Return the program's file and first line."""
        return self._script, 1

    def tear_down(self, *_: object, **__: object) -> None:
        """Do nothing: a program has no fixtures."""

    finish_replaced = finish_fixtures = tear_down

    def run_again(self, *_: object, **__: object) -> Attempt:
        """Do not run again: a program has already read its input and written its files."""
        return Attempt(passed=False)

    def measured(self, part: str, measurement: Measurement) -> Measurement:
        """Return the measurement unchanged."""
        del self, part
        return measurement


class JudgedProgram:
    """Measures a program, judges it, and writes its reports."""

    def __init__(
        self, item: ProgramItem, arguments: argparse.Namespace, choice: Choice, children: ChildWatch
    ) -> None:
        """Prepare the measurement; raise if an argument is invalid.

        ``children`` watches the processes that the program starts.
        """
        self._item, self._root = item, Path.cwd()
        if arguments.update and arguments.baseline is None:
            raise SpecError("--update", "no folder is named", "write --baseline=baselines --update")
        fields = (*DECLARED, "devices", "card", "world_size", "rank")
        declared = {name: getattr(arguments, name) for name in fields}
        declared["baseline"] = arguments.baseline is not None
        self._spec = spec_from_marks([((), declared)], find_card=lambda name: find_card(name).name)

        def get(option: Option) -> tuple[object, str]:
            name = SETTINGS.get(option.name)
            value = None if name is None else getattr(arguments, name)
            if option.name == "values":
                value = arguments.values
            if option.name == "attribution" and is_judged(arguments):
                return "on", option.ini  # a program is not run again to explain its peaks
            return (option.default, option.ini) if value in {None, False} else (value, f"--{name}")

        self._arguments = arguments
        self._settings = read_settings(get, self._root)
        words = (*option_words(arguments), *program_words(arguments))
        launcher = "gpumem", "run", "--update", *words  # the command that writes the baseline
        runner = Runner(choice, self._root, print, self._settings.values, children)
        self._session = MemorySession(self._settings, runner, launcher)
        self._children = children
        self._results = SessionResults()
        self._phases: Phases | None = None
        self._owner = os.getpid()

        def close() -> None:
            if self._session.run is not None and not self.is_fork:
                with suppress(Exception):  # the program may have left CUDA unusable
                    self._session.run.close()

        atexit.register(close)  # runs after the program's own exit handlers, which may use CUDA

    @property
    def is_fork(self) -> bool:
        """Whether this process is a fork of the one that was started."""
        return os.getpid() != self._owner

    @property
    def _has_baseline_or_limits(self) -> bool:
        """Whether the program is compared with a baseline or limits."""
        return any(getattr(self._arguments, name) is not None for name in ("baseline", *DECLARED))

    @property
    def explainer(self) -> str:
        """The name of the class that explains child processes' peaks; "" for none."""
        return self._session.explainer.of_children(self._root) if is_judged(self._arguments) else ""

    def refuse_replacement(self) -> None:
        """Make os.exec raise in a judged program, as the new process would not be measured."""

        def refuse(event: str, _arguments: object) -> None:
            if event == "os.exec" and not self.is_fork:
                raise GpuMemError(
                    "os.exec",
                    "the program replaces its own process: the new one would not be judged",
                    "start that one in its place, or leave --baseline, the limits and the reports "
                    "out",
                )

        if is_judged(self._arguments) or self._has_baseline_or_limits:
            sys.addaudithook(refuse)

    def begin(self) -> None:
        """Start measuring at the first use of CUDA; a fork is measured like a child process."""
        device = self._session.choice.device
        if self.is_fork and device is not None:
            device.open(None, self._arguments.devices)
            device.values.compute(self._arguments.values)
            watch_this_fork()
            return
        self._session.begin(self._item, self._spec)
        if self._arguments.phases and self._session.run is not None:
            self._phases = Phases(self._session.run)
            self._phases.start()

    def end_step(self) -> None:
        """Record that the program's code has ended; its variables are deleted afterwards."""
        if self._session.run is not None and not self.is_fork:
            self._session.run.meter.end_step()

    @property
    def run(self) -> Run:
        """The program's measurement; if the program used no GPU, the measurement starts now."""
        if self._session.run is None and self._session.choice.device is not None:
            self._session.choice.device.open(None, self._arguments.devices)
        assert self._session.run is not None  # noqa: S101 - open() has called begin()
        return self._session.run

    def _processes_used_a_gpu(self, *, passed: bool, alone: bool) -> bool:
        """Return whether child processes used a GPU; ``alone``: the program itself used none."""
        children = self._children.children()
        silent = [f"{child.name} {child.use}" for child in children if not child.ended]
        if silent and passed and self._has_baseline_or_limits:
            problem = f"{silent[0]} and ended, or runs on, without reporting its peaks"
            remedy = "let all processes end by themselves, or leave the limits and --baseline out"
            raise GpuMemError(self._item.nodeid, problem, remedy)
        used = any(child.peaks for child in children)
        if used and alone and self._arguments.phases:
            problem = "only processes that the program starts use a GPU, and these have no phases"
            remedy = "run one rank of it alone: add --world-size=8 --rank=0, and leave out torchrun"
            raise GpuMemError("--phases", problem, remedy)
        return used

    def finish(
        self, error: BaseException | None, *, passed: bool
    ) -> tuple[list[Result], list[str], bool]:
        """Judge the program after its end, also after an error; write its baseline and reports.

        Return the results, lines to print, and whether the program fails: because of its memory, or
        because a file could not be written. There are no results if the program used no GPU, or
        failed by its own error or exit status.

        Raises:
            GpuMemError: the measurement is meaningless.
        """
        if self._phases is not None:
            self._phases.stop()
        run, results = self._session.run, []
        refused = any(start.refusal for start in self._children.server_starts())
        if error is None and refused and not passed:
            # SGLang calls sys.exit(1), which UserProgram.run turned into a status.
            error = SystemExit("the server did not start")
        unused = run is None or run.is_unused
        used_below = self._processes_used_a_gpu(passed=passed, alone=unused)
        if run is not None and error is None and unused and not used_below:
            if self._has_baseline_or_limits:
                problem = f"the program took no memory of {run.info.name}: it has no peak to judge"
                remedy = "run what uses CUDA, or leave the limits and --baseline out"
                raise GpuMemError(self._item.nodeid, problem, remedy)
        elif passed or error is not None:
            results = self._session.finish(self._item, error)
        failed, nodeid = any(result.verdict.failed for result in results), self._item.nodeid
        lines = failure_text(results, 1).splitlines()
        if not is_judged(self._arguments):
            return results, lines, failed
        for when in ("setup", "call", "teardown"):
            data = to_text(results) if results and when == "call" else None
            ok = when != "call" or (passed and not failed)
            self._results.add(nodeid, when, passed=ok, data=data)
        updates = None
        if self._settings.update_baselines:
            updates = self._session.store.update(self._results.changes())
            failed |= bool(updates.errors)
            lines.append(f"gpumem: baselines: {update_summary(updates)}")
        card = self._session.choice.card
        header = session_text.header(card.info) if card else []
        origin = session_origin(self._root, self._settings, None) if self._settings.json else None
        published = publish(self._results, self._settings, header, updates=updates, origin=origin)
        failed |= any(report.failed for report in published)
        lines += github_lines(self._results, self._root)
        lines += [report.line for report in published]
        if not failed and updates is None:
            lines += [
                f"gpumem{f' ({result.part})' if result.part else ''}: {result.verdict.headline}"
                for result in results
                if result.measurement and result.measurement.peak_reserved  # a launcher has no peak
            ]
        return results, lines, failed
