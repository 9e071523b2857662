"""Workspaces of convolutions measured on real GPUs, beside what the virtual GPU's cuDNN takes.

    python -m benchmarks.cudnn.measured [--cudnn VERSION=PATH ...] [--python PATH ...]
    python -m benchmarks.cudnn.measured --ranges

The rows are those of data/measured-workspaces.csv and data/measured-workspaces-more.csv
(data/README.md has their sources). Each row runs in a process of its own on the row's chip, in the
interpreter whose torch is nearest to the row's. ``--cudnn`` names further cuDNNs by the paths of
their libcudnn.so.9, installed with their dependencies; the interpreters' own are always used. A row
queries the cuDNN of its version; if that one is missing, all others, the nearest version first.

With ``--ranges``, published figures are compared with the ranges in reports if no cuDNN can be
queried: the rows with the largest workspace of a range, and the peaks of results/published.txt and
published_vae.txt.
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from typing import Any

from benchmarks import harness
from benchmarks.cudnn.asking import ask, named, numbers, options, there
from benchmarks.harness import line, publish
from benchmarks.published.evidence import tables

CHIPS = {
    "NVIDIA GeForce RTX 3090 Ti": ("RTX A6000", 84),
    "NVIDIA RTX PRO 5000 72GB Blackwell": ("RTX 5090", 110),
    "NVIDIA A100": ("A100-80GB", 108),
    "NVIDIA A100-SXM4-40GB": ("A100-40GB", 108),
    "not said": ("H100", 132),
}
"""by the row's chip: a card with its limits, and its number of SMs (NVIDIA's data sheets). "not
said": a comment whose figure without cuDNN includes Hopper's 32 MiB of cuBLAS workspace"""


