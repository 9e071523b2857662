"""Whether published figures lie in the ranges that reports have of convolutions' workspaces.

    python -m benchmarks.cudnn.ranges

Workspaces of single convolutions (data/measured-workspaces*.csv) are compared with the most that
one is taken to need where no cuDNN is asked; peaks are those of results/published.txt and
results/published_vae.txt. It fails if a figure lies outside of its range.
"""

from __future__ import annotations

import re
import sys

from benchmarks.cudnn.asking import ask
from benchmarks.cudnn.measured import read
from benchmarks.harness import line, publish, table
from benchmarks.published.evidence import tables


def workspaces() -> tuple[str, int]:
    """Return the table of single convolutions, and how many took more than the most."""
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
    return table(rows, heads), outside


def peaks(name: str, columns: dict[str, str]) -> tuple[str, int]:
    """Return a sentence on the rows of a result, and how many lie outside of their ranges.

    Args:
        name: of the result.
        columns: those of published figures, each with that of its range.
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
    # Ends are in whole MiB; figures of what is allocated differ by up to 0.1 % for other reasons.
    outside = sum(not low * 0.999 - 1 <= real <= high * 1.001 + 1 for real, low, high in rows)
    shares = max(100 * real / high for real, low, high in rows)
    return (
        f"{name}.txt: {len(rows) - outside} of {len(rows)} figures lie in their ranges; the "
        f"nearest to its upper end is {shares:.0f} % of it"
    ), outside


def main() -> None:
    """Print and keep the tables."""
    convolutions, beyond = workspaces()
    runs, outside = peaks("published", {"real MiB": "range"})
    columns = {"allocated": "allocated between", "reserved": "reserved between"}
    autoencoders, apart = peaks("published_vae", columns)
    title = "Published figures and the ranges of convolutions' workspaces; bytes"
    publish("convolution_ranges", f"{title}\n{line()}\n\n{convolutions}\n\n{runs}\n{autoencoders}")
    if beyond or outside or apart:
        sys.exit("a figure lies outside of its range")


if __name__ == "__main__":
    main()
