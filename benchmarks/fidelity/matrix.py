"""The peaks of many training steps on the virtual GPU, or whether computed values change them.

    python -m benchmarks.fidelity.matrix [--only 'gpt2-*' ...] [--but 'tv-*' ...] [--out FILE]
    python -m benchmarks.fidelity.matrix --values

Each step runs in a fork of one process that has imported torch: most of a step's time is imports.
The figures are torch.cuda's own, from its start; they go to one JSON file. With ``--values`` steps
run without values and with those of small tensors: peaks and segments are to be the same, to the
byte. Those of mixtures of experts may differ: their routing depends on values.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import time
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import RESULTS, in_fork, line, packages, publish, table, where

if TYPE_CHECKING:
    from collections.abc import Iterator

CARD = "H200"
FORMAT = 1
SLOWEST_S = 300
FIGURES = ("allocated", "reserved", "segments")
Record = dict[str, object]


def work(name: str, values: str) -> Iterator[Record]:
    """Run one step in this process, which has not used the GPU before; yield its figures."""
    from pytest_gpumem.devices.virtual.device import VirtualDevice
    from pytest_gpumem.meter.block import use_virtual_gpu

    signal.alarm(SLOWEST_S)
    use_virtual_gpu(CARD, values=values)
    library = VirtualDevice.loaded().library
    import torch

    from benchmarks.fidelity import steps

    record: Record = {"family": steps.STEPS[name].family}
    if missing := [it for it in steps.STEPS[name].needs if importlib.util.find_spec(it) is None]:
        yield {**record, "status": "skipped", "error": f"no package {', '.join(missing)}"}
        return
    started = time.perf_counter()
    try:
        step = steps.STEPS[name].build()
        for _ in range(steps.COUNT):
            step()
        torch.cuda.synchronize()
        record["status"] = "ok"
    except Exception as error:  # noqa: BLE001 - the step's own, recorded
        record["status"] = "oom" if isinstance(error, torch.OutOfMemoryError) else "error"
        record["error"] = f"{type(error).__name__}: {error}"[:2000]
    record["seconds"] = round(time.perf_counter() - started, 3)
    if stats := torch.cuda.memory_stats_as_nested_dict():
        record["allocated"] = stats["allocated_bytes"]["all"]["peak"]
        record["reserved"] = stats["reserved_bytes"]["all"]["peak"]
        record["segments"] = stats["segment"]["all"]["peak"]
        record["retries"] = stats["num_alloc_retries"]
    if unsupported := library.unsupported():
        record["status"], record["unsupported"] = "unsupported", unsupported
    record["convolutions"] = asdict(library.convolutions())
    record["readbacks"] = library.counters().readbacks
    yield record


def figures_of(name: str, values: str = "off") -> Record:
    """Run one step in a fork of this process; return its figures."""
    record = in_fork(work, name, values)
    if "ended" in record:
        late = record["ended"] == "SIGALRM"
        error = f"more than {SLOWEST_S} s" if late else record["ended"]
        return {"status": "timeout" if late else "crashed", "error": error}
    return record


def provenance() -> Iterator[Record]:
    """Yield what the figures are made with."""
    from pytest_gpumem.meter.block import use_virtual_gpu

    use_virtual_gpu(CARD)
    import torch

    properties = torch.cuda.get_device_properties(0)
    yield {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "device": properties.name,
        "total_memory": properties.total_memory,
        "capability": [properties.major, properties.minor],
        "sm_count": properties.multi_processor_count,
        **where(),
        **packages("torchvision", "transformers", "triton"),
    }


def record_steps(names: list[str], out: Path | None) -> None:
    """Write the figures of steps to a JSON file."""
    made_with = in_fork(provenance)
    version = made_with["torch"].partition("+")[0]
    path = out or RESULTS / f"fidelity-virtual-{CARD}-torch{version}.json"
    records: dict[str, Record] = {}
    for number, name in enumerate(names, 1):
        record = records[name] = figures_of(name)
        mib = int(record.get("allocated", 0)) / 2**20
        print(
            f"{number:3}/{len(names)} {name:32} {record['status']:11} {mib:10.2f} MiB "
            f"{record.get('seconds', '')!s:>8} s  {str(record.get('error', ''))[:90]}",
            flush=True,
        )
    kind = f"virtual-{CARD}"
    data = {"format": FORMAT, "kind": kind, "provenance": made_with, "steps": records}
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    good = sum(record["status"] == "ok" for record in records.values())
    print(f"{good} of {len(records)} steps ran; {path}")


def compare_values(names: list[str], *, keep: bool) -> None:
    """Print and keep the figures of steps without values, and whether values change them."""
    rows = []
    for name in names:
        if "compiled" in name:
            figures_of(name)  # a region's first compilation takes memory of its own
        records = [figures_of(name, values) for values in ("off", "auto")]
        if records[0]["status"] == "skipped":
            continue
        without, computing = (
            [it[figure] for figure in FIGURES] if it["status"] == "ok" else [it["error"]]
            for it in records
        )
        verdict = "the same" if without == computing else f"{computing}"
        rows.append([name, *(f"{it:,}" if isinstance(it, int) else it for it in without), verdict])
        print(*rows[-1], flush=True)
    drawn = table(rows, ["step", *FIGURES, "with values"], "lrrrl")
    head = f"Peaks in bytes on the virtual GPU ({CARD}), without values and with small ones'"
    same = sum(row[-1] == "the same" for row in rows)
    total = f"{same} of {len(rows)} steps have the same peaks and segments, to the byte"
    text = "\n".join([head, line("torchvision", "transformers"), "", drawn, "", total])
    publish("values_memory", text, keep=keep)


def main() -> None:
    """Run the steps."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=["*"], help="names of steps, with wildcards")
    parser.add_argument("--but", nargs="*", default=[], help="names of steps to leave out")
    parser.add_argument("--out", type=Path, help="the file to write")
    parser.add_argument("--values", action="store_true", help="without values and with them")
    options = parser.parse_args()
    from pytest_gpumem.devices.cards import find_card
    from pytest_gpumem.devices.virtual.device import VirtualDevice

    VirtualDevice.load(find_card(CARD))  # CUDA is left as it is: forks begin it for themselves
    import torch

    from benchmarks.fidelity import steps

    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])  # imports torch._dynamo
    for name in ("torchvision", "transformers", "transformers.modeling_utils"):
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    assert not torch.cuda.is_initialized()
    names = [
        name
        for name in steps.STEPS
        if any(fnmatch(name, pattern) for pattern in options.only)
        and not any(fnmatch(name, pattern) for pattern in options.but)
    ]
    if options.values:
        compare_values(names, keep=options.only == ["*"] and not options.but)
    else:
        record_steps(names, options.out)


if __name__ == "__main__":
    main()
