"""The session's settings and its device, each read or chosen once, at its first use.

The device has to be chosen before torch is imported, which a conftest file or another plugin may do
before any test is known.
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
"""options and the variables of ``gpumem run``; see devices/select.py, which imports too much"""
GUARD = TorchGuard()
"""chooses when torch is imported"""


def load_by_default() -> None:
    """Load the virtual GPU for a plugin that imports torch before the options are known."""
    from pytest_gpumem.devices.cards import find_card
    from pytest_gpumem.devices.select import DEFAULT_CARD, choose

    # Options are not parsed yet: only this spelling of the option is seen.
    device = "virtual" if "--gpumem-device=virtual" in sys.argv else "auto"
    choose(device, find_card(DEFAULT_CARD))


def settings_of(config: pytest.Config, namespace: object) -> Settings:
    """Return the session's settings, read once."""
    if SETTINGS in config.stash:
        return config.stash[SETTINGS]

    def get(option: Option) -> tuple[object, str]:
        value = getattr(namespace, option.ini, None)
        if value is not None:
            return value, option.flag
        # Below `gpumem run --card T4` marked tests run on a T4, unless pytest's settings differ.
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
    # "-o gpumem_card=T4" decides as much as "--gpumem-card=T4".
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
    """Choose at once if all code is to see the GPU, and no import of torch is to come."""
    if "torch" in sys.modules and config.stash[SETTINGS].shown_always:
        choice_of(config)


def choice_of(config: pytest.Config) -> Choice:
    """Return the session's device, chosen at its first use or when torch is imported."""
    if CHOICE in config.stash:
        return config.stash[CHOICE]
    from pytest_gpumem.devices import virtual
    from pytest_gpumem.devices.cards import find_card
    from pytest_gpumem.devices.select import choose

    GUARD.remove()  # it chooses at the import of torch, which choosing itself may do
    settings = config.stash[SETTINGS]
    worker = getattr(config, "workerinput", {}).get("workerid", "")
    card, rank, loaded = find_card(settings.card), current_rank(), virtual.loaded()
    if loaded is not None and loaded.named is not None and not settings.names_card:
        card = loaded.named  # by a conftest file's use_virtual_gpu()
    choice = choose(settings.device, card, worker=worker, rank=rank)
    device = virtual.loaded()
    if device is not None and device is choice.device:
        if settings.names_card:
            device.demanded = card
            config.add_cleanup(partial(setattr, device, "demanded", None))
        if settings.shown_always > device.shown_always:
            config.add_cleanup(partial(device.show_always, device.shown_always))
            device.show_always(settings.shown_always)
    config.stash[CHOICE] = choice
    return choice


def read_ini(config: pytest.Config, name: str) -> object:
    """Return a setting of the configuration file or of "-o"; its default where neither has one.

    Raises:
        UsageError: a value of another type than the setting's, or that pytest cannot read.
    """
    try:
        return config.getini(name)
    except (TypeError, ValueError, Warning) as error:
        raise pytest.UsageError(str(error)) from error


def as_text(value: object) -> str:
    """Return a setting's value as on the command line: a list with commas, true in lower case."""
    if isinstance(value, list):
        return ",".join(map(as_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
