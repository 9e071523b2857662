"""The page of the documentation that has every published row that was run, from the results.

    python -m benchmarks.published.evidence

It writes docs/explanation/evidence.md from results/*.txt; a test compares the two.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.harness import RESULTS, ROOT
from benchmarks.published.rows import Row, read

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = ROOT / "docs" / "explanation" / "evidence.md"
HEAD = """\
# Every published row

This page lists every published figure of a real GPU that was also run on the virtual GPU, with the
error. [Accuracy](accuracy.md) is the summary, and [the data](../../benchmarks/data/README.md) name
the sources. Tables with "never looked at" have the rows that were held back: nobody looked at them
while the virtual GPU was built.
`python -m benchmarks.published.evidence` writes this page from
[the recorded results](../../benchmarks/results).
"""
FOOT = """\
## Not in these tables
- 48 moments of FSDP, each with the MiB that PyTorch's test asserts
  ([published_fsdp.txt](../../benchmarks/results/published_fsdp.txt)).
- Rows of the same sources, run with another version of torch than the source used
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
    rows = "1 row" if len(sizes) == 1 else f"{len(sizes)} rows"
    return f"{rows}, {median:.2f} % in the median, {worst:.2f} % at worst"


def tables(name: str) -> list[list[dict[str, str]]]:
    """Return the tables of a result: rows by their heads, made unique by a number."""
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


def group(
    title: str,
    note: str,
    rows: list[dict[str, str]],
    heads: dict[str, str] | list[str],
    errors: dict[str, str] | None = None,
) -> Group:
    """Return a group of the rows of a result.

    Args:
        title: of the group.
        note: a sentence on all of them.
        rows: with the name in their first cell.
        heads: the columns to show, or their heads by those of the result.
        errors: by kind of memory, the column that has them.
    """
    shown = heads if isinstance(heads, dict) else {it: it.removesuffix(" 2") for it in heads}
    cells = [
        [
            next(iter(row.values())),
            *("n/a" if row[head] in {"nan", "+nan"} else row[head] for head in shown),
        ]
        for row in rows
    ]
    numbers = {
        kind: [float(row[head]) for row in rows if row[head] not in {"", "+nan"}]
        for kind, head in (errors or {}).items()
    }
    return Group(title, note, list(shown.values()), cells, numbers)


def here(name: str) -> str:
    """Return the versions that a result's head tells."""
    head = (RESULTS / f"{name}.txt").read_text(encoding="utf-8").partition("\n\n")[0]
    return head.rpartition("here: ")[2]


