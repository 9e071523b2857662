"""Measure the battery on one device, as the child process of ``gpumem verify``.

    python -m pytest_gpumem.cli.verify.measuring OUT.json [CARD]

With a CARD, the steps run on the virtual GPU; without one, on the GPU that torch sees.
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from pytest_gpumem.cli.verify.battery import NEEDS_TRITON, STEPS
from pytest_gpumem.meter.block import measure, use_virtual_gpu

SEED: Final = 0


def main() -> None:
    """Measure all steps, and write their peaks and the device."""
    out, *card = sys.argv[1:]
    if card:
        use_virtual_gpu(card[0])
    import torch

    document: dict[str, Any] = {"steps": {}}
    for name, step in STEPS.items():
        if name == NEEDS_TRITON and find_spec("triton") is None:
            continue
        print(f"  {name}", file=sys.stderr, flush=True)  # noqa: T201 - progress
        torch.manual_seed(SEED)
        try:
            with measure() as block:
                step()
        except Exception as error:  # noqa: BLE001 - the report has it, and the next step runs
            problem = next(iter(str(error).splitlines()), "")
            document["steps"][name] = {"error": f"{type(error).__name__}: {problem}"[:300]}
        else:
            measured = block.measurement
            document["steps"][name] = {
                "allocated": block.peak_allocated,
                "reserved": block.peak_reserved,
                "notes": list(measured.note_texts),
            }
            document["provenance"] = asdict(measured.provenance)
        finally:
            gc.collect()
            torch.cuda.empty_cache()
    properties = torch.cuda.get_device_properties(0)
    document["device"] = {
        "device_name": properties.name,
        "total_memory": properties.total_memory,
        "capability": [properties.major, properties.minor],
        "sm_count": properties.multi_processor_count,
        "l2_cache_size": getattr(properties, "L2_cache_size", 0),
        "memory_bus_width": getattr(properties, "memory_bus_width", 0),
    }
    Path(out).write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main()
