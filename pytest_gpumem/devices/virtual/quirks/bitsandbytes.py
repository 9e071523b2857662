"""bitsandbytes loads its library of CPU code, for good, where it is imported and no GPU is seen."""

from __future__ import annotations

import sys
from typing import Final

CAUSE: Final = (
    "; bitsandbytes was imported outside the test, where no GPU is visible, and keeps its "
    "CPU library from then on: import bitsandbytes in the test or in a fixture, or run "
    "with --gpumem-visible=session"
)
"""the clause on a test that took no memory of its device"""


def has_cpu_library() -> bool:
    """Return whether that has happened in this process."""
    loaded = getattr(sys.modules.get("bitsandbytes.cextension"), "lib", None)
    return "bitsandbytes" in sys.modules and not getattr(loaded, "compiled_with_cuda", True)
