"""Run the fidelity matrix on the GPU of this machine, or on the virtual one; write one JSON file.

    python -m benchmarks.fidelity.run                     # the real GPU
    python -m benchmarks.fidelity.run --virtual H200      # the virtual one

Each step runs in a process of its own, with a time limit. With ``--fork`` the processes are forks
of one that has imported torch, as imports take most of a step's time. The figures are torch.cuda's,
for the whole process: pytest_gpumem does not measure here, it only provides the virtual GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import RESULTS, ROOT, in_fork, packages, where

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMAT = 1
"""format version of the JSON file"""


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--virtual", metavar="CARD", help="on the virtual GPU, as this card")
    parser.add_argument("--only", nargs="*", default=["*"], help="names of steps, with wildcards")
    parser.add_argument("--but", nargs="*", default=[], help="names of steps to leave out")
    parser.add_argument("--timeout", type=float, default=300, help="seconds a step (300)")
    parser.add_argument("--out", type=Path, help="the file to write")
    parser.add_argument("--jobs", "-j", type=int, default=1, help="steps at a time (1)")
    parser.add_argument("--fork", action="store_true", help="import once (with --virtual, -j 1)")
    parser.add_argument("--again", action="store_true", help="keep what the file has, run the rest")
    parser.add_argument("--worker", metavar="STEP", help="run this step here and print its figures")
    return parser.parse_args()


def load_virtual(card: str) -> None:
    """Load the virtual GPU without initializing CUDA, which cannot be used in forks afterwards."""
    from pytest_gpumem.devices.cards import find_card
    from pytest_gpumem.devices.virtual.device import VirtualDevice

    VirtualDevice.load(find_card(card))


def work(name: str, card: str | None) -> dict[str, object]:
    """Run one step in this process and return its figures."""
    library = None
    if card:
        from pytest_gpumem.devices.virtual.device import VirtualDevice
        from pytest_gpumem.meter.block import use_virtual_gpu

        use_virtual_gpu(card, values="off")
        library = VirtualDevice.loaded().library
    import torch

    from benchmarks.fidelity import steps

    found: dict[str, object] = {"family": steps.STEPS[name].family}
    missing = [it for it in steps.STEPS[name].needs if importlib.util.find_spec(it) is None]
    if missing or torch.cuda.get_device_capability() < steps.STEPS[name].capability:
        reason = f"no package {', '.join(missing)}" if missing else "compute capability too low"
        return {**found, "status": "skipped", "error": reason}
    started = time.perf_counter()
    try:
        step = steps.STEPS[name].build()
        for _ in range(steps.COUNT):
            step()
        torch.cuda.synchronize()
        found["status"] = "ok"
    except Exception as error:  # noqa: BLE001 - the step's own, recorded
        found["status"] = "oom" if isinstance(error, torch.OutOfMemoryError) else "error"
        found["error"] = f"{type(error).__name__}: {error}"[:2000]
    found["seconds"] = round(time.perf_counter() - started, 3)
    stats = torch.cuda.memory_stats_as_nested_dict()
    if stats:
        found["allocated"] = stats["allocated_bytes"]["all"]["peak"]
        found["reserved"] = stats["reserved_bytes"]["all"]["peak"]
        found["segments"] = stats["segment"]["all"]["peak"]
        found["retries"] = stats["num_alloc_retries"]
    if library is not None:
        unsupported = library.unsupported()
        if unsupported:
            found["status"], found["unsupported"] = "unsupported", unsupported
        found["convolutions"] = library.convolutions()._asdict()
        found["readbacks"] = library.readbacks()
    return found


def in_process(name: str, options: argparse.Namespace) -> dict[str, object]:
    """Run one step in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.fidelity.run", "--worker", name]
    if options.virtual:
        command += ["--virtual", options.virtual]
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": "1", **os.environ}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=options.timeout,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"status": "timeout", "error": f"more than {options.timeout:g} s"}
    lines = done.stdout.strip().splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        return {
            "status": "crashed",
            "error": f"exit status {done.returncode}: {done.stderr[-1500:].strip()}",
        }


