r"""Start-ups of vLLM's server on real GPUs, by their logs, beside the virtual GPU's.

    python -m benchmarks.published servers --python 0.17.1=PYTHON --python 0.19.0=PYTHON

Each interpreter has the vLLM of its rows, and pytest-gpumem. data/README.md explains rows, and
data/servers/README.md the models' configurations. Each row runs eagerly, which is fastest. Some
also run compiled, as on the real GPU, without CUDA graphs or with them (minutes each).
DeepSeek-V2-Lite compiles a kernel of FlashInfer: it needs nvcc, and CUDA's runtime to link.
With ``--keep FILE``, the logs of all starts stay in a folder beside it.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import DATA, GIB, OFFLINE, ROOT, commit, line, read, table
from benchmarks.published.runner import chosen_of
from pytest_gpumem.devices.cards import CARDS, card_file_text

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from benchmarks.published.runner import Row

Figures = dict[str, Any]
"""what a start took in GiB, its number of tokens, its result"""

EAGER, COMPILED, GRAPHS = "eager", "compiled", "with graphs"
OPTIONS = {
    EAGER: ["--enforce-eager"],
    COMPILED: ["--compilation-config", '{"cudagraph_mode": "NONE"}'],
    GRAPHS: [],
}
"""by mode, each nearer to the real start than the one before: vLLM's options"""
MORE = {
    COMPILED: (
        "A4 Llama-3.1-8B, float32",
        "A7 Llama-3.1-8B, PP2",
        "A12 CodeLlama-7b",
        "A14 granite-3.1-8b",
        "A33 Llama-3.1-8B, PP4",
    ),
    GRAPHS: (
        "A1 Llama-3.1-8B",
        "A29 gpt-oss-20b",
        "A30 gpt-oss-20b, TP2",
        "B1 Llama-3.1-8B",
        "B8 Qwen2.5-7B, 0.65",
        "D2 Qwen3-8B",
    ),
}
"""by mode: the rows that also run in it"""
WARM = ("vllm-offload-profiles", "tokenkaki")
"""sources whose starts found their code compiled by an earlier start"""
SECONDS = 1200
"""time limit of a start"""
CLOSE = 0.1
"""GiB to the limit below which a real start is accidental"""
NAMES = {
    "weights": "weights",
    "activations": "activations",
    "outside": "outside",
    "cache": "cache",
    "graphs_estimated": "graphs",
    "graphs_taken": "graphs_taken",
}
"""by figure: its name in the report"""
STARTS, TOO_CLOSE, REFUSED = "starts", "too close to tell", "refused"


def rows() -> list[Row]:
    """Return the rows, in the order of the file."""
    return read("server-starts.csv")


def real(row: Row) -> Figures:
    """Return what a row's log says."""
    named = {name.removesuffix("_gib"): cell for name, cell in row.items()}
    figures = {name: float(named[name]) for name in (*NAMES, "tokens") if named[name]}
    return {**figures, "result": row["result"]}


def figures_of(path: Path) -> Figures:
    """Return what a report says of a start; of several workers, of the first."""
    if not path.exists():
        return {"result": "failed"}
    results = json.loads(path.read_text(encoding="utf-8"))["results"]
    measured = [result for result in results if result["measurement"]]
    started = [result for result in measured if result["measurement"]["servers"]]
    if not started:
        return {"result": "failed"}
    (result,) = started
    start = result["measurement"]["servers"][0]
    figures: Figures = {
        name: start[field] / GIB for name, field in NAMES.items() if start[field] is not None
    }
    least, most = ((start["cache"] - nbytes) / GIB for nbytes in start["unseen"])
    figures |= {"tokens": start["tokens"], "least": most, "most": least}
    if start["free"] is not None:
        figures |= {"free": start["free"] / GIB, "captured": start["captured"]}
    said = STARTS
    if result["verdict"]["kind"] == "no start":
        said = TOO_CLOSE if "too close" in result["verdict"]["headline"] else REFUSED
    return {**figures, "result": said}


def folder(row: Row) -> Path:
    """Return the folder of a row's model."""
    return DATA / "servers" / row["model"]


def option(row: Row, name: str, default: str) -> str:
    """Return an option's value among a row's arguments."""
    words = shlex.split(row["arguments"])
    return words[words.index(name) + 1] if name in words else default


def devices(row: Row) -> int:
    """Return the number of GPUs of a row."""
    names = "--tensor-parallel-size", "--pipeline-parallel-size"
    tensor, pipeline = (int(option(row, name, "1")) for name in names)
    return tensor * pipeline


def margin(row: Row) -> float:
    """Return by how many GiB a real start missed the limit (negative), or was within it.

    For a start: the cache without the part that one request of the greatest length needs; NaN if
    the source has no figure for it.
    """
    if row["margin_gib"]:
        return float(row["margin_gib"])
    if not row["tokens"]:
        return math.nan  # the source has no more
    config = json.loads((folder(row) / "config.json").read_text(encoding="utf-8"))
    length = int(option(row, "--max-model-len", str(config["max_position_embeddings"])))
    return float(row["cache_gib"]) * (1 - length / float(row["tokens"]))


