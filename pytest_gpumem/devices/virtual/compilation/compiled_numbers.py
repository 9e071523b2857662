"""``torch.compile`` of functions that take numbers which no kernel computed.

On a GPU such a number is a plain one, which Dynamo traces. Before torch 2.13 Dynamo traces no
number of a class of its own (uncertain_numbers.py): the graph breaks there, with other memory, or
with ``fullgraph=True`` the compilation fails.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.devices.virtual.uncertain_numbers import plain_number

if TYPE_CHECKING:
    from types import ModuleType

MODULE: Final = "torch._dynamo.variables.builder"
"""PyTorch's module with the class that decides how an object is traced"""
TRACED_SINCE: Final = "UserDefinedConstantVariable"
"""the class in that module by which newer versions of PyTorch trace such numbers"""


def trace_numbers(module: ModuleType) -> None:
    """Have Dynamo trace such a number as a constant; ``module`` is :data:`MODULE`, just imported.

    The code that it compiles is guarded by the number's class, and not by its value, which is a
    guess.
    """
    builder = getattr(module, "VariableBuilder", None)
    wrap = getattr(builder, "wrap_user_defined", None)
    if hasattr(module, TRACED_SINCE) or wrap is None:
        return

    @functools.wraps(wrap)
    def wrapped(self: Any, value: Any) -> Any:  # noqa: ANN401 - PyTorch's builder and variable
        number = plain_number(value)
        if number is None:
            return wrap(self, value)
        self.install_guards(module.GuardBuilder.TYPE_MATCH)
        return module.ConstantVariable.create(value=number, source=self.source)

    builder.wrap_user_defined = wrapped  # type: ignore[union-attr] # it has the method
