"""Peaks of the two networks of a speaker diarization, measured on two GPUs, beside ours.

    python -m benchmarks.published speech --python 2.8=PYTHON --python 2.11=PYTHON

Both interpreters need pyannote.audio 4.0.4, one with torch and torchaudio 2.8.0, the other with
2.11.0. The networks are the library's own, with random weights; the loops around them are rewritten
from the source of each row. As in the source, a card's rows run in one process.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
from typing import TYPE_CHECKING

from benchmarks.harness import MIB, line, read, spreads, table
from benchmarks.published.runner import looked, unseen
from pytest_gpumem.devices.cards import CARDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from benchmarks.published.runner import Answers, Process, Row
    from pytest_gpumem.devices.cards import Card

SAMPLES, FRAMES = 160_000, 589
"""samples of a chunk (10 s at 16 kHz), and frames that the segmentation returns for it"""
SEGMENTED = 32
"""number of chunks in a batch of the segmentation"""
SPEAKERS = 3
"""number of speakers in a chunk, each with a mask and an embedding"""
BATCHES = (1, 4, 8, 16, 32, 64, 128)
"""batch sizes of the embeddings in runs without a limit"""
LIMITS, LIMITED = (4, 8), (64, 128, 192, 256)
"""GB and batch sizes of the runs with a limit"""
RECORDING = 3751 * 16_000
"""number of samples of the recording on the A5000"""
TOTALS = {"RTX A6000": 48538 * MIB, "RTX A5000": 24115 * MIB}
"""memory by card: from the process's messages (47.40 GiB); 24564 MiB less the same difference"""
TITLE = "Peaks in MiB of speaker diarization with pyannote.audio"
Peak = tuple[float, float]


def rows() -> list[Row]:
    """Return the rows, in the order of the file."""
    return [row | {"row": named(row)} for row in read("speech-peaks.csv")]


def named(row: Row) -> str:
    """Return a row's name."""
    if row["card"] == "RTX A5000":
        return f"{row['stage']} x{row['batch']} A5000"
    limit = f" within {row['within_gb']} GB" if row["within_gb"] else ""
    return f"{row['stage']} x{row['batch']} {row['dtype']}{limit}"


def group(row: Row) -> str:
    """Return the row's process: one per card, with a limit and without."""
    return f"{row['card']}{' with a limit' if row['within_gb'] else ''}"


def card(row: Row) -> Card:
    """Return the row's card, with the memory that its source names."""
    a6000 = dataclasses.replace(CARDS["RTX A6000"], total_memory=TOTALS[row["card"]])
    if row["card"] == "RTX A6000":
        return a6000
    return dataclasses.replace(a6000, sm_count=64)  # the same chip with fewer multiprocessors


def steps(process: Process) -> Iterator[tuple[str, Peak]]:
    """Run the rows of a process; yield their peaks."""
    import pyannote.audio.models.embedding
    import pyannote.audio.models.segmentation  # noqa: F401 - a first import keeps its callers
    import torch

    torch.cuda.init()
    first = process.rows[0]
    run_all = limited_rows if first["within_gb"] else fork_rows
    yield from (stock_rows if first["card"] == "RTX A5000" else run_all)(process.rows)


def networks() -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return the networks of segmentation and embedding; like the library, disable TF32."""
    import torch
    from pyannote.audio.core.task import Problem, Resolution, Specifications
    from pyannote.audio.models.embedding import WeSpeakerResNet34
    from pyannote.audio.models.segmentation import PyanNet

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    segmentation = PyanNet(lstm={"num_layers": 4})
    segmentation.specifications = Specifications(
        problem=Problem.MONO_LABEL_CLASSIFICATION,
        resolution=Resolution.FRAME,
        duration=10.0,
        classes=[f"speaker {number}" for number in range(SPEAKERS)],
        powerset_max_classes=2,
        permutation_invariant=True,
    )
    segmentation.build()
    return segmentation.eval().cuda(), WeSpeakerResNet34().eval().cuda()


def peak(start: int) -> Peak:
    """Return the peaks in MiB, allocated above ``start`` and reserved; reset them."""
    import torch

    most = torch.cuda.max_memory_allocated() - start
    torch.cuda.reset_peak_memory_stats()
    return most / MIB, torch.cuda.memory_reserved() / MIB


def fork_rows(these: list[Row]) -> Iterator[tuple[str, Peak]]:
    """Run the rows of the library's fork that prefetches batches, in the source's order."""
    names = {row["row"] for row in these}
    for batch, dtype in itertools.product(BATCHES, ("float32", "float16")):
        segmented, embedded = run(batch, dtype)
        for name, found in (
            (f"segmentation x{SEGMENTED} {dtype}", segmented),
            (f"embeddings x{batch} {dtype}", embedded),
        ):
            if name in names:
                names.discard(name)
                yield name, found


def limited_rows(these: list[Row]) -> Iterator[tuple[str, Peak]]:
    """Run the fork's rows with a limit: all runs of the source's process, in its order.

    PyTorch caches the plan of a convolution that ran: if the first plan's workspace did not fit in
    4 GB, the next plan is also used with 8 GB.
    """
    import torch

    names = {row["row"] for row in these}
    for within, batch, dtype in itertools.product(LIMITS, LIMITED, ("float32", "float16")):
        torch.cuda.set_per_process_memory_fraction(within / 48, 0)
        found = [run(batch, dtype)[1] for _ in range(2)]
        name = f"embeddings x{batch} {dtype} within {within} GB"
        if name in names:
            yield name, found[1]


def run(batch: int, dtype: str) -> tuple[Peak, Peak]:
    """Return the peaks of segmentation and embeddings; infinite if out of memory."""
    import torch

    half = dtype == "float16"
    segmentation, embedding = networks()
    with torch.autocast("cuda", torch.float16, enabled=half):
        segmented = segment(segmentation)
    torch.cuda.empty_cache()
    try:
        with torch.autocast("cuda", torch.float16, enabled=half):
            embedded = embed_ahead(embedding, batch)
    except torch.OutOfMemoryError:
        embedded = math.inf, math.inf
    del segmentation, embedding
    gc.collect()
    torch.cuda.empty_cache()
    return segmented, embedded


def segment(network: torch.nn.Module) -> Peak:
    """Segment three batches; the third's peak counts."""
    import torch
    from pyannote.audio.utils.powerset import Powerset

    conversion = Powerset(SPEAKERS, 2).cuda()
    found = 0.0, 0.0
    for _ in range(3):
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.inference_mode():
            chunks = torch.zeros(SEGMENTED, 1, SAMPLES).pin_memory()
            outputs = network(chunks.to("cuda", non_blocking=True))
            conversion(outputs).cpu()
        del outputs
        found = peak(start)
    return found


