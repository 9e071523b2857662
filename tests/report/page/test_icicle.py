"""The differential icicle: a peak by module and line, as cells."""

from __future__ import annotations

import re

from helpers.html_pages import Page

from pytest_gpumem.judge.breakdown_diff import BreakdownRow
from pytest_gpumem.measurement import Site
from pytest_gpumem.report.page import icicle
from pytest_gpumem.sizes import MIB

PARTLY = ", as the difference of the lines in the baseline"


def row(line, now, baseline, module="Net.layers.*", path="m.py"):
    """A row of a line, in MiB."""
    category = "activations" if path else "workspaces"
    site = Site(path, line, "f", f"code {line}", module, category, now * MIB, 1)
    nbytes = None if baseline is None else baseline * MIB
    return BreakdownRow(f"m.py:{line}", now * MIB, nbytes, site, 1)


def cells_of(rows):
    """The words of each cell, its level, class, left edge and width in percent."""
    drawing = icicle.draw_icicle(rows)
    parsed = Page(f"<svg>{drawing.svg}</svg>")
    items = parsed.all("g")
    boxes = parsed.all("svg")[1:]
    return drawing, [
        (
            item.attributes["aria-label"],
            int(item.attributes["aria-level"]),
            item.attributes["class"],
            *(float(box.attributes[name].rstrip("%")) for name in ("x", "width")),
        )
        for item, box in zip(items, boxes, strict=True)
    ]


def test_modules_stand_above_their_lines_and_each_is_as_wide_as_its_memory():
    rows = [
        row(1, 60, 20),
        row(2, 10, 20),
        row(3, 20, 20, module="Net.head"),
        row(4, 0, 10, module=""),
        row(5, 10, None, module="", path=""),
    ]
    drawing, cells = cells_of(rows)
    assert cells == [
        (
            f"all these lines +20.00 MiB: 100.00 MiB at the peak{PARTLY}",
            1,
            "grew-2",
            0,
            100,
        ),
        ("Net +30.00 MiB: 90.00 MiB at the peak", 2, "grew-3", 0, 83.333),
        ("layers.* +30.00 MiB: 70.00 MiB at the peak", 3, "grew-3", 0, 66.667),
        ("m.py:1 activations +40.00 MiB: 60.00 MiB at the peak", 4, "grew-4", 0, 50),
        ("m.py:2 activations -10.00 MiB: 10.00 MiB at the peak", 4, "shrank-1", 50, 16.667),
        ("head: 20.00 MiB at the peak, unchanged", 3, "same", 66.667, 16.667),
        ("m.py:3 activations: 20.00 MiB at the peak, unchanged", 4, "same", 66.667, 16.667),
        (
            f"outside of modules -10.00 MiB: 10.00 MiB at the peak{PARTLY}",
            2,
            "shrank-1",
            83.333,
            16.667,
        ),
        ("m.py:4 activations -10.00 MiB: 0 B at the peak", 3, "shrank-1", 83.333, 8.333),
        (
            "outside of Python workspaces: 10.00 MiB at the peak, difference not known",
            3,
            "unknown",
            91.667,
            8.333,
        ),
    ]
    assert drawing.label == f"The peak by module and line. {cells[0][0]}"
    assert drawing.height == 4 * icicle.HEIGHT
    shown = re.findall("<text[^>]*>(.*?)</text>", drawing.svg)
    assert shown == [words.partition(": ")[0] for words, *_ in cells]


def test_a_module_alone_in_its_module_is_one_cell_with_it():
    _, cells = cells_of([row(1, 2, 1, module="A.b.c"), row(2, 2, 2, module="A.b.c")])
    names = [re.split(" [+-]|: ", words)[0] for words, *_ in cells]
    assert names == ["all these lines", "A.b.c", "m.py:1 activations", "m.py:2 activations"]


def test_nothing_is_drawn_where_nothing_differs_and_no_cell_that_is_too_small():
    assert icicle.draw_icicle([row(1, 5, 5), row(2, 7, None)]) is None
    assert icicle.draw_icicle([]) is None
    _, cells = cells_of([row(1, 1000, 0), row(2, 4, 4)])
    assert len(cells) == 3


def test_names_from_outside_are_escaped():
    drawing = icicle.draw_icicle([row(1, 5, 4, module='<b>"&.\x1b', path="<i>.py")])
    assert "<b>" not in drawing.svg
    assert "<i>" not in drawing.svg
    assert "\x1b" not in drawing.svg
    assert "&lt;b&gt;&quot;&amp;" in drawing.svg
