"""Cache which names in modules of installed plugins are hooks and fixtures, in this process.

At the beginning of each session pytest inspects all names of each plugin's module twice, for hooks
and for fixtures: a third of the time of a small session.
"""

import builtins
import sys
from types import ModuleType

import _pytest.fixtures
import pluggy._manager

HOOK = "pytest_"


def look_through_once():
    """Cache which names of installed modules may be hooks, and which may be fixtures.

    Modules in other folders, classes and objects are inspected each time.
    """
    pluggy._manager.dir = _once(builtins.dir, _is_named_as_a_hook)
    if hasattr(_pytest.fixtures, "FixtureFunctionDefinition"):  # since pytest 8.4
        _pytest.fixtures.dir = _once(builtins.dir, _may_be_a_fixture)
    if hasattr(pluggy._manager, "_static_hook_attr"):  # slow in newer versions of pluggy
        pluggy._manager._static_hook_attr = _once(pluggy._manager._static_hook_attr)


def _once(look, wanted=None):
    results = {}

    def look_or_remember(thing, *args):
        path = getattr(thing, "__file__", None) if isinstance(thing, ModuleType) else None
        if path is None or not path.startswith(sys.prefix):
            return look(thing, *args)
        key = (thing, *args)
        if key not in results:
            result = look(thing, *args)
            if wanted is not None:
                result = [name for name in result if wanted(thing, name)]
            results[key] = result
        return results[key]

    return look_or_remember


def _is_named_as_a_hook(_module, name):
    return name.startswith(HOOK)


def _may_be_a_fixture(module, name):
    """Whether a name is a fixture, or a wrapper that pytest would warn about."""
    value = vars(module).get(name)
    kinds = _pytest.fixtures.FixtureFunctionDefinition, classmethod, staticmethod
    return isinstance(value, kinds) or hasattr(value, "__wrapped__")
