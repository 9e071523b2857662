"""Define the plugin's module-level hooks: options, the marker, the fixture, the session's plugins.

Every pytest session on a machine with the plugin imports this module, so slow imports wait for the
first marked test.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal

import pytest

from pytest_gpumem.devices.virtual import uncaptured_stderr
from pytest_gpumem.plugin import hookspecs, item_hooks, session_plugin
from pytest_gpumem.plugin.device_choice import (
    GUARD,
    OF_RUN,
    SETTINGS,
    choice_of,
    choose_where_torch_is_imported,
    load_by_default,
    settings_of,
)
from pytest_gpumem.plugin.item_hooks import Failed, ItemHooks
from pytest_gpumem.plugin.pytest_item import CARD, RANK, spread
from pytest_gpumem.plugin.session_plugin import GpuMemPlugin
from pytest_gpumem.session.settings import FIRST_OPTIONS, OPTIONS

if TYPE_CHECKING:
    from pytest_gpumem.testrun.fixture import GpuMemory

MARKER_HELP: Final = (
    "gpu_memory(max_gib, max_allocated_gib, max_reserved_gib, max_pinned_gib, max_host_gib, card, "
    "batch_size, tolerance, baseline, devices, warmup, world_size, rank, batch_sizes, "
    "max_mib_per_sample, max_fixed_gib, ranks, variants, max_leak_mib, steady, min_cache_tokens, "
    "values): "
    "measure the test's peak CUDA memory, and compare it with the limits and with its baseline."
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add every option twice: on the command line and in the ini file."""
    uncaptured_stderr()  # pytest captures standard error after this hook
    GUARD.install(load_by_default)
    first = parser.getgroup("gpumem", "GPU memory regression tests: first options")
    further = parser.getgroup("gpumem-more", "GPU memory regression tests: all other options")
    for number, option in enumerate(OPTIONS):
        group = first if number < FIRST_OPTIONS else further
        extra: dict[str, Any] = {
            "help": option.help.replace("%", "%%"),
            "default": None,
            "dest": option.ini,
        }
        if isinstance(option.default, bool):
            group.addoption(option.flag, action="store_true", **extra)
            parser.addini(option.ini, option.help, type="bool", default=option.default)
        else:
            # An optional value would swallow the path after it: --gpumem-all tests/gpu.
            if option.of_flag:
                extra |= {"action": "store_const", "const": option.of_flag}
            else:
                extra["metavar"] = option.metavar or "|".join(option.choices)
            group.addoption(option.flag, **extra)
            # For the options in OF_RUN, None shows that neither the file nor "-o" sets them.
            default = None if option.ini in OF_RUN else option.default
            kind: Literal["linelist", "string"] = "linelist" if option.is_list else "string"
            parser.addini(option.ini, option.help, type=kind, default=default)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Register the hooks of hookspecs.py."""
    pluginmanager.add_hookspecs(hookspecs)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Read the settings and watch for the import of torch, before a conftest file can import it."""
    with contextlib.suppress(pytest.UsageError):  # pytest_configure raises it again
        settings_of(early_config, early_config.known_args_namespace)
        GUARD.install(lambda: choice_of(early_config))
        choose_where_torch_is_imported(early_config)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and the plugins for the session and its tests."""
    config.addinivalue_line("markers", MARKER_HELP)
    settings = settings_of(config, config.option)
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        settings = config.stash[SETTINGS] = replace(settings, arguments=tuple(config.args))
    GUARD.install(lambda: choice_of(config))
    choose_where_torch_is_imported(config)
    hooks = ItemHooks(config)
    config.pluginmanager.register(hooks, item_hooks.NAME)
    config.pluginmanager.register(GpuMemPlugin(config, settings, hooks), session_plugin.NAME)
    if settings.baseline_dir.is_dir():
        from pytest_gpumem.plugin import stale_hooks

        collecting = stale_hooks.StaleHooks(config, settings)
        config.pluginmanager.register(collecting, stale_hooks.NAME)


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize a test that names several cards or ranks."""
    spread(metafunc, metafunc.config.stash[SETTINGS].cards)


@pytest.fixture(name=CARD)
def card_fixture(request: pytest.FixtureRequest) -> object:
    """The card of one instance of a test with several cards."""
    return request.param


@pytest.fixture(name=RANK)
def rank_fixture(request: pytest.FixtureRequest) -> object:
    """The rank of one instance of a test with several ranks."""
    return request.param


@pytest.fixture(name="gpu_memory")
def gpu_memory_fixture(request: pytest.FixtureRequest) -> GpuMemory:
    """The memory measurement of this test: device, batch size, parts, figures so far."""
    from pytest_gpumem.testrun.fixture import GpuMemory

    hooks = request.config.pluginmanager.get_plugin(item_hooks.NAME)
    if not isinstance(hooks, ItemHooks) or hooks.run is None:
        raise Failed(
            f"{request.node.nodeid} is not measured: gpu_memory must be an argument of the "
            "test or of one of its fixtures, or the test must have the marker; write "
            "@pytest.mark.gpu_memory"
        )
    return GpuMemory(hooks.run)
