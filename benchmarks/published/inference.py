r"""Language models that write text, with a cache of keys and values and without, by their source.

    python -m benchmarks.published inference --source LLMs-from-scratch \
        --python 2.8=PYTHON --python 2.9=PYTHON

The source is a clone of rasbt/LLMs-from-scratch; data/README.md says what it leaves open. Each row
runs its notebook's own classes and loop, at the row's commit, without downloading weights.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import GIB, line, read, spreads, table
from benchmarks.published.runner import looked, unseen
from pytest_gpumem.devices.cards import CARDS

if TYPE_CHECKING:
    import torch

    from benchmarks.published.runner import Answers, Process, Row
    from pytest_gpumem.devices.cards import Card

STAND_INS = {"GB10": "RTX 5090", "": "H100"}
"""by the source's card: the card used here; "" is for rows that name none"""
IMPORTS = ("torch", "math", "qwen3_5_transformers")
LAST = 10
"""number of steps to run in a loop without a cache"""
DIGIT = 0.005
"""GiB by which a figure may have been rounded"""
TITLE = "Peak allocated in GiB while text is written in bfloat16, by its source to two digits"


def rows() -> list[Row]:
    """Return the rows, in the order of the file."""
    return read("inference-peaks.csv")


def card(row: Row) -> Card:
    """Return the card that stands for the row's."""
    return CARDS[STAND_INS[row["card"]]]


def folders(row: Row) -> list[str]:
    """Return the folder of the row's notebook."""
    return [str(Path(row["notebook"]).parent)]


def wanted(node: ast.stmt) -> bool:
    """Return whether a statement of a notebook is needed for its model or its loop."""
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
    """Run a notebook's definitions; return them by name, with the model's expression as MAKE."""
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


def step(row: Row, process: Process) -> float:
    """Run a row; return its peak in GiB."""
    import torch

    torch.cuda.init()
    process.device.values.compute("auto")
    keep_values_unset()
    path = process.source / row["notebook"]
    sys.path.insert(0, str(path.parent))
    space = notebook(path)
    kept = []
    for _ in range(int(row["models"])):
        model = eval(space["MAKE"], space).cuda()  # noqa: S307 - the source's own expression
        if row["tied"] == "1":
            # The notebook displays its first call's result, which keeps this weight alive.
            kept.append(model.out_head.weight)
            model.out_head.weight = model.tok_emb.weight
        kept.append(model)
    peak = 0
    for key in ("", "second_"):
        if row[f"{key}prompt_tokens"]:
            counts = int(row[f"{key}prompt_tokens"]), int(row[f"{key}new_tokens"])
            peak = written(space, model, *counts)
    return peak / GIB


def keep_values_unset() -> None:
    """Disable weight initialization: the values do not matter, and take minutes on a CPU."""
    from torch.nn import init

    for name in dir(init):
        if name.endswith("_") and not name.startswith("_"):
            setattr(init, name, lambda tensor, *_, **__: tensor)


def written(space: dict[str, Any], model: torch.nn.Module, prompt: int, count: int) -> int:
    """Return the peak while ``count`` tokens are written after ``prompt`` tokens."""
    import torch

    loop = space["generate_text_basic_stream"]
    if "cache" not in loop.__code__.co_varnames:
        # Without a cache each step computes all tokens again: the longest step has the peak.
        prompt, count = prompt + count - LAST, LAST
    ids = torch.zeros(1, prompt, dtype=torch.long).cuda()
    torch.cuda.reset_peak_memory_stats()
    for token in loop(model=model, token_ids=ids, max_new_tokens=count, eos_token_id=None):
        token.squeeze(0).tolist()
    return torch.cuda.max_memory_allocated()


def report(answers: Answers) -> str:
    """Return the table and its summaries."""
    lines: list[list[str]] = []
    groups: dict[str, list[float]] = {}
    inside = 0
    for row in answers.rows:
        peak, real = answers.figures[""][row["row"]], float(row["gib"])
        error = 100 * (peak / real - 1)
        rounded = abs(peak - real) <= DIGIT
        inside += rounded
        groups.setdefault(looked(row), []).append(error)
        cells = [row["row"], row["torch"], row["card"] or "not said", row["gib"], f"{peak:.4f}"]
        torch = answers.torch(row)
        cells += [f"{error:+.2f}", "yes" if rounded else "", unseen(row)]
        lines.append([*cells, f"{torch} as {card(row).name}"])
    heads = ["written text", "torch", "GPU", "real GiB", "virtual", "%"]
    heads += ["within its last digit", "never looked at", "torch and card here"]
    text = [TITLE, line(), "", table(lines, heads), "", *spreads(groups)]
    text.append(f"{inside} of {len(lines)} are within the rounding of their last digit")
    return "\n".join(text)
