r"""Megatron-LM's golden values: bytes that its functional tests allocate on eight H100s.

    python -m benchmarks.published megatron --source Megatron-LM=CLONE --python 2.9=PYTHON

The clone is of NVIDIA/Megatron-LM; data/README.md says what the interpreter has. A test's program
runs unmodified under ``gpumem run``, with the test's arguments, on made-up tokens: as rank 0 of 8,
and, if that needs no data of other ranks, as rank 7, which logs the memory to TensorBoard in the
test. Without apex, the program runs with options that do not need apex's kernels.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import MIB, ROOT, line, percent, read, spread, table
from benchmarks.published.runner import looked, missing
from pytest_gpumem.devices.cards import CARDS

if TYPE_CHECKING:
    from benchmarks.published.runner import Answers, Process, Row
    from pytest_gpumem.devices.cards import Card

RANKS, STEPS = 8, 5
"""number of ranks of a test, and of steps here: no golden value changes after the third"""
TAGS = "mem-allocated-bytes", "mem-max-allocated-bytes"
"""names of the golden values, which TensorBoard's file has too"""
FIGURES = ("allocated", "peak_first", "peak_second", "peak")
PACKAGES = ("transformer_engine",)
WITHOUT = "without apex"
VARIANTS: dict[str, dict[str, str]] = {"": {}, WITHOUT: {}}
APEX = (
    *("apex", "fused_layer_norm_cuda", "fused_weight_gradient_mlp_cuda"),
    *("scaled_masked_softmax_cuda", "scaled_upper_triang_masked_softmax_cuda"),
)
"""modules that an installation of apex has"""
INSTEAD_OF_APEX = (
    *("--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion"),
    "--no-persist-layer-norm",
)
WORDS, MERGED_WORDS = 28_996, 50_257
"""sizes of the vocabularies of BERT large cased and of GPT-2"""
DOCUMENTS, SENTENCES, LENGTH = 30_000, 8, 130
"""made-up documents: so many that the smallest split, 9 of 100,000, has some"""
TITLE = "Bytes that Megatron-LM's functional tests allocate on one rank of eight, by golden values"


def rows() -> list[Row]:
    """Return the rows, in the order of the file."""
    return read("megatron-golden.csv")


def card(row: Row) -> Card:
    """Return the row's card."""
    return CARDS[row["card"]]


def folders(row: Row) -> list[str]:
    """Return the parts of the clone that a row needs."""
    return [*row["folders"].split(), test_folder(row)]


def source(row: Row) -> str:
    """Return the name of the clone."""
    del row
    return "Megatron-LM"


def varies(row: Row) -> bool:
    """Return whether the row also runs without apex: the first one does."""
    return row["row"] == rows()[0]["row"]


def test_folder(row: Row) -> str:
    """Return the folder of a test in the clone."""
    return f"tests/functional_tests/test_cases/{row['case']}"


# -- in the worker --


def step(row: Row, process: Process) -> list[Any]:
    """Run a test as rank 0, and as the row's rank.

    Returns:
        the figures of ``FIGURES``, as the program logs them on the row's rank (None if it does
        not), then the peak allocated of rank 0 and the range of the row's rank, as ``gpumem run``
        reports them, and the seconds of each run.
    """
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        make_data(process.source, place)
        hidden = place / "hidden"
        hidden.mkdir()
        for module in APEX if process.variant == WITHOUT else ():
            text = 'raise ImportError("left out by this benchmark")\n'
            (hidden / f"{module}.py").write_text(text, encoding="utf-8")
        measured, seconds, printed = [], [], []
        # Rank 0 compiles the data loader, and writes its index.
        for rank in dict.fromkeys((0, int(row["rank"]))):
            began = time.monotonic()
            measurement, output = run_rank(row, process, place, rank)
            seconds.append(round(time.monotonic() - began))
            measured.append(measurement)
            printed.append(output)
        ((peak,), *_) = (measurement["peaks"] for measurement in measured)
        figures = [*after_first_step(printed[0]), None, peak["allocated"]]
        if len(measured) > 1:
            figures = logged(place / "tensorboard")
        bounds = measured[-1]["range"]
        ends = [bounds[end][0]["allocated"] for end in ("least", "most")] if bounds else []
        return [*figures, peak["allocated"], ends, seconds]


def make_data(source_folder: Path, place: Path) -> None:
    """Write made-up data where the tests' arguments expect it, by Megatron-LM's own builder."""
    sys.path.insert(0, str(source_folder))
    numpy: Any = importlib.import_module("numpy")
    indexed: Any = importlib.import_module("megatron.core.datasets.indexed_dataset")
    texts = place / "text" / "the_pile"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, *(f"w{number}" for number in range(WORDS - len(special)))]
    write(texts / "t5_shard00" / "bert-large-cased-vocab.txt", "\n".join(words) + "\n")
    merged = {f"w{number}": number for number in range(MERGED_WORDS - 1)}
    merged["<|endoftext|>"] = MERGED_WORDS - 1
    write(texts / "shard00" / "bpe" / "vocab.json", json.dumps(merged))
    write(texts / "shard00" / "bpe" / "merges.txt", "#version: 0.2\nw 1\n")
    random = numpy.random.RandomState(0)
    for path in ("t5_shard00/my-t5_00_text_document", "shard00/my-gpt3_00_text_document"):
        builder = indexed.IndexedDatasetBuilder(f"{texts / path}.bin", dtype=numpy.uint16)
        shape = DOCUMENTS, SENTENCES * LENGTH
        for document in random.randint(len(special), WORDS, shape, dtype=numpy.uint16):
            builder.add_document(document, [LENGTH] * SENTENCES)
        builder.finalize(f"{texts / path}.idx")


