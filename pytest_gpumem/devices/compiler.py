"""``torch.compile`` sees nothing of this package: neither its frames nor what it wraps."""

from __future__ import annotations

import sys

from pytest_gpumem.devices.torch_import import IMPORTS
from pytest_gpumem.wrapped_functions import RULES, TRACER, hide_while_tracing, skip_own_frames

_hidden: set[str] = set()


def hide_from_compiler() -> None:
    """Hide from now on, or from the import of PyTorch's compiler on; nothing if that is done."""
    for name, hide in ((RULES, skip_own_frames), (TRACER.module, hide_while_tracing)):
        if name in _hidden:
            continue
        _hidden.add(name)
        if name in sys.modules:
            hide(sys.modules[name])
        else:
            IMPORTS.call_after(name, hide)