def smallest(network: torch.nn.Module) -> None:
    """Search for the shortest sound that has an embedding, as the library does at first."""
    import torch

    low, high = 2, 8000
    with torch.inference_mode():
        while low + 1 < high:
            middle = (low + high) // 2
            try:
                network(torch.randn(1, 1, middle).cuda())
            except Exception:  # noqa: BLE001 - too short for one of many reasons, as there
                low = middle
            else:
                high = middle


def embed_ahead(network: torch.nn.Module, batch: int) -> Peak:
    """Embed five batches; transfer each one on another stream while the one before is computed."""
    import torch
    from torch.nn import functional

    smallest(network)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    count, start = 5, torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ahead = torch.cuda.Stream()

    def transferred() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.cuda.stream(ahead):
            waveforms = torch.zeros(batch, 1, SAMPLES).pin_memory().to("cuda", non_blocking=True)
            return waveforms, torch.ones(batch, FRAMES).pin_memory().to("cuda", non_blocking=True)

    coming = transferred()
    for number in range(count):
        torch.cuda.current_stream().wait_stream(ahead)
        waveforms, masks = coming
        if number + 1 < count:
            coming = transferred()
        with torch.inference_mode():
            features = network.compute_fbank(waveforms)
            weights = functional.interpolate(
                masks.unsqueeze(1), size=features.shape[1], mode="nearest"
            ).squeeze(1)
            weights = (weights > 0.5).float()
            _, embedding = network.resnet(features, weights=weights)
        embedding.cpu()
        del features, weights, waveforms, masks
    return peak(start)


def stock_rows(these: list[Row]) -> Iterator[tuple[str, Peak]]:
    """Run the rows of the unmodified library: the batches of 32, then the last one."""
    import torch

    segmentation, network = networks()
    recording = torch.zeros(1, RECORDING, device="cuda")
    speakers = itertools.count()
    for row in sorted(these, key=lambda row: -int(row["batch"])):
        batch = int(row["batch"])
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3 if batch == SEGMENTED else 1):
            # The chunk's samples are copied once for all of its speakers.
            turns = [next(speakers) // SPEAKERS for _ in range(batch)]
            chunks = {turn: recording[:, :SAMPLES].clone() for turn in turns}
            waveforms = torch.vstack([chunks[turn][None] for turn in turns])
            with torch.inference_mode():
                embeddings = network(waveforms, weights=torch.ones(batch, FRAMES).cuda())
            embeddings.cpu()
            del chunks, waveforms, embeddings
        yield row["row"], peak(0)
    del segmentation  # the pipeline holds it until here


def report(answers: Answers) -> str:
    """Return the table and its summaries."""
    lines: list[list[str]] = []
    groups: dict[str, list[float]] = {}
    full: list[bool] = []
    for row in answers.rows:
        mine = answers.figures[""][row["row"]]
        if not row["allocated_mib"]:
            full.append(mine[0] == math.inf)
            shown = ["full" if full[-1] else f"{value:.2f}" for value in mine]
            cells = ["full", shown[0], "full", shown[1], "", "", ""]
            lines.append([row["row"], row["card"], *cells])
            continue
        real = float(row["allocated_mib"]), float(row["reserved_mib"] or math.nan)
        errors = [100 * (here / there - 1) for here, there in zip(mine, real, strict=True)]
        for kind, error in zip(("allocated", "reserved"), errors, strict=True):
            if not math.isnan(error):
                groups.setdefault(f"{looked(row)}, {kind}", []).append(error)
        cells = [f"{value:.2f}" for pair in zip(real, mine, strict=True) for value in pair]
        cells += [*[f"{error:+.2f}" for error in errors], unseen(row)]
        lines.append([row["row"], row["card"], *cells])
    heads = ["step", "card", "allocated", "virtual", "reserved", "virtual", "allocated %"]
    heads += ["reserved %", "never looked at"]
    versions = {row["card"]: answers.versions[row["row"]] for row in answers.rows}
    here = "; ".join(": ".join(pair) for pair in versions.items())
    text = [TITLE, line(), f"here: {here}", "", table(lines, heads), ""]
    text.append(f"memory full there: {len(full)} rows, here too: {sum(full)}")
    return "\n".join([*text, *spreads(groups)])
