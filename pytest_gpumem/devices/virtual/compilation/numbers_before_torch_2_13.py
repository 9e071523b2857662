"""Makes ``torch.compile`` accept numbers that no kernel computed.

On a GPU such a number is a plain number, which Dynamo traces. Before torch 2.13 Dynamo does not
trace subclasses of numbers (uncertain_numbers.py): there is a graph break, with other memory, or
with ``fullgraph=True`` the compilation fails.
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
    """Make Dynamo trace such a number as a constant; ``module`` is the module of TRACED.

    The compiled code's guard checks the number's class, not its value, which is a guess.
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