def seen_and_unseen(rows: list[dict[str, str]]) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Yield rows that nobody had looked at, and the others; each with these words."""
    for words, cell in (("never looked at", "yes"), ("looked at", "")):
        yield words, [row for row in rows if row["never looked at"] == cell]


BOTH = {"allocated": "allocated %", "reserved": "reserved %"}
PEAKS = ["allocated", "virtual", "reserved", "virtual 2"]


def autoencoders() -> Iterator[Group]:
    """Yield the rows of published_vae.txt, by type and by whether they had been looked at."""
    [rows] = tables("published_vae")
    ran = here("published_vae")
    source = "The source had torch 2.7.1, cuDNN 9.7.1"
    note = f"Encoding and decoding; MiB. {source}. The virtual GPU had {ran}."
    for kind in ("half precision", "float32"):
        is_half = kind == "half precision"
        of_kind = [row for row in rows if row["RTX 4090"].endswith("float16") == is_half]
        for words, chosen in seen_and_unseen(of_kind):
            title = f"Autoencoders in {kind}, RTX 4090, {words}"
            yield group(title, note, chosen, [*PEAKS, *BOTH.values()], BOTH)


def segmentation() -> Iterator[Group]:
    """Yield the rows of published_smp.txt."""
    [rows] = tables("published_smp")
    note = (
        "Training; peak allocated in bytes. Settings that the source does not name were tried "
        "until most rows were equal."
    )
    heads = {"L40S": "L40S", "virtual": "virtual", "one group %": "error %"}
    title = "Segmentation nets, torch 2.11.0 (cuDNN 9.19.0), L40S"
    yield group(title, note, rows, heads, {"allocated": "one group %"})


def detection() -> Iterator[Group]:
    """Yield the rows of published_detection.txt, by card, and those never looked at apart."""
    [rows] = tables("published_detection")
    heads = {"figure": "figure", "GPU": "GPU", "virtual": "virtual", "%": "error %"}
    note = (
        "Ultralytics' search for a batch size: memory that is reserved, in GB, and memory that "
        "was in use when the largest batch ran out of memory. The source does not name the largest "
        "number of labels in an image. This number was chosen with the rows that were looked at."
    )
    for card in ("T4", "L4"):
        of_card = [row for row in rows if row["card"] == card]
        for words, chosen in reversed([*seen_and_unseen(of_card)]):
            errors: dict[str, list[float]] = {}
            for row in chosen:
                errors.setdefault(row["figure"], []).append(float(row["%"]))
            title = f"Detectors, torch 2.11.0 (cuDNN 9.19.0), {card}, {words}"
            yield dataclasses.replace(group(title, note, chosen, heads), errors=errors)


def speech() -> Iterator[Group]:
    """Yield the rows of published_speech.txt, by card and by whether they had been looked at."""
    [rows] = tables("published_speech")
    versions = {
        "RTX A6000": "torch 2.8.0 (cuDNN 9.10.2)",
        "RTX A5000": "torch 2.11.0 (cuDNN 9.19.0)",
    }
    note = (
        "Inference; MiB, on the A6000 allocated above the memory at the beginning of the stage. "
        "[Accuracy](accuracy.md#rows-that-were-held-back) has the first predictions of rows "
        "that were held back."
    )
    for card, version in versions.items():
        of_card = [row for row in rows if row["card"] == card]
        for words, chosen in reversed([*seen_and_unseen(of_card)]):
            if chosen:
                title = f"Speaker diarization, {version}, {card}, {words}"
                yield group(title, note, chosen, [*PEAKS, *BOTH.values()], BOTH)


def more_segmentation() -> Iterator[Group]:
    """Yield the rows of published_segmentary.txt, by family and whether looked at."""
    [rows] = tables("published_segmentary")
    plans = {"reserved, largest plans": "largest %", "reserved, least": "least %"}
    notes = {
        "matrix": (
            "One step of SGD in float32, and a prediction. Bytes allocated, MiB reserved.",
            {"allocated": "allocated %", "reserved": "largest %"},
            ["allocated", "virtual", "reserved MiB", "largest plans"],
        ),
        "probe": (
            "Four steps of AdamW, bf16 autocast, cuDNN's benchmark mode. MiB reserved.",
            plans,
            ["reserved MiB", "largest plans", "least plans"],
        ),
        "inference": (
            "An image of 1024 x 1024, bf16 autocast, cuDNN's benchmark mode. MiB reserved.",
            plans,
            ["reserved MiB", "largest plans", "least plans"],
        ),
    }
    for family, (note, errors, figures) in notes.items():
        of_family = [
            row | {"L40S": row["L40S"].removeprefix(f"{family} ")}
            for row in rows
            if row["L40S"].startswith(f"{family} ")
        ]
        for words, chosen in seen_and_unseen(of_family):
            title = f"Segmentation nets ({family}), torch 2.11.0 (cuDNN 9.19.0), L40S, {words}"
            yield group(title, note, chosen, [*figures, *errors.values()], errors)


def diffusion() -> Iterator[Group]:
    """Yield the rows of published_diffusion.txt, by whether they had been looked at."""
    [rows] = tables("published_diffusion")
    ran = here("published_diffusion")
    note = (
        "Training; bytes allocated after the steps, and highest bytes reserved. "
        f"Here {ran}. Rows that use cuFFT have the range of its workspaces."
    )
    heads = ["torch", *PEAKS, *BOTH.values(), "reserved between"]
    for words, chosen in seen_and_unseen(rows):
        title = f"FLUX.2-klein with PEFT's methods, L40S, {words}"
        yield group(title, note, chosen, heads, BOTH)


def inference() -> Iterator[Group]:
    """Yield the rows of published_inference.txt, by whether they had been looked at."""
    [rows] = tables("published_inference")
    heads = ["torch", "GPU", "real GiB", "virtual", "%", "within its last digit"]
    note = "Peak allocated in GiB. The source prints two digits."
    for words, chosen in seen_and_unseen(rows):
        title = f"Inference with KV caches and without, {words}"
        yield group(title, note, chosen, heads, {"allocated": "%"})


def compiled() -> Iterator[Group]:
    """Yield the rows of torch.compile: of three results, by whether they had been looked at."""
    both = {"allocated": "%", "reserved": "% 2"}
    names = {
        "torch": "torch",
        "real allocated": "allocated",
        "virtual": "virtual",
        "%": "allocated %",
        "real reserved": "reserved",
        "virtual 2": "virtual",
        "% 2": "reserved %",
        "logs: least to most": "logs: least to most",
        "torch here": "torch here",
    }
    scratch = {"real": "reserved", "virtual": "virtual", "%": "error %", "torch here": "torch here"}
    scratch["range of peak reserved"] = "range"
    padded = {"and kernels timed": "first run", "% 3": "error %"}
    llama = {
        "torch": "torch",
        "real later steps": "reserved GiB",
        "virtual 2": "virtual",
        "% 2": "error %",
        "here": "here",
    }
    kinds = [
        ("nanogpt", "one rank of eight H100s", "Training. Highest bytes in MiB.", names, both),
        (
            "speedups",
            "a GPT from scratch, A100s",
            (
                "Training. MiB reserved at the end of an epoch. `first run`: odd products are "
                "padded, and what a GPU's first run allocates to time kernels is counted."
            ),
            {**scratch, **padded},
            {"reserved": "%", "reserved, first run": "% 3"},
        ),
        (
            "titan",
            "Llama 3 8B, one rank of 8 to 128",
            "Training. Highest GiB reserved after the first step.",
            llama,
            {"reserved": "% 2"},
        ),
    ]
    for name, title, note, heads, errors in kinds:
        [rows] = tables(f"published_{name}")
        for words, chosen in seen_and_unseen(rows):
            if chosen:
                yield group(f"Compiled, {title}, {words}", note, chosen, heads, errors)


def workspaces() -> Iterator[Group]:
    """Yield the rows of measured_workspaces.txt that asked the row's own cuDNN."""
    [rows] = tables("measured_workspaces")
    own = [row for row in rows if row["cuDNN"] == row["asked"]]
    heads = ["GPU", "cuDNN", "measured", "within", "virtual", "difference"]
    note = (
        "Bytes of one convolution, computed by the same version of cuDNN. `within` is the rounding "
        "of the published figure. For rows of cuDNN 9.5.1 another version computed the workspaces: "
        "[measured_workspaces.txt](../../benchmarks/results/measured_workspaces.txt)."
    )
    yield group("Workspaces of convolutions", note, own, heads)


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
        *compiled(),
        *workspaces(),
    ]
    return "\n".join([HEAD, *(line for group in groups for line in group.lines()), FOOT])


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