@dataclass(frozen=True)
class Row:
    """One convolution that was measured.

    Attributes:
        loop: whether the figure is the peak of the report's whole script, not the workspace.
        size: the measured bytes.
        within: bytes by which the figure may have been rounded.
    """

    name: str
    gpu: str
    torch: str
    cudnn: str
    dtype: str
    shapes: tuple[list[int], list[int]]
    bias: bool
    padding: int
    loop: bool
    size: int
    within: int

    def task(self, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - of JSON
        """Return the task for asking.measure()."""
        names = ("dtype", "shapes", "bias", "padding", "loop")
        return {"chip": CHIPS[self.gpu], **{it: getattr(self, it) for it in names}, **more}


@dataclass(frozen=True)
class Found:
    """One cuDNN's answer on a row; ``size`` in bytes, or the error."""

    row: Row
    cudnn: str
    torch: str
    size: int | str


def read() -> list[Row]:
    """Return the rows of both files, without matrix products."""
    rows = []
    for it in harness.read("measured-workspaces.csv"):
        if it["operator"] != "aten::convolution":
            continue
        torch, dtype = ast.literal_eval(it["torch"])[0], ast.literal_eval(it["dtypes"])[0]
        shapes = tuple(ast.literal_eval(it["shapes"]))
        name, _, _ = it["id"].partition(".")
        one = (name, it["gpu"], torch, named(int(it["cudnn"])), dtype.removeprefix("torch."))
        rows.append(Row(*one, shapes, False, 1, False, int(it["bytes"]), 0))
    for it in harness.read("measured-workspaces-more.csv"):
        shapes = (ast.literal_eval(it["input"]), ast.literal_eval(it["weight"]))
        one = (it["id"], it["gpu"], it["torch"], it["cudnn"], it["dtype"], shapes)
        more = (it["bias"] == "1", int(it["padding"]), it["figure"] == "loop")
        rows.append(Row(*one, *more, int(it["bytes"]), int(it["within"])))
    return rows


def nearest_first(given: list[str], wanted: str) -> list[str]:
    """Sort versions by their distance from one: by major, then minor, then patch number."""
    major, minor, patch = numbers(wanted)[:3]

    def distance(version: str) -> tuple[int, int, int]:
        other = numbers(version)
        return abs(other[0] - major), abs(other[1] - minor), abs(other[2] - patch)

    return sorted(given, key=distance)


def run(rows: list[Row], pythons: dict[str, str], cudnns: dict[str, str]) -> list[Found]:
    """Query the cuDNNs of the rows' versions, or the nearest; return their answers."""
    found = []
    for row in rows:
        minor = numbers(row.torch)[1]
        torch = min(pythons, key=lambda it, minor=minor: abs(numbers(it)[1] - minor))
        ordered = nearest_first(list(cudnns), row.cudnn)
        for version in ordered[:1] if row.cudnn in cudnns else ordered:
            task = row.task(asked=row.within > 0 and not row.loop)
            said = ask(pythons[torch], cudnns[version], task)
            if not isinstance(said, str):
                said = said[0] if said[1] == version else f"cuDNN {said[1]} was asked"
            found.append(Found(row, version, torch, said))
            print(row.name, version, torch, said, row.size, file=sys.stderr, flush=True)
    return found


def table(found: list[Found]) -> str:
    """Return measured and virtual workspaces side by side."""
    heads = ["convolution", "GPU", "cuDNN", "asked", "torch here", "measured", "within"]
    heads += ["virtual", "difference"]
    lines = []
    for it in found:
        row = it.row
        one = [f"{row.name}{' (peak)' if row.loop else ''}", row.gpu, row.cudnn, it.cudnn, it.torch]
        one += [f"{row.size:,}", f"{row.within:,}" if row.within else "exact"]
        if isinstance(it.size, str):
            lines.append([*one, it.size, ""])
            continue
        off = it.size - row.size
        lines.append([*one, f"{it.size:,}", "none" if abs(off) <= row.within else f"{off:+,}"])
    return harness.table(lines, heads)


def summary(found: list[Found]) -> list[str]:
    """Return how many rows are as measured, with their own cuDNN and with other versions."""
    said = []
    same = [it for it in found if it.cudnn == it.row.cudnn]
    text = "rows whose own cuDNN was asked"
    for name, these in ((text, same), *others(found)):
        right = [it for it in these if isinstance(it.size, int)]
        right = [it for it in right if abs(it.size - it.row.size) <= it.row.within]
        said.append(f"{name}: {len(right)} of {len(these)} as measured")
    return said


def others(found: list[Found]) -> list[tuple[str, list[Found]]]:
    """Group the answers of other versions than the row's by the two versions."""
    pairs = dict.fromkeys((it.row.cudnn, it.cudnn) for it in found if it.row.cudnn != it.cudnn)
    return [
        (
            f"rows of cuDNN {real}, {asked} asked",
            [it for it in found if (it.row.cudnn, it.cudnn) == (real, asked)],
        )
        for real, asked in pairs
    ]


# -- ranges --


def within_ranges() -> tuple[str, int]:
    """Return a table of single convolutions, and how many exceed the largest workspace."""
    rows, outside = [], 0
    for row in read():
        if row.loop:  # the peak of a whole script
            continue
        answer = ask(sys.executable, "none", row.task(end="most", asked=True))
        assert not isinstance(answer, str), answer
        most = answer[0]
        outside += row.size > most
        share = f"{100 * row.size / most:.0f}"
        rows.append([row.name, row.gpu, row.cudnn, f"{row.size:,}", f"{most:,}", share])
    heads = ["convolution", "GPU", "cuDNN", "measured", "at most", "% of that"]
    return harness.table(rows, heads), outside


def peaks(name: str, columns: dict[str, str]) -> tuple[str, int]:
    """Return a sentence on the rows of a result, and how many lie outside of their ranges.

    Args:
        name: the result's name.
        columns: maps each column of published figures to the column of its range.
    """
    result = tables(name)[0]
    if not set(columns.values()) <= set(result[0]):
        return f"{name}.txt has no ranges", 0
    rows = [
        (float(row[real]), float(ends[1]), float(ends[2]))
        for row in result
        for real, column in columns.items()
        if (ends := re.fullmatch(r"(\d+) to (\d+)", row[column]))
    ]
    # Ends are whole MiB; allocated bytes differ by up to 0.1 % for other reasons.
    outside = sum(not low * 0.999 - 1 <= real <= high * 1.001 + 1 for real, low, high in rows)
    shares = max(100 * real / high for real, low, high in rows)
    return (
        f"{name}.txt: {len(rows) - outside} of {len(rows)} figures lie in their ranges; the "
        f"nearest to its upper end is {shares:.0f} % of it"
    ), outside


def ranges() -> None:
    """Publish the figures beside their ranges; fail if a figure lies outside of its range."""
    convolutions, beyond = within_ranges()
    runs, outside = peaks("published", {"real MiB": "range"})
    columns = {"allocated": "allocated between", "reserved": "reserved between"}
    autoencoders, apart = peaks("published_vae", columns)
    title = "Published figures and the ranges of convolutions' workspaces; bytes"
    publish("convolution_ranges", f"{title}\n{line()}\n\n{convolutions}\n\n{runs}\n{autoencoders}")
    if beyond or outside or apart:
        sys.exit("a figure lies outside of its range")


def main() -> None:
    """Print the table of the rows; write it to the results if it has all rows."""
    parser = options(__doc__)
    parser.add_argument("--only", default="", help="rows with this in their name")
    parser.add_argument("--ranges", action="store_true", help="published figures in their ranges")
    given = parser.parse_args()
    if given.ranges:
        ranges()
        return
    found = run([row for row in read() if given.only in row.name], *there(given))
    title = "Workspaces of convolutions, in bytes, measured on real GPUs and by cuDNN's plans here"
    text = "\n".join([title, line(), "", table(found), "", *summary(found)])
    publish("measured_workspaces", text, keep=not given.only)


if __name__ == "__main__":
    main()
