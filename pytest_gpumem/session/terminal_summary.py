"""Render what marked tests add to pytest's output: failures, and the end of the session."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_gpumem.devices.cards import CARDS
from pytest_gpumem.judge.verdict import Kind
from pytest_gpumem.measurement import device_key
from pytest_gpumem.report.parts import session_words, update_text
from pytest_gpumem.report.parts.card_matrix import cards_matrix
from pytest_gpumem.report.parts.cause_sentences import cause_lines
from pytest_gpumem.report.parts.styles import StyledText, encodable_lines, lines_of
from pytest_gpumem.report.terminal import session_text
from pytest_gpumem.report.terminal.brief_text import brief_failures, repeated_lines
from pytest_gpumem.report.terminal.failure_text import MAX_ROWS, failure_sections
from pytest_gpumem.report.terminal.summary_table import summary_table
from pytest_gpumem.report.terminal.toolchain_lead import lead_lines, short_texts
from pytest_gpumem.report.text import encodable, printable, wrapped
from pytest_gpumem.session.hidden_skip import hidden_skip_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpumem.baselines.store import UpdateSummary
    from pytest_gpumem.devices.select import Choice
    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.report.parts.styles import Line
    from pytest_gpumem.session.results import SessionResults
    from pytest_gpumem.session.settings import Settings

MIN_WIDTH: Final = 80
"""least number of columns that a failure is formatted for"""
BLANK: Final[Line] = ()


def device_header(choice: Choice, settings: Settings, cards: Sequence[str] = ()) -> list[str]:
    """Return the sentences on the device for pytest's header."""
    if choice.device is None:
        fails = settings.absent_device_fails
        return session_text.header(None, reason=choice.reason, fails=fails)
    card = choice.card
    # If unmarked code sees a GPU too, it sees the default card: show that one.
    only_marked = not (settings.shown_always or settings.all)
    named = [CARDS[name] for name in cards if name in CARDS and only_marked]
    further = [other.name for other in named[1:]]
    if card is None:
        sentences = choice.device.describe()
    else:
        sentences = session_text.header((named or [card])[0].info, cards=further)
    if settings.all:
        sentences.append("every test that takes memory of this GPU is measured (gpumem_all)")
    elif settings.shown_always and card:
        number = "it" if settings.shown_always == 1 else f"{settings.shown_always} of them"
        sentences.append(
            f"all code of this session sees {number}; tests without the marker see zero-filled "
            "tensors"
        )
    if settings.strict_in_ci and not settings.update_baselines:
        sentences.append("CI is set: a test without a baseline fails")
    return sentences


def card_hint(results: Sequence[Result], settings: Settings) -> str:
    """Return advice to configure the card; "" unless a project gets its first baselines.

    If only the command line names the card, the next run would not find these baselines.
    """
    on_command_line = any(word.startswith("--gpumem-card=") for word in settings.repeated)
    key = device_key("virtual", settings.card)
    first = any(
        result.verdict.kind is Kind.NO_BASELINE
        and result.baseline
        and not result.card
        and result.device_key == key
        for result in results
    )
    if not first or settings.cards or (settings.names_card and not on_command_line):
        return ""
    if on_command_line:
        purpose, card = "to compare every later run with these baselines", settings.card
    else:
        purpose, card = f"{settings.card} is the default card; for another card", "T4"
    return f'{purpose}, write gpumem_card = "{card}" in pyproject.toml ([tool.pytest.ini_options])'


def versions_hint(results: Iterable[Result], settings: Settings, ini: str) -> str:
    """Return how to keep baselines for two torch versions; "" unless another torch grew a peak."""
    if not settings.folder_by_torch:
        return ""
    for result in results:
        entry, measurement = result.baseline_entry, result.measurement
        if entry is None or measurement is None or result.verdict.held_to:
            continue
        old, new = (
            ".".join(provenance.torch.split(".")[:2])
            for provenance in (entry.provenance, measurement.provenance)
        )
        if old != new and result.verdict.failed and result.verdict.kind is Kind.REGRESSED:
            quote = '"' if ini.endswith(".toml") else ""
            return (
                f"to keep separate baselines for torch {old} and torch {new}, set "
                f"gpumem_baseline_dir = {quote}{settings.folder_by_torch}{quote} in {ini}, "
                "and record with each torch"
            )
    return ""


def failure_text(results: Sequence[Result], verbosity: int) -> str:
    """Return the text of a failed test's report; "" if nothing failed."""
    if not any(result.verdict.failed for result in results):
        return ""
    lines = failure_sections(
        results,
        width=max(MIN_WIDTH, shutil.get_terminal_size().columns),
        max_rows=None if verbosity > 1 else MAX_ROWS,
        whole_code=True,  # the text also goes to files such as JUnit's
    )
    return "\n".join(line.text for line in lines)


class Screen(NamedTuple):
    """The terminal to format for."""

    width: int
    encoding: str
    interactive: bool
    """whether it is a real terminal, with a width, rather than a log"""


