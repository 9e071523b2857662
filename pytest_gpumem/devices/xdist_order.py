"""Rotates the GPUs of pytest-xdist's workers, so that the workers run in parallel.

A worker's ``CUDA_VISIBLE_DEVICES`` is rotated: of GPUs 0, 1, 2 worker gw1 sees 1, 2, 0. Its tests'
``cuda:0`` is another GPU than the other workers', and a test that requests several GPUs still gets
them. If there are fewer workers than GPUs, their first GPUs are spread: of two workers on eight
GPUs gw1 begins with GPU 4, so that tests of four GPUs run in parallel. If two workers share a GPU,
a lock serializes their steps.

CUDA shows a process one MIG instance, the first of its list ("Multi-Instance GPU User Guide"). If
there are several instances, they are distributed to the workers.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.devices.driver import import_nvml, visible_gpus
from pytest_gpumem.devices.torch_build import torch_is_imported

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
WORKERS: Final = "PYTEST_XDIST_WORKER_COUNT"
MIG: Final = "MIG-"
"""prefix of the names of MIG instances in CUDA_VISIBLE_DEVICES"""


def take_turns(worker: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Rotate the visible GPUs by the worker's number, or choose one of several MIG instances.

    Do nothing if torch has been imported.

    Args:
        worker: pytest-xdist's name of the worker, such as "gw1".
        environment: environment variables, changed in place.
    """
    digits = re.search(r"\d+", worker)
    visible = environment.get(VISIBLE)
    several = visible is None or "," in visible  # if it is unset, all GPUs are visible
    if digits is None or torch_is_imported() or not several:
        return
    number, workers = int(digits[0]), int(environment.get(WORKERS) or 0)
    instances = mig_instances(visible)
    if instances:
        environment[VISIBLE] = instances[number % len(instances)]
        return
    turned = turn(visible, visible_gpus(environment).names, number, workers)
    if turned is not None:
        environment[VISIBLE] = turned


def turn(visible: str | None, gpus: Sequence[str], number: int, workers: int = 0) -> str | None:
    """Return the rotated list of visible GPUs; None if no other GPU can come first.

    GPUs with another name than the first one keep their places: a baseline belongs to a GPU's name,
    and any worker may run a test.

    Args:
        visible: ``CUDA_VISIBLE_DEVICES``: numbers, UUIDs or names of MIG instances; None: all.
        gpus: the names of the GPUs that CUDA sees with that list.
        number: the worker's number.
        workers: number of workers; 0 if unknown.
    """
    entries = list(map(str, range(len(gpus)))) if visible is None else visible.split(",")
    entries = [entry.strip() for entry in entries][: len(gpus)]  # CUDA stops at an invalid entry
    if len(entries) < len(gpus):
        return None
    alike = [i for i, name in enumerate(gpus) if name == gpus[0]]
    if len(alike) < 2:  # noqa: PLR2004 - a single one cannot rotate
        return None
    by = number * len(alike) // workers if 0 < workers < len(alike) else number
    by %= len(alike)
    order = dict(zip(alike, alike[by:] + alike[:by], strict=True))
    return ",".join(entries[order.get(i, i)] for i in range(len(entries)))


def mig_instances(visible: str | None) -> list[str]:
    """Return the MIG instances to distribute to workers: all with the same name as the first.

    Args:
        visible: ``CUDA_VISIBLE_DEVICES``; None: all instances of the machine, if each of its GPUs
            is partitioned.

    Returns:
        the instances' UUIDs; empty if whole GPUs are visible, or NVML (nvidia-ml-py) is missing.
    """
    entries = None if visible is None else [entry.strip() for entry in visible.split(",")]
    if entries is not None and not all(entry.startswith(MIG) for entry in entries):
        return []
    nvml = import_nvml()
    if nvml is None:
        return []
    try:
        nvml.nvmlInit()
        try:
            if entries is None:
                handles = _all_instances(nvml)
            else:
                handles = [*map(nvml.nvmlDeviceGetHandleByUUID, entries)]
            named = [
                (nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle))
                for handle in handles
            ]
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return []
    return [uuid for name, uuid in named if name == named[0][0]]


def _all_instances(nvml: Any) -> list[Any]:  # noqa: ANN401 - a module without types
    """Return the handles of all MIG instances; none if any GPU is not partitioned."""
    instances = []
    for index in range(nvml.nvmlDeviceGetCount()):
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        current, _pending = nvml.nvmlDeviceGetMigMode(gpu)
        if current != nvml.NVML_DEVICE_MIG_ENABLE:
            return []
        for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
            # Not every index has an instance.
            with suppress(nvml.NVMLError_NotFound):
                instances.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, place))
    return instances


def own_instance(environment: Mapping[str, str] = os.environ) -> str:
    """Return the name of the MIG instance visible to this process; "" if whole GPUs are visible."""
    first = environment.get(VISIBLE, "").partition(",")[0].strip()
    return first if first.startswith(MIG) else ""
