"""Language models that write text, with a cache of keys and values and without, by their source.

    python benchmarks/published_inference.py --source LLMs-from-scratch \
        --python 2.8=/path/to/python --python 2.9=/path/to/python [--unseen]

The rows are those of data/inference-peaks.csv (data/README.md says where they are from, and what
their source leaves open). The source is a clone of rasbt/LLMs-from-scratch: each row drives its
notebook's own classes and its own loop, at the row's commit, with weights that nobody downloads.
Each row has its own process, and runs with the torch of its minor version.
"""

from __future__ import annotations

import argparse
import ast
import csv
import io
import json
import statistics
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from provenance import ROOT, line, publish
from tabulate import tabulate
from workers import ask_worker

if TYPE_CHECKING:
    import torch

DATA = ROOT / "benchmarks" / "data" / "inference-peaks.csv"
CARDS = {"GB10": "RTX 5090", "": "H100"}
"""the card that stands for the source's; of a row without one, as the rows looked at have it"""
IMPORTS = ("torch", "math", "qwen3_5_transformers")
GIB = 2**30
LAST = 10
"""steps that are run of a loop without a cache"""
DIGIT = 0.005
"""GiB by which a figure may have been rounded"""
TITLE = "Peak allocated in GiB while text is written in bfloat16, by its source to two digits"


def wanted(node: ast.stmt) -> bool:
    """Return whether a statement of a notebook makes its model or its loop."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        module = getattr(node, "module", None) or node.names[0].name
        return module.partition(".")[0] in IMPORTS
    if isinstance(node, ast.If):
        return all(wanted(inner) for inner in node.body)
    if isinstance(node, ast.Assign):
        return all(isinstance(name, ast.Name) and name.id.isupper() for name in node.targets)
    if isinstance(node, ast.ClassDef):
        return "Tokenizer" not in node.name
    return isinstance(node, ast.FunctionDef)


def notebook(path: Path) -> dict[str, Any]:
    """Return what a notebook defines: its model's class and configuration, its loop."""
    space: dict[str, Any] = {"__name__": "notebook"}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] != "code" or "okenizer(" in text or text.startswith(("!", "%")):
            continue
        for node in ast.parse(text).body:
            makes_model = (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Call)
                and ast.unparse(node.targets[0]) == "model"
            )
            if makes_model:
                space["MAKE"] = ast.unparse(node.value)
            elif wanted(node):
                code = compile(ast.Module([node], []), str(path), "exec")
                exec(code, space)  # noqa: S102 - the user's own clone of the source
    return space


def work(row: dict[str, str], folder: Path) -> None:
    """Run a row here; print its peak, and the versions."""
    from pytest_gpumem.devices.cards import CARDS as ALL
    from pytest_gpumem.devices.virtual.device import VirtualDevice

    card = ALL[CARDS[row["card"]]]
    device = VirtualDevice.load(card)
    device.open(card, 1)
    import torch

    torch.cuda.init()
    device.values.compute("auto")
    keep_values_unset()
    path = folder / row["notebook"]
    sys.path.insert(0, str(path.parent))
    space = notebook(path)
    kept = []
    for _ in range(int(row["models"])):
        model = eval(space["MAKE"], space).cuda()  # noqa: S307 - the source's own expression
        if row["tied"] == "1":
            # The notebook's first call of the model, whose result it shows, keeps the first weight.
            kept.append(model.out_head.weight)
            model.out_head.weight = model.tok_emb.weight
        kept.append(model)
    peak = 0
    for key in ("", "second_"):
        if row[f"{key}prompt_tokens"]:
            counts = int(row[f"{key}prompt_tokens"]), int(row[f"{key}new_tokens"])
            peak = written(space, model, *counts)
    if unsupported := sorted(device.library.unsupported()):
        raise SystemExit(f"not supported: {', '.join(unsupported)}")
    print(json.dumps([peak / GIB, f"{torch.__version__.partition('+')[0]} as {card.name}"]))


def keep_values_unset() -> None:
    """Let no model draw its first values: they decide nothing, and take minutes on a CPU."""
    from torch.nn import init

    for name in dir(init):
        if name.endswith("_") and not name.startswith("_"):
            setattr(init, name, lambda tensor, *_, **__: tensor)


def written(space: dict[str, Any], model: torch.nn.Module, prompt: int, count: int) -> int:
    """Return the peak while a prompt of so many tokens is followed by so many."""
    import torch

    loop = space["generate_text_basic_stream"]
    if "cache" not in loop.__code__.co_varnames:
        # Without a cache each step is a call of its own, and the longest has the peak.
        prompt, count = prompt + count - LAST, LAST
    ids = torch.zeros(1, prompt, dtype=torch.long).cuda()
    torch.cuda.reset_peak_memory_stats()
    for token in loop(model=model, token_ids=ids, max_new_tokens=count, eos_token_id=None):
        token.squeeze(0).tolist()
    return torch.cuda.max_memory_allocated()


def rows() -> list[dict[str, str]]:
    """Return the rows, in the order of the file."""
    with DATA.open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def ask(python: str, source: str, row: dict[str, str]) -> tuple[float, str]:
    """Return the peak that a worker found in GiB, and its version and card."""
    folder = str(Path(row["notebook"]).parent)
    archive = subprocess.run(
        ["git", "-C", source, "archive", row["commit"], folder], stdout=subprocess.PIPE, check=True
    )
    with tempfile.TemporaryDirectory() as checkout:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(checkout, filter="data")
        words = ["--worker", json.dumps(row), "--source", checkout]
        peak, version = ask_worker(python, __file__, *words)
    return peak, version


def report(results: list[tuple[dict[str, str], float, str]]) -> str:
    """Return the table and its summaries."""
    table, groups, inside = [], {}, 0
    for row, peak, version in results:
        real = float(row["gib"])
        error = 100 * (peak / real - 1)
        unseen = row["unseen"] == "1"
        rounded = abs(peak - real) <= DIGIT
        inside += rounded
        groups.setdefault("never looked at" if unseen else "looked at", []).append(abs(error))
        card = row["card"] or "not said"
        cells = [row["row"], row["torch"], card, row["gib"], f"{peak:.4f}", f"{error:+.2f}"]
        table.append([*cells, "yes" if rounded else "", "yes" if unseen else "", version])
    heads = ["written text", "torch", "GPU", "real GiB", "virtual", "%"]
    heads += ["within its last digit", "never looked at", "torch and card here"]
    text = [TITLE, line(), "", tabulate(table, heads, disable_numparse=True), ""]
    for key, errors in sorted(groups.items()):
        middle, most = statistics.median(errors), max(errors)
        text.append(f"{key}: {len(errors)} rows, median {middle:.2f} %, worst {most:.2f} %")
    text.append(f"{inside} of {len(table)} are within the rounding of their last digit")
    return "\n".join(text)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker")
    parser.add_argument("--source", required=True)
    parser.add_argument("--python", action="append", default=[], metavar="VERSION=PATH")
    parser.add_argument("--unseen", action="store_true", help="run the rows kept for the end too")
    options = parser.parse_args()
    if options.worker:
        work(json.loads(options.worker), Path(options.source))
        return
    pythons = dict(pair.split("=", 1) for pair in options.python)
    results = []
    for row in rows():
        if row["unseen"] == "1" and not options.unseen:
            continue
        python = pythons[row["torch"].rpartition(".")[0]]
        results.append((row, *ask(python, options.source, row)))
        print(results[-1][0]["row"], results[-1][1:], file=sys.stderr, flush=True)
    if options.unseen:
        publish("published_inference", report(results))
    else:
        print(report(results))


if __name__ == "__main__":
    main()