def failure_lines(
    results: Sequence[Result], screen: Screen, verbosity: int
) -> dict[str, list[StyledText]]:
    """Return the lines that replace each failed test's report, by nodeid.

    If pytest's ``verbosity`` is above 0, each failure is shown in full.
    """
    width, whole_code = screen.width, not screen.interactive
    by_test: dict[str, list[Result]] = {}
    for result in results:
        by_test.setdefault(result.nodeid, []).append(result)
    if verbosity > 0:
        max_rows, wide = None if verbosity > 1 else MAX_ROWS, max(MIN_WIDTH, width)
        texts = {
            nodeid: failure_sections(members, width=wide, max_rows=max_rows, whole_code=whole_code)
            for nodeid, members in by_test.items()
        }
    else:
        texts = {
            nodeid: brief_failures(members, width=width, whole_code=whole_code)
            for nodeid, members in by_test.items()
        }
        toolchain = {
            nodeid: [StyledText(line, "headline") for line in sentence.splitlines()]
            for nodeid, sentence in short_texts(results).items()
        }
        shown = [result for result in results if result.nodeid not in toolchain]
        texts |= repeated_lines(shown, width=width) | toolchain
    return {
        nodeid: [line._replace(text=encodable(line.text, screen.encoding)) for line in lines]
        for nodeid, lines in texts.items()
        if lines
    }


def session_summary(  # noqa: PLR0913 - the results, and all that their layout depends on
    session_results: SessionResults,
    updates: UpdateSummary | None,
    *,
    updating: bool,
    arguments: Sequence[str],
    verbosity: int,
    screen: Screen,
) -> list[Line]:
    """Return the lines for the end of the session; none if no marked test ran.

    Below ``verbosity`` 0, one line stands for the table, the counts and the next steps.
    """
    results, width = session_results.results(), screen.width
    lines: list[Line] = []
    for problem in session_results.problems:
        lines += lines_of(f"gpumem: {problem}")
    for reason, number in Counter(session_results.unmeasured).items():
        tests = "1 unmarked test was" if number == 1 else f"{number} unmarked tests were"
        lines += _told(f"{tests} not measured (--gpumem-all): {reason}", width)
    leads = lead_lines(results, width, arguments=arguments)
    if not leads:  # no toolchain changed many tests: a source line that they share may be the cause
        leads = [line for sentence in cause_lines(results) for line in _told(sentence, width)]
    lines += leads
    if verbosity >= 0:
        lines += [BLANK] if lines else []
        lines += _every_test(session_results, verbosity, width)
    else:
        hidden = Counter(skip.whole_file for skip in session_results.hidden_skips.values())
        line = session_text.quiet_line(
            results,
            skipped_tests=len(session_results.skipped + session_results.too_large) + hidden[False],
            skipped_files=hidden[True],
        )
        lines += [tuple(line)] if line else []
    for paragraph in session_text.snapshots(results, width=width):
        lines += lines_of(paragraph)
    if updates is not None:
        brief = verbosity < 0
        account = update_text.update_summary(updates, width=width, brief=brief)
        lines += lines_of(f"gpumem: baselines: {account}")
        written = [os.path.relpath(file) for file in updates.files]
        task = "" if brief else update_text.files_to_commit(written)
        lines += _told(task, width) if task else ()
    if verbosity >= 0:
        lines += _next_steps(results, width, updating=updating, arguments=arguments)
    return encodable_lines(lines, screen.encoding)


def _told(sentence: str, width: int) -> list[Line]:
    return lines_of(wrapped("gpumem: ", sentence, width))


def _next_steps(
    results: Sequence[Result], width: int, *, updating: bool, arguments: Sequence[str]
) -> list[Line]:
    """Return lines on tests without baseline and limit, and the commands that record baselines."""
    unguarded = session_words.unguarded_sentence(results)
    lines = _told(printable(unguarded), width) if unguarded else []
    command = session_words.next_command(results, updating=updating, arguments=arguments)
    if command:
        words = StyledText(printable(str(command)), "command")
        lines.append((StyledText("gpumem: to record baselines: "), words))
    for accept in dict.fromkeys(result.verdict.accept for result in results):
        if accept:
            lead = "gpumem: to accept this run's figures on another machine: "
            lines.append((StyledText(lead), StyledText(printable(accept), "command")))
    return lines


def _every_test(session_results: SessionResults, verbosity: int, width: int) -> list[Line]:
    results = session_results.results()
    table = summary_table(results, verbosity, width)
    lines: list[Line] = []
    for block in (table, lines_of(cards_matrix(results, width))):
        lines += [*block, BLANK] if block else []
    number_words = session_words.counts(results)
    lines += [(StyledText("gpumem: "), *number_words)] if number_words else []
    for paragraph in session_text.comparison_lines(results, width=width):
        lines += lines_of(paragraph)
    for sentence in session_results.skip_sentences:
        lines += lines_of(f"gpumem: {sentence}")
    for sentence in hidden_skip_lines(session_results.hidden_skips.values()):
        lines += _told(sentence, width)
    return lines
