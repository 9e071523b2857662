"""The history as a page: a plot and a table of each test; it needs no network and no script."""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.report.history.listing import move_words
from pytest_gpumem.report.parts.plot import PlotPoint, chart
from pytest_gpumem.report.text import mib, printable

if TYPE_CHECKING:
    from pytest_gpumem.baselines.changes import EntryChange
    from pytest_gpumem.baselines.commits import BaselineHistory, Commit
    from pytest_gpumem.baselines.key import Key

MAX_TESTS: Final = 200
"""tests with a plot: those that moved most often, and of these those that moved furthest"""


def history_page(history: BaselineHistory) -> str:
    """Return the page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    loader = PackageLoader("pytest_gpumem.report.history")
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = loader.get_source(environment, "history.css")[0].strip()
    keys = history.keys
    moves = {key: history.of(key) for key in keys}
    shown = sorted(
        keys,
        key=lambda key: (
            -len(moves[key]),
            -max(abs(change.difference) for _, change in moves[key]),
            key,
        ),
    )[:MAX_TESTS]
    remarks = [*history.remarks]
    if len(keys) > MAX_TESTS:
        remarks.append(f"{MAX_TESTS} of {len(keys)} tests: those that moved most often")
    return environment.get_template("history.html.j2").render(
        tests=[_test(key, moves[key], f"t{number}") for number, key in enumerate(shown)],
        commits=len(history.steps),
        remarks=remarks,
        style=Markup(style),  # noqa: S704 - it lies beside the template
        style_hash=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
    )


def _test(key: Key, moves: list[tuple[Commit, EntryChange]], identifier: str) -> dict[str, Any]:
    """Return a test's part of the page."""
    from markupsafe import Markup

    rows, points = [], []
    for number, (commit, change) in enumerate(moves):
        target = f"{identifier}-{number}"
        allocated = reserved = None
        if change.new is not None:
            allocated = max(peak.allocated for peak in change.new.peaks)
            reserved = max(peak.reserved for peak in change.new.peaks)
            label = f"{commit.short} {commit.date}".strip()
            points.append(PlotPoint(printable(label), commit.date, allocated, reserved, target))
        rows.append(
            {
                "id": target,
                "commit": commit,
                "allocated": mib(allocated),
                "reserved": mib(reserved),
                "moved": move_words(change),
            }
        )
    part = f" ({key.part})" if key.part else ""
    name = f"{key.nodeid}{part}"
    title = printable(f"Peak memory of {name} by commit")
    drawn = Markup(chart(points[::-1], title)) if points else ""  # noqa: S704 - it escapes names
    return {"id": identifier, "name": name, "device": key.device, "chart": drawn, "rows": rows}
