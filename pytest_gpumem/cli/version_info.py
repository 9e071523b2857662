"""``gpumem version``: show relevant versions, and this machine's GPUs and cuDNN.

It is for bug reports, so it never fails: a row that cannot be determined says why.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final

from tabulate import tabulate

from pytest_gpumem.cli.outcome import Outcome
from pytest_gpumem.devices import driver, virtual
from pytest_gpumem.devices.torch_build import installed_torch
from pytest_gpumem.sizes import format_size
from pytest_gpumem.version import __version__

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

HELP = "print versions, and the GPUs and cuDNN of this machine"
DESCRIPTION = f"{HELP[0].upper()}{HELP[1:]}. Paste it into bug reports."
PACKAGES: Final = (
    *("pytest", "pluggy", "tabulate", "msgspec", "filelock", "jinja2"),
    *("nvidia-ml-py", "pytest-xdist", "triton", "torchvision", "transformers"),
)
VARIABLES: Final = (
    *("CUDA_VISIBLE_DEVICES", "GPUMEM_CUDNN", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    *("PYTORCH_NO_CUDA_MEMORY_CACHING", "LD_PRELOAD", "LD_LIBRARY_PATH"),
)
SLOW: Final = 120
"""seconds that importing torch may take"""

# This runs in a separate process, as a broken torch may kill the process that imports it.
TORCH_PROGRAM: Final = """
import json, torch
from pytest_gpumem.meter.allocator import cudnn_version
count = torch.cuda.device_count()
gpus = [torch.cuda.get_device_properties(index) for index in range(count)]
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "cudnn": int(cudnn_version().replace("none", "0")),
    "gpus": [[gpu.name, gpu.total_memory, f"{gpu.major}.{gpu.minor}"] for gpu in gpus],
}))
"""
VIRTUAL_PROGRAM: Final = """
import json
from pytest_gpumem.devices import virtual
print(json.dumps(virtual.status()._asdict()))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing, as the subcommand has no arguments."""


def run(_arguments: argparse.Namespace) -> Outcome:
    """Return the table of versions."""
    return Outcome(tabulate(list(rows()), tablefmt="plain", disable_numparse=True))


def rows() -> Iterator[tuple[str, str]]:
    """Yield the name and version, or description, of each component."""

    def torch_build() -> str:
        return describe_torch(torch_facts.result(), virtual_facts.result().get("stubs", ()))

    with ThreadPoolExecutor() as pool:  # importing torch takes seconds, and two processes do it
        torch_facts = pool.submit(facts_of, TORCH_PROGRAM)
        virtual_facts = pool.submit(facts_of, VIRTUAL_PROGRAM)
        yield "pytest-gpumem", __version__
        yield "Python", f"{platform.python_version()} ({platform.python_implementation()})"
        yield "system", f"{platform.platform()}, {os.cpu_count()} CPUs"
        yield "torch", _described(torch_build)
        yield "GPU", _described(lambda: describe_gpus(torch_facts.result()))
        yield "NVIDIA driver", _described(driver.version)
        yield "virtual GPU", _described(lambda: describe_virtual(virtual_facts.result()))
    for package in PACKAGES:
        yield package, _described(partial(installed_version, package))
    for variable in VARIABLES:
        if variable in os.environ:
            yield variable, os.environ[variable]


def _described(describe: Callable[[], str]) -> str:
    try:
        return describe()
    except Exception as error:  # noqa: BLE001 - in a bug report an error is worth showing
        return f"unknown: {type(error).__name__}: {error}"


def facts_of(program: str) -> dict[str, Any]:
    """Run a program in a new process; return the JSON that it prints, or {"error": ...}."""
    try:
        process = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=SLOW,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {SLOW} s"}
    output, errors = process.stdout.splitlines(), process.stderr.splitlines()
    if process.returncode != 0 or not output:
        reason = errors[-1] if errors else f"exit status {process.returncode}"
        return {"error": reason}
    facts: dict[str, Any] = json.loads(output[-1])  # libraries may print something before it
    return facts


def describe_torch(facts: dict[str, Any], stubs: Sequence[str] = ()) -> str:
    """Describe torch's version, with its CUDA and cuDNN.

    ``stubs`` are CUDA libraries that are not installed.
    """
    if "error" in facts:
        build = installed_torch()
        if build is None:
            return "not installed"
        if stubs:
            return (
                f"{build.version}, CUDA {build.cuda}, for the virtual GPU alone: "
                f"{len(stubs)} of CUDA's libraries are not installed, and pytest-gpumem "
                "replaces them (gpumem light makes such environments; pip check calls "
                "them broken)"
            )
        return f"{build.version}, which cannot be imported: {facts['error']}"
    cuda = f"CUDA {facts['cuda']}" if facts["cuda"] else "a build without CUDA"
    cudnn = f"cuDNN {format_cudnn(facts['cudnn'])}" if facts["cudnn"] else "no cuDNN"
    return f"{facts['version']}, {cuda}, {cudnn}"


def describe_gpus(facts: dict[str, Any]) -> str:
    """Describe the GPUs that torch sees, with memory and compute capability."""
    if "error" in facts:
        return "unknown: torch cannot be queried"
    gpus = [
        f"{name} ({format_size(total_memory)}, capability {capability})"
        for name, total_memory, capability in facts["gpus"]
    ]
    return ", ".join(gpus) or "torch sees no GPU"


def describe_virtual(facts: dict[str, Any]) -> str:
    """Describe whether the virtual GPU works, and which cuDNN computes its workspace sizes."""
    if "error" in facts:
        return f"built, but it does not run: {facts['error']}"
    status = virtual.Status(**facts)
    if status.problem:
        return f"not built: {status.problem}"
    cudnn = f"cuDNN {format_cudnn(status.cudnn)}"
    if not status.cudnn:
        sentence = "works; there is no cuDNN to compute workspaces"
    elif not status.computes_workspaces:
        sentence = f"works; {cudnn} is too old to compute workspaces (9.8 and later can)"
    else:
        sentence = f"works; {cudnn} computes workspaces"
    count, missing = status.linked
    if count and missing:
        names = ", ".join(missing)
        number = f"{len(missing)} of {count} CUDA functions that torch links"
        sentence += f"; {number} are not answered: {names}"
    elif count:
        sentence += f"; it answers all {count} CUDA functions that torch links"
    return sentence


def format_cudnn(number: int) -> str:
    """Format cuDNN's version number, which is 92600 for 9.26.0."""
    if number < 90000:  # noqa: PLR2004 - 8.9.7 was 8907
        return f"{number // 1000}.{number // 100 % 10}.{number % 100}"
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def installed_version(package: str) -> str:
    """Return a package's version, or "not installed"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
