"""The page of the documentation that has every published row that was run, from the results.

    python benchmarks/evidence.py

It writes docs/explanation/evidence.md from results/*.txt; a test compares the two.
"""

from __future__ import annotations

import itertools
import re
import statistics
from dataclasses import dataclass
from pathlib import Path

from published_rows import Row, read

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "explanation" / "evidence.md"
HEAD = """\
# Every published row

Each figure that others published of a real GPU and that was run on the virtual one, with its error.
[Accuracy](accuracy.md) sums up; [the data](../../benchmarks/data/README.md) tell the sources. Rows
that nobody had looked at while the virtual GPU was built stand apart. `benchmarks/evidence.py`
writes this page from [the recorded results](../../benchmarks/results).
"""
FOOT = """\
## Not in these tables
- 48 moments of FSDP, each the same in MiB as PyTorch's test asserts
  ([published_fsdp.txt](../../benchmarks/results/published_fsdp.txt)).
- Rows of the same sources that were run with another torch than their own
  ([published.txt](../../benchmarks/results/published.txt)).
"""


@dataclass(frozen=True)
class Group:
    """Rows of one family, torch, cuDNN and card.

    Attributes:
        note: a sentence on all of them.
        columns: heads of what each row has besides its name.
        rows: a name and cells by these columns.
        errors: percent, by kind of memory.
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
    """Return count, median and worst of errors in percent."""
    sizes = [abs(error) for error in errors]
    median, worst = statistics.median(sizes), max(sizes)
    return f"{len(sizes)} rows, {median:.2f} % in the median, {worst:.2f} % at worst"


def tables(name: str) -> list[list[dict[str, str]]]:
    """Return the tables of a result: rows by their heads, made unique by a number."""
    lines = (RESULTS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    found = []
    for at, line in enumerate(lines):
        if not re.fullmatch(r"-+(  -+)+", line):
            continue
        spans = [match.span() for match in re.finditer("-+", line)]
        heads: list[str] = []
        for start, end in spans:
            head = lines[at - 1][start:end].strip()
            heads.append(f"{head} {heads.count(head) + 1}" if head in heads else head)
        rows = []
        for row in lines[at + 1 :]:
            if not row.strip():
                break
            cells = [row[start:end].strip() for start, end in spans]
            rows.append(dict(zip(heads, cells, strict=True)))
        found.append(rows)
    return found


def training_runs() -> list[Group]:
    """Return the runs of published.txt, by kind, torch and card, and those out of memory."""
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
                "Training; peak reserved in MiB. Their cuDNN cannot be asked.",
                [card, "virtual", "error %"],
                cells,
                {"reserved": errors},
            )
        )
    text = (RESULTS / "published.txt").read_text(encoding="utf-8")
    counts = re.search(r"(\d+) runs on real cards, (\d+).*\n.*the same of (\d+);", text)
    assert counts is not None, "published.txt has no count of runs out of memory"
    note = (
        f"Of {counts[1]} runs on real cards {counts[2]} were out of memory; the virtual GPU says "
        f"the same of {counts[3]}. These are the {counts[2]}:"
    )
    return [*result, Group("Out of memory", note, ["card", "torch", "on the GPU"], full, {})]


def autoencoders() -> list[Group]:
    """Return the rows of published_vae.txt, by type and by whether they had been looked at."""
    [rows] = tables("published_vae")
    head = (RESULTS / "published_vae.txt").read_text(encoding="utf-8").partition("\n\n")[0]
    ran = head.rpartition("here: ")[2]
    result = []
    for kind in ("half precision", "float32"):
        for unseen in (True, False):
            chosen = [
                row
                for row in rows
                if row["RTX 4090"].endswith("float16") == (kind == "half precision")
                and (row["never looked at"] == "yes") == unseen
            ]
            heads = ["allocated", "virtual", "reserved", "virtual 2"]
            errors = ["allocated %", "reserved %"]
            result.append(
                Group(
                    f"Autoencoders in {kind}, RTX 4090, "
                    f"{'never looked at' if unseen else 'looked at'}",
                    f"Encoding and decoding; MiB. There torch 2.7.1, cuDNN 9.7.1; here {ran}.",
                    [*(head.removesuffix(" 2") for head in heads), *errors],
                    [[row["RTX 4090"], *(row[head] for head in heads + errors)] for row in chosen],
                    {error[:-2]: [float(row[error]) for row in chosen] for error in errors},
                )
            )
    return result


def segmentation() -> list[Group]:
    """Return the rows of published_smp.txt."""
    [rows] = tables("published_smp")
    cells = [[row["four steps"], row["L40S"], row["virtual"], row["one group %"]] for row in rows]
    note = (
        "Training; peak allocated in bytes. What their source leaves open was tried until most fit."
    )
    errors = {"allocated": [float(row["one group %"]) for row in rows]}
    title = "Segmentation nets, torch 2.11.0 (cuDNN 9.19.0), L40S"
    return [Group(title, note, ["L40S", "virtual", "error %"], cells, errors)]


def detection() -> list[Group]:
    """Return the rows of published_detection.txt, by card, and those never looked at apart."""
    [rows] = tables("published_detection")
    heads = ["figure", "GPU", "virtual"]
    result = []
    for card, unseen in itertools.product(("T4", "L4"), ("", "yes")):
        chosen = [row for row in rows if (row["card"], row["never looked at"]) == (card, unseen)]
        errors: dict[str, list[float]] = {}
        for row in chosen:
            errors.setdefault(row["figure"], []).append(float(row["%"]))
        note = (
            "Ultralytics' search for a batch size: what is reserved, in GB, and what was held when "
            "the largest batch was out of memory. The most labels of an image, which the source "
            "does not say, was settled on rows that were looked at."
        )
        result.append(
            Group(
                f"Detectors, torch 2.11.0 (cuDNN 9.19.0), {card}, {looked(unseen)}",
                note,
                [*heads, "error %"],
                [[row["batch size"], *(row[head] for head in heads), row["%"]] for row in chosen],
                errors,
            )
        )
    return result


def speech() -> list[Group]:
    """Return the rows of published_speech.txt, by card and by whether they had been looked at."""
    [rows] = tables("published_speech")
    versions = {
        "RTX A6000": "torch 2.8.0 (cuDNN 9.10.2)",
        "RTX A5000": "torch 2.11.0 (cuDNN 9.19.0)",
    }
    heads = ["allocated", "virtual", "reserved", "virtual 2"]
    kinds = ["allocated %", "reserved %"]
    result = []
    for card, unseen in itertools.product(versions, ("", "yes")):
        chosen = [row for row in rows if (row["card"], row["never looked at"]) == (card, unseen)]
        if chosen:
            result.append(
                Group(
                    f"Speaker diarization, {versions[card]}, {card}, {looked(unseen)}",
                    "Inference; MiB, allocated above what the stage began with on the A6000. What "
                    "the script had first, of rows that nobody had looked at, is in "
                    "[Accuracy](accuracy.md#rows-that-nobody-had-looked-at).",
                    [*(head.removesuffix(" 2") for head in heads), *kinds],
                    [
                        [row["step"], *(row[head].replace("+nan", "nan") for head in heads + kinds)]
                        for row in chosen
                    ],
                    {kind[:-2]: percents(chosen, kind) for kind in kinds},
                )
            )
    return result


def looked(unseen: str) -> str:
    """Return whether rows had been looked at, in words."""
    return "never looked at" if unseen else "looked at"


def percents(rows: list[dict[str, str]], column: str) -> list[float]:
    """Return the errors of rows, of those that have a figure."""
    return [float(row[column]) for row in rows if row[column] not in ("", "+nan")]


def more_segmentation() -> list[Group]:
    """Return the rows of published_segmentary.txt, by family and whether looked at."""
    [rows] = tables("published_segmentary")
    notes = {
        "matrix": (
            "One step of SGD in float32, and a prediction. Bytes allocated, MiB reserved.",
            {"allocated": "allocated %", "reserved": "largest %"},
            ["allocated", "virtual", "reserved MiB", "largest plans"],
        ),
        "probe": (
            "Four steps of AdamW, bf16 autocast, cuDNN's benchmark mode. MiB reserved.",
            {"reserved, largest plans": "largest %", "reserved, least": "least %"},
            ["reserved MiB", "largest plans", "least plans"],
        ),
        "inference": (
            "An image of 1024 x 1024, bf16 autocast, cuDNN's benchmark mode. MiB reserved.",
            {"reserved, largest plans": "largest %", "reserved, least": "least %"},
            ["reserved MiB", "largest plans", "least plans"],
        ),
    }
    result = []
    for family, (note, errors, figures) in notes.items():
        for unseen in (True, False):
            chosen = [
                row
                for row in rows
                if row["L40S"].startswith(family) and (row["never looked at"] == "yes") == unseen
            ]
            heads = [*figures, *errors.values()]
            cells = [
                [row["L40S"].partition(" ")[2], *(row[head] for head in heads)] for row in chosen
            ]
            spreads = {kind: [float(row[head]) for row in chosen] for kind, head in errors.items()}
            looked = "never looked at" if unseen else "looked at"
            title = f"Segmentation nets ({family}), torch 2.11.0 (cuDNN 9.19.0), L40S, {looked}"
            result.append(Group(title, note, heads, cells, spreads))
    return result


def diffusion() -> list[Group]:
    """Return the rows of published_diffusion.txt, by whether they had been looked at."""
    [rows] = tables("published_diffusion")
    head = (RESULTS / "published_diffusion.txt").read_text(encoding="utf-8").partition("\n\n")[0]
    ran = head.rpartition("here: ")[2]
    result = []
    for unseen in (True, False):
        chosen = [row for row in rows if (row["never looked at"] == "yes") == unseen]
        heads = ["torch", "allocated", "virtual", "reserved", "virtual 2"]
        errors = ["allocated %", "reserved %"]
        columns = [*(head.removesuffix(" 2") for head in heads), *errors, "reserved between"]
        cells = [
            [row["method"], *(row[head] for head in [*heads, *errors, "reserved between"])]
            for row in chosen
        ]
        title = f"FLUX.2-klein with PEFT's methods, L40S, {looked('yes' if unseen else '')}"
        note = (
            "Training; bytes: allocated after the steps, most reserved. "
            f"Here {ran}; where cuFFT was asked, the range of its workspaces."
        )
        spreads = {error[:-2]: [float(row[error]) for row in chosen] for error in errors}
        result.append(Group(title, note, columns, cells, spreads))
    return result


def inference() -> list[Group]:
    """Return the rows of published_inference.txt, by whether they had been looked at."""
    [rows] = tables("published_inference")
    result = []
    for unseen in (True, False):
        chosen = [row for row in rows if (row["never looked at"] == "yes") == unseen]
        heads = ["torch", "GPU", "real GiB", "virtual", "%", "within its last digit"]
        cells = [[row["written text"], *(row[head] for head in heads)] for row in chosen]
        title = f"Inference with KV caches and without, {looked('yes' if unseen else '')}"
        note = "Peak allocated in GiB, printed to two digits by the source."
        spreads = {"allocated": [float(row["%"]) for row in chosen]}
        result.append(Group(title, note, heads, cells, spreads))
    return result


def workspaces() -> list[Group]:
    """Return the rows of measured_workspaces.txt that asked the row's own cuDNN."""
    [rows] = tables("measured_workspaces")
    own = [row for row in rows if row["cuDNN"] == row["asked"]]
    heads = ["GPU", "cuDNN", "measured", "within", "virtual", "difference"]
    cells = [[row["convolution"], *(row[head] for head in heads)] for row in own]
    note = (
        "Bytes of one convolution, its own cuDNN asked; `within` is how far the published figure "
        "was rounded. Rows of cuDNN 9.5.1, for which another was asked, are in "
        "[measured_workspaces.txt](../../benchmarks/results/measured_workspaces.txt)."
    )
    return [Group("Workspaces of convolutions", note, heads, cells, {})]


def page() -> str:
    """Return the page."""
    groups = [
        *training_runs(),
        *autoencoders(),
        *diffusion(),
        *inference(),
        *segmentation(),
        *more_segmentation(),
        *detection(),
        *speech(),
        *workspaces(),
    ]
    return "\n".join([HEAD, *(line for group in groups for line in group.lines()), FOOT])


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