def write(path: Path, text: str) -> None:
    """Write a file, and the folders to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def run_rank(row: Row, process: Process, place: Path, rank: int) -> tuple[dict[str, Any], str]:
    """Run a test's program as one rank; return ``gpumem run``'s measurement, and the output."""
    folders_of_test = {
        "DATA_PATH": place,
        "DATA_CACHE_PATH": place / "cache",
        "CHECKPOINT_SAVE_PATH": place / f"saved{rank}",
        "CHECKPOINT_LOAD_PATH": place / "none",
        "TENSORBOARD_PATH": place / "tensorboard",
    }
    yaml: Any = importlib.import_module("yaml")
    path = process.source / test_folder(row) / "model_config.yaml"
    text = path.read_text(encoding="utf-8")
    for name, folder in folders_of_test.items():
        text = text.replace(f"${{{name}}}", str(folder))
    config = yaml.safe_load(text)
    words, given = [row["program"]], config["MODEL_ARGS"]
    if given["--ckpt-format"] == "torch_dist":
        del given["--save"]  # it is checked that the ranks together have the whole model
    for option, value in given.items():
        words += [option] if value is True else [option, str(value)]
    # The other tokenizers are downloaded.
    words += ["--legacy-tokenizer", "--exit-interval", str(STEPS)]
    if process.variant == WITHOUT:
        words += INSTEAD_OF_APEX
    report = place / f"rank{rank}.json"
    command = [sys.executable, "-m", "pytest_gpumem", "run", "--card", row["card"]]
    command += ["--world-size", str(RANKS), "--rank", str(rank), f"--json={report}", *words]
    # The program calls make, which calls python3 and python3-config.
    programs = [Path(sys.executable).parent, Path(sys.base_prefix) / "bin", os.environ["PATH"]]
    modules = [ROOT, place / "hidden", process.source]
    done = subprocess.run(
        command,
        cwd=process.source,
        env={
            **os.environ,
            **{name: str(value) for name, value in config["ENV_VARS"].items()},
            "PATH": os.pathsep.join(map(str, programs)),
            "PYTHONPATH": os.pathsep.join(map(str, modules)),
        },
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        done.check_returncode()
    (result,) = json.loads(report.read_text(encoding="utf-8"))["results"]
    return result["measurement"], done.stdout


def after_first_step(output: str) -> list[int]:
    """Return the bytes allocated, and their peak, that rank 0 prints after its first step."""
    found = re.search(r"after 1 iterations\) .*? allocated: (\S+) \| max allocated: (\S+)", output)
    assert found is not None, "rank 0 printed no memory"
    return [int(float(mebibytes) * MIB) for mebibytes in found.groups()]  # exact: a power of two


def logged(folder: Path) -> list[int]:
    """Return the figures of ``FIGURES`` in TensorBoard's file."""
    accumulator: Any = importlib.import_module(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    # A scalar is a float of 32 bits: exact for sizes of blocks, multiples of 512, up to 8 GiB.
    allocated, peaks = ([int(event.value) for event in events.Scalars(tag)] for tag in TAGS)
    assert len(peaks) == STEPS
    assert len({*allocated}) == len({*peaks[2:]}) == 1, "the figures still change"
    return [allocated[-1], *peaks[:2], peaks[-1]]


# -- the report --


def report(answers: Answers) -> str:
    """Return the table and its summaries."""
    lines: list[list[str]] = []
    groups: dict[str, list[float]] = {}
    for row in answers.answered:
        *figures, first, ends, seconds = answers.figures[""][row["row"]]
        cells = [row["row"], row["rank"]]
        for name, figure in zip(FIGURES, figures, strict=True):
            real = int(row[name])
            known = figure is not None
            cells += [str(real), *([str(figure), f"{figure - real:+d}"] if known else ["", ""])]
        error = percent(figures[-1], int(row["peak"]))
        groups.setdefault(looked(row), []).append(error)
        *without, _, _, _ = answers.figures[WITHOUT].get(row["row"], [""] * 4)
        cells += [f"{error:+.3f}", f"{ends[0]} to {ends[1]}" if ends else "", str(first)]
        cells += [" ".join(map(str, without))]
        cells += [", ".join(map(str, seconds)), answers.commits[row["row"]]]
        lines.append(cells)
    heads = ["test", "rank"]
    for name in ("allocated", "peak of step 1", "peak of step 2", "peak"):
        heads += [name, "virtual", "off"]
    heads += ["%", "range", "rank 0's peak", f"virtual {WITHOUT}", "seconds a rank"]
    heads += ["commit"]
    text = [TITLE, line(), answers.here(), "", table(lines, heads, "lr"), ""]
    text += [f"{group}: {len(it)} rows, {spread(it, 3, 3)}" for group, it in groups.items()]
    text += missing(answers)
    return "\n".join(text)