def import_all() -> None:
    """Import the modules that steps use."""
    import torch

    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])  # imports torch._dynamo
    for name in ("torchvision", "transformers", "transformers.modeling_utils"):
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    assert not torch.cuda.is_initialized()


def timed_work(name: str, options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yield a step's figures; SIGALRM ends the process if it takes too long."""
    signal.alarm(math.ceil(options.timeout))
    yield work(name, options.virtual)


def in_fork_of_this(name: str, options: argparse.Namespace) -> dict[str, object]:
    """Run one step in a fork of this process."""
    record = in_fork(timed_work, name, options)
    if record.get("ended") == "SIGALRM":
        return {"status": "timeout", "error": f"more than {options.timeout:g} s"}
    return {"status": "crashed", "error": record["ended"]} if "ended" in record else record


def provenance(card: str | None) -> dict[str, object]:
    """Return the versions and the device of the figures, as seen by a new process."""
    code = (
        "import json, torch; p = torch.cuda.get_device_properties(0);"
        "print(json.dumps({'torch': torch.__version__, 'cuda': torch.version.cuda,"
        " 'cudnn': torch.backends.cudnn.version(), 'device': p.name,"
        " 'total_memory': p.total_memory, 'capability': [p.major, p.minor],"
        " 'sm_count': p.multi_processor_count}))"
    )
    if card:
        code = f"from pytest_gpumem.meter.block import use_virtual_gpu as u; u({card!r});" + code
    folders = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
    )
    if done.returncode:
        sys.exit(f"PyTorch cannot use the GPU here (exit status {done.returncode}):\n{done.stderr}")
    text = done.stdout
    versions = packages("torchvision", "transformers", "triton")
    return {**json.loads(text.splitlines()[-1]), **where(), **versions}


def write(path: Path, data: dict[str, object]) -> None:
    """Write a JSON file atomically."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    new.replace(path)


def main() -> None:
    """Run the matrix."""
    options = arguments()
    if options.fork and (options.jobs > 1 or not options.virtual):
        sys.exit("--fork is for the virtual GPU, with one step at a time")
    if options.worker:
        print(json.dumps(work(options.worker, options.virtual)))
        return
    if options.virtual:
        load_virtual(options.virtual)  # torch needs it if NVIDIA's packages are missing
    from benchmarks.fidelity import steps

    names = [it for it in steps.STEPS if any(fnmatch(it, one) for one in options.only)]
    names = [it for it in names if not any(fnmatch(it, one) for one in options.but)]
    kind = f"virtual-{options.virtual}" if options.virtual else "cuda"
    made_with = provenance(options.virtual)
    version = str(made_with["torch"]).partition("+")[0]
    default = RESULTS / f"fidelity-{kind}-torch{version}.json"
    path = options.out or default
    results: dict[str, dict[str, object]] = {}
    if options.again and path.exists():
        results = json.loads(path.read_text(encoding="utf-8"))["steps"]
    todo = [
        name
        for name in names
        if not (options.again and results.get(name, {}).get("status") in {"ok", "skipped"})
    ]
    if options.fork:
        import_all()
    with ThreadPoolExecutor(options.jobs) as pool:
        if options.fork:
            runs = (in_fork_of_this(name, options) for name in todo)  # threads are not forked
        else:
            runs = pool.map(lambda name: in_process(name, options), todo)
        for number, (name, figures) in enumerate(zip(todo, runs, strict=True), 1):
            found = results[name] = {"family": steps.STEPS[name].family, **figures}
            peak = int(found.get("allocated", 0)) / 2**20
            print(
                f"{number:3}/{len(todo)} {name:32} {found['status']:11} {peak:10.2f} MiB "
                f"{found.get('seconds', '')!s:>8} s  {str(found.get('error', ''))[:90]}",
                flush=True,
            )
            write(path, {"format": FORMAT, "kind": kind, "provenance": made_with, "steps": results})
    good = sum(it["status"] == "ok" for it in results.values())
    print(f"{good} of {len(results)} steps ran; {path}")


if __name__ == "__main__":
    main()
