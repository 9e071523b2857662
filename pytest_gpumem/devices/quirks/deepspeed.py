"""DeepSpeed keeps process groups of its own, which only its own function lets go of."""

from __future__ import annotations

import sys
from typing import Any


def destroy_process_group(distributed: Any) -> None:  # noqa: ANN401 - torch.distributed
    """Destroy the process groups of DeepSpeed, where it has any, or else PyTorch's."""
    comm: Any = sys.modules.get("deepspeed.comm", distributed)
    (comm if comm.is_initialized() else distributed).destroy_process_group()
