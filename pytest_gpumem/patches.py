"""Every attribute of PyTorch, and of other packages, that this package replaces, and the reason.

A patch is declared as its module is imported, which imports nothing of the other package. It lasts
as long as a block does, or as the process. Where a guard of compiled code compares a function,
:mod:`pytest_gpumem.recording.wrapped_functions` changes its code instead.
"""

from __future__ import annotations

import functools
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import ExitStack

PATCHES: Final[list[Patch]] = []
"""those that are declared; tests/tables/patches.md lists them all"""


class Patch:
    """Functions, methods or settings of another package that are replaced for one reason."""

    def __init__(self, module: str, *names: str, reason: str, versions: str = "all") -> None:
        """Declare the patch.

        Args:
            module: the other package's module that has them.
            names: the attributes, from the module on: "compile_fx", "CompiledFxGraph.__call__". The
                class "*" stands for each class of the module with such a method of its own.
            reason: a clause that says why.
            versions: of the other package that need the patch. Further versions have no such
                attribute, or the declaring module leaves it alone.
        """
        self.module, self.names, self.reason, self.versions = module, names, reason, versions
        PATCHES.append(self)

    def values(self, module: Any) -> dict[str, Any]:  # noqa: ANN401 - another package's
        """Return the values of the attributes by their names, those that this version has."""
        return {name: getattr(owner, last) for name, owner, last in self._places(module)}

    def wrap(
        self,
        module: Any,  # noqa: ANN401 - another package's
        make: Callable[[Any], Any],
        stack: ExitStack | None = None,
    ) -> bool:
        """Put a function around each attribute; nothing where this version has none.

        Args:
            module: the module of the declaration.
            make: returns the new value from the present one. Functions get the name
                and the documentation of that one.
            stack: is given the removal; None: the patch lasts as long as the process.

        Returns:
            whether this version has any of the attributes.
        """
        made: dict[int, tuple[object, Any]] = {}  # a function that has two names stays one
        places = list(self._places(module))
        for _, owner, last in places:
            original = getattr(owner, last)
            if id(original) not in made:
                value = make(original)
                if isinstance(value, FunctionType):
                    functools.update_wrapper(value, original)
                made[id(original)] = original, value
            self.on(owner, last, made[id(original)][1], stack)
        return bool(places)

    def put(
        self,
        module: Any,  # noqa: ANN401 - another package's
        values: Mapping[str, object],
        stack: ExitStack | None = None,
    ) -> None:
        """Put values in the places of the attributes, by their names.

        Values of names that this version has not are left out. Without a stack the patch lasts as
        long as the process.
        """
        for name, owner, last in self._places(module):
            if name in values:
                self.on(owner, last, values[name], stack)

    @staticmethod
    def on(
        owner: Any,  # noqa: ANN401 - another package's
        attribute: str,
        value: object,
        stack: ExitStack | None = None,
    ) -> None:
        """Put a value in the place of an attribute of one object, whether it has that or not.

        An owner that only inherits the attribute inherits it again later. Without a stack the patch
        lasts as long as the process.
        """
        if stack is not None:
            if attribute in vars(owner):
                stack.callback(setattr, owner, attribute, vars(owner)[attribute])
            else:
                stack.callback(delattr, owner, attribute)
        setattr(owner, attribute, value)

    def _places(self, module: Any) -> Iterator[tuple[str, Any, str]]:  # noqa: ANN401 - another package's
        """Yield each name, with the object that has the attribute and the attribute's own name."""
        for name in self.names:
            *path, last = name.split(".")
            if path == ["*"]:
                for owner in vars(module).values():
                    if isinstance(owner, type) and last in vars(owner):
                        yield name, owner, last
                continue
            owner = module
            for part in path:
                owner = getattr(owner, part, None)
            if hasattr(owner, last):
                yield name, owner, last


def wrapped_by(wrapper: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a ``make`` of :meth:`Patch.wrap`; the wrapper takes the original before all else.

    Not for functions that Dynamo traces: guards of compiled code are other ones then.
    """

    def make(original: Any) -> Any:  # noqa: ANN401 - another package's
        def wrapped(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - as the original
            __tracebackhide__ = True
            return wrapper(original, *args, **options)

        return wrapped

    return make
