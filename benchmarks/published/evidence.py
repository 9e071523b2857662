"""The page beside the results that has every published row that was run, from the results.

    python -m benchmarks.published.evidence

It writes benchmarks/results/evidence.md from results/*.txt; a test compares the two.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.harness import RESULTS, read_toml
from benchmarks.published.rows import Row, read

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

PAGE = RESULTS / "evidence.md"
HEAD = """\
# Every published row

This page lists every published figure of a real GPU that was also run on the virtual GPU, with the
error. [Accuracy](../../docs/explanation/accuracy.md) is the summary, and
[the data](../data/README.md) name the sources. Tables with "never looked at" have the rows that
were held back: nobody looked at them while the virtual GPU was built.
`python -m benchmarks.published.evidence` writes this page from
[the recorded results](.).
"""
FOOT = """\
## Not in these tables
- 48 moments of FSDP, each with the MiB that PyTorch's test asserts
  ([published_fsdp.txt](published_fsdp.txt)).
- Rows of the same sources, run with another version of torch than the source used
  ([published.txt](published.txt)).
"""


@dataclass(frozen=True)
class Group:
    """Rows of one family, torch, cuDNN and card.

    Attributes:
        note: a sentence on all rows.
        columns: titles of the columns after the name.
        rows: each row's name and cells.
        errors: the rows' errors in percent, by kind of memory.
    """

    title: str
    note: str
    columns: list[str]
    rows: list[list[str]]
    errors: dict[str, list[float]]

    def lines(self) -> list[str]:
        """Return the group as Markdown."""
        heads = ["row", *self.columns]
        table = ["|".join(["", *(f" {cell} " for cell in row), ""]) for row in [heads, *self.rows]]
        table.insert(1, "| --- " * len(heads) + "|")
        spreads = [f"{kind}: {spread(errors)}" for kind, errors in self.errors.items()]
        summary = [f"Error, {'; '.join(spreads)}.", ""] if spreads else []
        return [f"## {self.title}", self.note, "", *summary, *table, ""]


def spread(errors: list[float]) -> str:
    """Return the number, the median and the largest of errors in percent."""
    sizes = [abs(error) for error in errors]
    median, worst = statistics.median(sizes), max(sizes)
    rows = "1 row" if len(sizes) == 1 else f"{len(sizes)} rows"
    return f"{rows}, {median:.2f} % in the median, {worst:.2f} % at worst"


def tables(name: str) -> list[list[dict[str, str]]]:
    """Return a result's tables: rows by column titles, which a number makes unique."""
    lines = (RESULTS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    found = []
    for at, line in enumerate(lines):
        if not re.fullmatch(r"-+(  -+)+", line):
            continue
        spans = [match.span() for match in re.finditer("-+", line)]
        told = [lines[at - 1][start:end].strip() for start, end in spans]
        earlier = [told[:number].count(head) for number, head in enumerate(told)]
        heads = [f"{head} {n + 1}" if n else head for head, n in zip(told, earlier, strict=True)]
        rows = []
        for row in lines[at + 1 :]:
            if not row.strip():
                break
            cells = [row[start:end].strip() for start, end in spans]
            rows.append(dict(zip(heads, cells, strict=True)))
        found.append(rows)
    return found


def training_runs() -> list[Group]:
    """Return the runs of published.txt by kind, torch and card, and the runs out of memory."""
    figures = {
        (row["step"], row["card"], row["real MiB"], row["torch here"]): row
        for row in tables("published")[0]
    }
    groups: dict[tuple[str, str, str], list[tuple[Row, dict[str, str]]]] = {}
    full: list[list[str]] = []
    for row in read():
        if row.real_oom:
            full.append([row.name, row.card, row.torch, "out of memory"])
            continue
        figure = figures.get((row.name, row.card, f"{row.real:.0f}", row.torch))
        if figure is not None:
            groups.setdefault((row.kind, row.torch, row.card), []).append((row, figure))
    named = {"transformers": "Transformers", "conv nets": "Convolution nets"}
    result = []
    for (kind, torch, card), pairs in sorted(groups.items(), reverse=True):
        errors = [float(figure["%"]) for _, figure in pairs]
        cells = [
            [row.name, figure["real MiB"], figure["virtual"], figure["%"]] for row, figure in pairs
        ]
        result.append(
            Group(
                f"{named.get(kind, kind)}, torch {torch}, {card}",
                "Training; peak reserved in MiB. cuDNN 9.1 computes no workspaces without a GPU.",
                [card, "virtual", "error %"],
                cells,
                {"reserved": errors},
            )
        )
    text = (RESULTS / "published.txt").read_text(encoding="utf-8")
    counts = re.search(r"(\d+) runs on real cards, (\d+).*\n.*the same of (\d+);", text)
    assert counts is not None, "published.txt has no count of runs out of memory"
    note = (
        f"Of {counts[1]} runs on real cards, {counts[2]} ran out of memory. The virtual GPU is "
        f"right for {counts[3]} of the {counts[1]} runs. These are the {counts[2]}:"
    )
    return [*result, Group("Out of memory", note, ["card", "torch", "on the GPU"], full, {})]


class Section(NamedTuple):
    """Rows of a result that form a section of the page; sections.toml explains the fields."""

    result: str
    title: str
    note: str
    heads: list[str | list[str]]
    errors: Mapping[str, str] = MappingProxyType({})
    of: Sequence[str] = ("", "")
    prefix: str = ""
    split: str = "unseen first"
    kinds: str = ""

    def groups(self) -> Iterator[Group]:
        """Yield the section's groups: one, or two if rows never looked at are separate."""
        [rows] = tables(self.result)
        column, pattern = self.of
        rows = [row for row in rows if not column or re.fullmatch(pattern, row[column])]
        rows = [row for row in rows if first(row).startswith(self.prefix)]
        note = self.note.format(here=here(self.result))
        if not self.split:
            yield self.group(self.title, note, rows)
            return
        parts = {"never looked at": "yes", "looked at": ""}
        for words in sorted(parts, reverse=self.split == "unseen first"):
            if chosen := [row for row in rows if row["never looked at"] == parts[words]]:
                yield self.group(f"{self.title}, {words}", note, chosen)

    def group(self, title: str, note: str, rows: list[dict[str, str]]) -> Group:
        """Return a group of rows."""
        shown = dict((it, it) if isinstance(it, str) else it for it in self.heads)
        cells = [
            [
                first(row).removeprefix(self.prefix),
                *("n/a" if row[head] in {"nan", "+nan"} else row[head] for head in shown),
            ]
            for row in rows
        ]
        errors = {
            kind: [float(row[head]) for row in rows if row[head] not in {"", "+nan"}]
            for kind, head in self.errors.items()
        }
        for row in rows if self.kinds else ():
            errors.setdefault(row[self.kinds], []).append(float(row["%"]))
        return Group(title, note, list(shown.values()), cells, errors)


def first(row: dict[str, str]) -> str:
    """Return a row's name, its first cell."""
    return next(iter(row.values()))


def here(name: str) -> str:
    """Return the versions in a result's head."""
    head = (RESULTS / f"{name}.txt").read_text(encoding="utf-8").partition("\n\n")[0]
    return head.rpartition("here: ")[2]


def peaks() -> list[Group]:
    """Return the groups of all runs."""
    sections = read_toml(Path(__file__).with_name("sections.toml"))["sections"]
    return [
        *training_runs(),
        *(group for section in sections for group in Section(**section).groups()),
    ]


def workspaces() -> Group:
    """Return the rows of measured_workspaces.txt for which the row's own cuDNN was queried."""
    [rows] = tables("measured_workspaces")
    section = Section(
        "measured_workspaces",
        "Workspaces of convolutions",
        "Bytes of one convolution, computed by the same version of cuDNN. `within` is the rounding "
        "of the published figure. For rows of cuDNN 9.5.1 another version computed the workspaces: "
        "[measured_workspaces.txt](measured_workspaces.txt).",
        ["GPU", "cuDNN", "measured", "within", "virtual", "difference"],
    )
    own = [row for row in rows if row["cuDNN"] == row["asked"]]
    return section.group(section.title, section.note, own)


def page() -> str:
    """Return the page."""
    groups = [*peaks(), workspaces()]
    return "\n".join([HEAD, *(line for group in groups for line in group.lines()), FOOT])


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