def verdict(row: Row, ours: Figures) -> str:
    """Return whether the virtual GPU's answer is the real GPU's."""
    if ours["result"] == TOO_CLOSE:
        return "too close"
    right = (ours["result"] == STARTS) == (row["result"] == STARTS)
    if right or abs(margin(row)) > CLOSE:
        return "right" if right else "wrong"
    return "too close"


# -- the starts --


def start(row: Row, mode: str, python: str, log: Path) -> Figures:
    """Start a row's server on the virtual GPU; return its figures."""
    with tempfile.TemporaryDirectory() as place:
        card = row["card"]
        if row["total_gib"]:  # a card of this kind, with the memory that the log tells
            names = ("device_name", "capability", "sm_count", "context")
            fields = {name: getattr(CARDS[card], name) for name in names}
            fields["total_memory"] = round(float(row["total_gib"]) * GIB)
            path = Path(place, "card-of-the-log.toml")
            path.write_text(card_file_text(fields), encoding="utf-8")
            card = str(path)
        command = [python, "-m", "pytest_gpumem", "run", "--card", card, "--values", "off"]
        report = Path(place, "report.json")
        command += ["--devices", str(devices(row)), "--until-started", f"--json={report}"]
        command += [str(Path(__file__).with_name("serve.py"))]
        command += ["--model", str(folder(row)), "--load-format", "dummy"]
        command += ["--skip-tokenizer-init", *shlex.split(row["arguments"])]
        command += OPTIONS[mode]
        variables = {
            **OFFLINE,
            "PYTHONPATH": str(ROOT),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": place,
            # Inductor's and Triton's caches are not in it: layers of one shape in two rows' models
            # would be compiled in the first row alone, and compiling takes memory.
            "TORCHINDUCTOR_CACHE_DIR": f"{place}/inductor",
            "TRITON_CACHE_DIR": f"{place}/triton",
        }
        for _ in range(2 if mode != EAGER and row["source"] in WARM else 1):
            if not ended(command, variables, log):
                return {"result": "took too long"}
        return figures_of(report)


def ended(command: list[str], variables: dict[str, str], log: Path) -> bool:
    """Run a command, with its output in a file; return whether it ended in time."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            start_new_session=True,
        )
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it, and workers that outlived it
            process.wait()
    return True


def modes(row: Row) -> list[str]:
    """Return how a row runs."""
    return [EAGER, *(mode for mode, names in MORE.items() if row["row"] in names)]


def main(options: argparse.Namespace) -> str:
    """Start the chosen rows; return the report."""
    chosen = [row for row in rows() if options.only in row["row"]]
    kept: dict[str, Figures] = {}
    if options.keep and Path(options.keep).exists():
        kept = json.loads(Path(options.keep).read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as place:
        logs = Path(options.keep).with_suffix("") if options.keep else Path(place)
        for mode in OPTIONS:
            for row in chosen:
                key = f"{row['row']}: {mode}"
                if mode not in modes(row) or key in kept or options.kept:
                    continue
                python = chosen_of(options.python, row["here"], sys.executable)
                began = time.monotonic()
                name = re.sub(r"\W+", "-", key)
                kept[key] = start(row, mode, python, logs / f"{name}.log")
                kept[key] |= {"seconds": round(time.monotonic() - began), "commit": commit()}
                print(key, kept[key], file=sys.stderr, flush=True)
                if options.keep:
                    Path(options.keep).write_text(json.dumps(kept, indent=1), encoding="utf-8")
    return report(chosen, kept)


# -- the report --


def cell(figures: Figures, name: str, digits: int = 2) -> str:
    """Return a figure's cell."""
    return f"{figures[name]:.{digits}f}" if name in figures else ""


def both(ours: Figures, theirs: Figures, name: str) -> str:
    """Return the real figure, and the virtual GPU's."""
    return f"{cell(theirs, name) or 'unknown'}, virtual {cell(ours, name) or 'none'}"


