"""Makes ``torch.compile`` trace uncomputed numbers that a program has read back from the GPU.

On a GPU these are plain numbers, which Dynamo traces. Here their types are subclasses of int and
float (uncertain_numbers.py), which Dynamo does not trace before torch 2.13: the graph breaks, which
changes the memory, or with ``fullgraph=True`` the compilation fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.devices.virtual.uncertain_numbers import plain_number
from pytest_gpumem.patches import Patch, wrapped_by

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

TRACED: Final = Patch(
    "torch._dynamo.variables.builder",
    "VariableBuilder.wrap_user_defined",  # decides how an object is traced
    reason="Dynamo traces a number that no kernel computed as a constant",
    versions="before torch 2.13",
)
TRACED_SINCE: Final = "UserDefinedConstantVariable"
"""class in that module with which newer versions of PyTorch trace such numbers"""


def trace_numbers(module: ModuleType) -> None:
    """Make Dynamo trace a number that no kernel computed as a constant.

    The compiled code's guard checks the number's class, not its value, which is a guess.

    Args:
        module: the module of TRACED.
    """
    if hasattr(module, TRACED_SINCE):
        return

    @wrapped_by
    def as_constant(wrap: Callable[..., Any], self: Any, value: Any) -> Any:
        number = plain_number(value)
        if number is None:
            return wrap(self, value)
        self.install_guards(module.GuardBuilder.TYPE_MATCH)
        return module.ConstantVariable.create(value=number, source=self.source)

    TRACED.wrap(module, as_constant)
