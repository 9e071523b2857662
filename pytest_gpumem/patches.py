"""Declarations of every attribute of PyTorch and other packages that this package replaces.

Importing the module that declares a patch does not import the other package. An applied patch
lasts until an ExitStack closes, or as long as the process. If guards of compiled code compare a
function's identity, :mod:`pytest_gpumem.recording.wrapped_functions` changes the function's code
instead.
"""

from __future__ import annotations

import functools
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import ExitStack

PATCHES: Final[list[Patch]] = []
"""all declared patches; tests/tables/patches.md lists them"""


class Patch:
    """Replaces functions, methods or settings of another package, for one reason."""

    def __init__(self, module: str, *names: str, reason: str, versions: str = "all") -> None:
        """Declare the patch.

        Args:
            module: the other package's module that contains the attributes.
            names: the attributes, relative to the module: "compile_fx", "CompiledFxGraph.__call__".
                "*" as the class means every class of the module that defines the method itself.
            reason: a clause that says why.
            versions: versions of the other package that need the patch. Other versions have no such
                attribute, or the declaring module does not patch it.
        """
        self.module, self.names, self.reason, self.versions = module, names, reason, versions
        PATCHES.append(self)

    def values(self, module: Any) -> dict[str, Any]:  # noqa: ANN401 - another package's
        """Return the current values by name, of the attributes that the module has."""
        return {name: getattr(owner, last) for name, owner, last in self._places(module)}

    def wrap(
        self,
        module: Any,  # noqa: ANN401 - another package's
        make: Callable[[Any], Any],
        stack: ExitStack | None = None,
    ) -> bool:
        """Replace each attribute by ``make(original)``; skip those that the module does not have.

        Args:
            module: the module of the declaration.
            make: returns the new value for the original one. A function gets the original's name
                and docstring.
            stack: removes the patch when it closes; None for the life of the process.

        Returns:
            whether the module has any of the attributes.
        """
        made: dict[int, tuple[object, Any]] = {}  # wrap a function with two names only once
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
        """Set the attributes to values, by name.

        Names that the module does not have are skipped. Without a stack the patch lasts as long
        as the process.
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
        """Set an attribute of one object, whether or not it exists.

        An owner that only inherits the attribute inherits it again after removal. Without a stack
        the patch lasts as long as the process.
        """
        if stack is not None:
            if attribute in vars(owner):
                stack.callback(setattr, owner, attribute, vars(owner)[attribute])
            else:
                stack.callback(delattr, owner, attribute)
        setattr(owner, attribute, value)

    def _places(self, module: Any) -> Iterator[tuple[str, Any, str]]:  # noqa: ANN401 - another package's
        """Yield each declared name that exists, with the attribute's owner and its name there."""
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
    """Return a ``make`` for :meth:`Patch.wrap`; the wrapper's first argument is the original.

    Do not use it for functions that Dynamo traces: it would change the guards of compiled code.
    """

    def make(original: Any) -> Any:  # noqa: ANN401 - another package's
        def wrapped(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - as the original
            __tracebackhide__ = True
            return wrapper(original, *args, **options)

        return wrapped

    return make