def report(chosen: list[Row], kept: dict[str, Figures]) -> str:
    """Return the table and its summaries."""
    ran = {row["row"]: [it for it in OPTIONS if f"{row['row']}: {it}" in kept] for row in chosen}
    answered = [row for row in chosen if ran[row["row"]]]
    found = {name: kept[f"{name}: {how[-1]}"] for name, how in ran.items() if how}
    lines = []
    for row in answered:
        name = row["row"]
        ours, theirs = found[name], real(row)
        cells = [name, row["card"], str(devices(row)), row["vllm"], row["here"], ran[name][-1]]
        for figure in ("weights", "activations", "cache"):
            cells += [cell(theirs, figure), cell(ours, figure)]
        off = difference(ours, theirs)
        spread = f"{ours['least']:.2f} to {ours['most']:.2f}" if "least" in ours else ""
        cells += [spread, "" if off is None else f"{off:+.2f}", cell(theirs, "outside")]
        cells += [cell(theirs, "tokens", 0), cell(ours, "tokens", 0)]
        cells += [row["result"], ours["result"], f"{margin(row):+.2f}", verdict(row, ours)]
        lines.append(cells)
    heads = ["start-up", "card", "GPUs", "vLLM", "vLLM here", "ran", "weights", "virtual"]
    heads += ["activations", "virtual", "KV cache", "virtual", "range", "off", "outside torch"]
    heads += ["tokens", "virtual", "GPU", "virtual", "margin", "verdict"]
    commits = sorted({it["commit"] for it in kept.values()})
    versions = sorted({row["here"] for row in answered})
    text = ["Start-ups of vLLM's server, in GiB of each GPU, by their logs"]
    text += [line(), f"commits: {', '.join(commits)}; here: vLLM {', '.join(versions)}", ""]
    text += [table(lines, heads, "ll"), "", *summaries(answered, found), ""]
    text += ["Rows that ran in several modes:", *by_mode(answered, kept, ran)]
    if missing := [row["row"] for row in chosen if row not in answered]:
        text += ["", f"not run: {'; '.join(missing)}"]
    return "\n".join(text)


def difference(ours: Figures, theirs: Figures) -> float | None:
    """Return the real cache less the virtual GPU's, in GiB."""
    if "cache" in ours and "cache" in theirs:
        return float(theirs["cache"] - ours["cache"])
    return None


def summaries(answered: list[Row], found: dict[str, Figures]) -> list[str]:
    """Return lines on the verdicts, on figures that differ, and on the cache."""
    said = [verdict(row, found[row["row"]]) for row in answered]
    text = [f"{word}: {said.count(word)} of {len(said)}" for word in dict.fromkeys(said)]
    refused = [row for row in answered if row["result"] != "starts"]
    too = [row["row"] for row in refused if found[row["row"]]["result"] == REFUSED]
    text.append(f"refused on the GPU: {len(refused)}; here too: {len(too)} ({'; '.join(too)})")
    for name in ("weights", "activations"):
        off, count = [], 0
        for row in answered:
            ours, theirs = found[row["row"]], real(row)
            if name in ours and name in theirs:
                count += 1
                # Both are printed with two digits.
                error = max(abs(ours[name] - theirs[name]) - 0.01, 0) / theirs[name]
                off += [f"{row['row']} ({both(ours, theirs, name)})"] if error > 0.01 else []
        text.append(f"{name}: {count} rows; more than 1 % off: {'; '.join(off) or 'none'}")
    inside = [
        ours["least"] - 0.01 <= theirs["cache"] <= ours["most"] + 0.01
        for row in answered
        if "least" in (ours := found[row["row"]]) and "cache" in (theirs := real(row))
    ]
    text.append(f"KV cache within the range: {sum(inside)} of {len(inside)}")
    promised = [
        row["row"]
        for row in refused
        if found[row["row"]]["result"] == STARTS and verdict(row, found[row["row"]]) != "too close"
    ]
    text.append(f"refused on the GPU, and promised here: {'; '.join(promised) or 'none'}")
    seconds = [ours["seconds"] for ours in found.values()]
    middle = statistics.median(seconds)
    text.append(f"seconds of a start: {min(seconds)} to {max(seconds)}, median {middle:.0f}")
    groups: dict[str, list[float]] = {}
    for row in answered:
        off_cache = difference(found[row["row"]], real(row))
        if off_cache is not None:
            several = f", {devices(row)} GPUs" if devices(row) > 1 else ""
            groups.setdefault(f"{row['card']}, vLLM {row['vllm']}{several}", []).append(off_cache)
    for group, values in groups.items():
        text.append(
            f"KV cache, real less virtual, {group}: {len(values)} rows, "
            f"{min(values):+.2f} to {max(values):+.2f}, median {statistics.median(values):+.2f}"
        )
    return text


def by_mode(
    answered: list[Row], kept: dict[str, Figures], ran: dict[str, list[str]]
) -> Iterator[str]:
    """Yield a line for each mode of rows that ran in several."""
    names = {"activations": "activations", "cache": "KV cache"}
    names |= {"graphs_estimated": "graphs estimated", "graphs_taken": "graphs"}
    for row in answered:
        theirs = real(row)
        for mode in ran[row["row"]] if len(ran[row["row"]]) > 1 else ():
            ours = kept[f"{row['row']}: {mode}"]
            figures = [
                f"{words} {both(ours, theirs, name)}"
                for name, words in names.items()
                if name in ours
            ]
            yield f"    {row['row']}, {mode}: {'; '.join(figures)}; {ours['result']}"
