"""Operators whose output size depends on values: what their CUDA code copies to the host.

Such an operator's CUDA code asks the device for a size by small copies to the host. The mode
computes the operator on the host first, and queues the bytes of these copies in their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch._ops import OpOverload

    Copies = Callable[[Any, Sequence[Any], Mapping[str, Any]], list[bytes]]
    """takes the result on the host (of unknown inputs a meta tensor), and the arguments there"""

COPIES: Final[dict[OpOverload, Copies]] = {}
"""the bytes of each copy to the host that an operator makes to learn sizes"""
