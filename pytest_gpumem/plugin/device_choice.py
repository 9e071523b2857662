"""Read the session's settings and choose its device, each once, at first use.

The device must be chosen before torch is imported, and a conftest file or another plugin may import
torch before any test is known.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.devices.torch_import import TorchGuard
from pytest_gpumem.errors import SpecError
from pytest_gpumem.session.settings import OPTIONS, Option, Settings, read_settings
from pytest_gpumem.torchrun_env import current_rank

if TYPE_CHECKING:
    from pytest_gpumem.devices.select import Choice

SETTINGS = pytest.StashKey[Settings]()
CHOICE = pytest.StashKey["Choice"]()

OF_RUN = {"gpumem_device": "GPUMEM_RUN_DEVICE", "gpumem_card": "GPUMEM_RUN_CARD"}
"""by ini option: the environment variable in which ``gpumem run`` passes it. The names are
repeated from devices/select.py, whose import would import many modules"""
GUARD = TorchGuard()
"""chooses the device when torch is imported"""


def load_by_default() -> None:
    """Load the virtual GPU for a plugin that imports torch before the options are parsed."""
    from pytest_gpumem.devices.cards import find_card
    from pytest_gpumem.devices.select import DEFAULT_CARD, choose

    # Options are not parsed yet, so only this spelling is recognized.
    device = "virtual" if "--gpumem-device=virtual" in sys.argv else "auto"
    choose(device, find_card(DEFAULT_CARD))


def settings_of(config: pytest.Config, namespace: object) -> Settings:
    """Return the session's settings, reading them once."""
    if SETTINGS in config.stash:
        return config.stash[SETTINGS]

    def get(option: Option) -> tuple[object, str]:
        value = getattr(namespace, option.ini, None)
        if value is not None:
            return value, option.flag
        # Under `gpumem run --card T4` marked tests run on a T4, unless pytest's settings differ.
        variable = OF_RUN.get(option.ini, "")
        value = read_ini(config, option.ini)
        if value is None and variable in os.environ:
            return os.environ[variable], variable
        if isinstance(option.default, bool):
            return value, option.ini
        return option.default if value is None else as_text(value), option.ini

    try:
        settings = config.stash[SETTINGS] = read_settings(get, Path(config.rootpath))
    except SpecError as error:
        raise pytest.UsageError(str(error)) from error
    # "-o gpumem_card=T4" has the same effect as "--gpumem-card=T4".
    repeated = {option.ini for option in OPTIONS if option.repeated}
    own = tuple(
        f"-o{setting}"
        for setting in getattr(namespace, "override_ini", None) or ()
        if setting.partition("=")[0] in repeated
    )
    if own:
        settings = config.stash[SETTINGS] = replace(settings, repeated=settings.repeated + own)
    return settings


def choose_where_torch_is_imported(config: pytest.Config) -> None:
    """Choose the device now if unmarked code may see the GPU and torch is already imported."""
    if "torch" in sys.modules and config.stash[SETTINGS].shown_always:
        choice_of(config)


def choice_of(config: pytest.Config) -> Choice:
    """Return the session's device, chosen at its first use or when torch is imported."""
    if CHOICE in config.stash:
        return config.stash[CHOICE]
    from pytest_gpumem.devices import virtual
    from pytest_gpumem.devices.cards import find_card
    from pytest_gpumem.devices.select import choose

    GUARD.remove()  # choosing may import torch: the guard would choose again
    settings = config.stash[SETTINGS]
    worker = getattr(config, "workerinput", {}).get("workerid", "")
    card, rank, loaded = find_card(settings.card), current_rank(), virtual.loaded()
    if loaded is not None and loaded.named is not None and not settings.names_card:
        card = loaded.named  # set by use_virtual_gpu() in a conftest file
    choice = choose(settings.device, card, worker=worker, rank=rank)
    device = virtual.loaded()
    if device is not None and device is choice.device:
        if settings.names_card:
            device.demanded = card
            config.add_cleanup(partial(setattr, device, "demanded", None))
        if settings.shown_always > device.shown_always:
            # Compute values outside tests, too: test files create GPU tensors while they are
            # collected, for example as arguments of parametrize.
            config.add_cleanup(partial(setattr, device.values, "initial", device.values.initial))
            device.values.initial = settings.values
            config.add_cleanup(partial(device.show_always, device.shown_always))
            device.show_always(settings.shown_always)
    config.stash[CHOICE] = choice
    return choice


def read_ini(config: pytest.Config, name: str) -> object:
    """Read a setting from the configuration file or "-o"; its default if neither has it.

    Raises:
        UsageError: the value has the wrong type, or pytest cannot parse it.
    """
    try:
        return config.getini(name)
    except (TypeError, ValueError, Warning) as error:
        raise pytest.UsageError(str(error)) from error


def as_text(value: object) -> str:
    """Return a value as typed on the command line: lists with commas, true in lower case."""
    if isinstance(value, list):
        return ",".join(map(as_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
