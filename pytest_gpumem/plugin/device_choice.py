"""The session's settings and its device, each read or chosen once, at its first use.

The device has to be chosen before torch is imported, which a conftest file or another plugin may do
before any test is known.
"""

from __future__ import annotations

import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from pytest_gpumem.devices.torch_import import TorchGuard
from pytest_gpumem.errors import SpecError
from pytest_gpumem.plugin.settings import REPEATED, Option, Settings, read_settings
from pytest_gpumem.torchrun_env import current_rank

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from pytest_gpumem.devices.select import Choice

SETTINGS = pytest.StashKey[Settings]()
CHOICE = pytest.StashKey["Choice"]()

OF_RUN = {"gpumem_device": "GPUMEM_RUN_DEVICE", "gpumem_card": "GPUMEM_RUN_CARD"}
"""options and the variables of ``gpumem run``; see devices/select.py, which imports too much"""
GUARD = TorchGuard()
"""chooses when torch is imported"""

KNOWN_EARLY = pytest.StashKey[frozenset[str]]()
"""names of the options before a conftest file adds any"""
COLLECTING: Final = (
    *("-c", "-m", "-p"),
    *("--config-file", "--rootdir", "--confcutdir", "--import-mode", "--noconftest"),
)
"""options of pytest that decide which tests there are, and their names"""
NARROWING: Final = ("-k", "--deselect", "--ignore", "--ignore-glob")
"""options of pytest that leave tests out; a command that names its test does without them"""
COLLECTING_INI: Final = ("python", "collect_", "addopts")
"""beginnings of ini options that decide or leave out as these do"""
SENT: Final = "gpumem_command_line"
"""the name under which a worker of pytest-xdist is given the controller's launcher and options"""


def load_by_default() -> None:
    """Load the virtual GPU for a plugin that imports torch before the options are known."""
    from pytest_gpumem.devices.cards import find_card
    from pytest_gpumem.devices.select import DEFAULT_CARD, choose

    # Options are not parsed yet: only this spelling of the option is seen.
    device = "virtual" if "--gpumem-device=virtual" in sys.argv else "auto"
    choose(device, find_card(DEFAULT_CARD))


def settings_of(config: pytest.Config, namespace: object) -> Settings:
    """Return the session's settings, read once.

    Raises:
        UsageError: an option that cannot be understood.
    """
    if SETTINGS in config.stash:
        return config.stash[SETTINGS]

    def get(option: Option) -> tuple[object, str]:
        value = getattr(namespace, option.ini, None)
        if value is not None:
            return value, option.flag
        # Below `gpumem run --card T4` marked tests run on a T4, unless pytest's settings differ.
        variable = OF_RUN.get(option.ini, "")
        value = config.getini(option.ini)
        if value is None and variable in os.environ:
            return os.environ[variable], variable
        return option.default if value is None else value, option.ini

    try:
        settings = config.stash[SETTINGS] = read_settings(get, Path(config.rootpath))
    except SpecError as error:
        raise pytest.UsageError(str(error)) from error
    # "-o gpumem_card=T4" decides as much as "--gpumem-card=T4".
    overridden = getattr(namespace, "override_ini", None) or ()
    own = tuple(
        f"-o{setting}"
        for setting in overridden
        if setting.partition("=")[0].removeprefix("gpumem_") in REPEATED
        or setting.startswith(COLLECTING_INI)
    )
    if own:
        settings = config.stash[SETTINGS] = settings._replace(repeated=settings.repeated + own)
    return settings


def note_command_line(config: pytest.Config) -> Settings:
    """Return the settings with the words of the command line that a printed command repeats.

    Options of conftest files are among them: without ``--runslow`` a test may be skipped.
    """
    settings = config.stash[SETTINGS]
    if hasattr(config, "workerinput"):  # it has the controller's arguments, without options
        own_words = (settings.launcher, settings.repeated)
        launcher, repeated = map(tuple, config.workerinput.get(SENT, own_words))
        settings = settings._replace(launcher=launcher, repeated=repeated)
    else:
        early = config.stash.get(KNOWN_EARLY, None)
        own = vars(config.option).keys() - early if early is not None else ()
        flags = {name for name in own if isinstance(getattr(config.option, name), bool)}
        words = [os.fspath(word) for word in config.invocation_params.args]
        if words == sys.argv[1:]:  # else a program calls pytest.main(...)
            settings = settings._replace(launcher=launcher_of(sys.argv, sys.orig_argv))
        named = config.args if config.args_source is pytest.Config.ArgsSource.ARGS else ()
        settings = settings._replace(
            repeated=(*settings.repeated, *given_options(words, COLLECTING, own, flags)),
            arguments=(*named, *given_options(words, NARROWING)),
        )
    if settings.json is not None:
        from pytest_gpumem.plugin.suites.origin import session_accept_command

        settings = settings._replace(accept=session_accept_command(settings))
    config.stash[SETTINGS] = settings
    return settings


def launcher_of(arguments: Sequence[str], interpreter_arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the words that started pytest, as they were typed: "python -m pytest", "pytest".

    Without a script ``pytest`` on the search path the first works alone; and it imports from the
    working folder, which the second does not.

    Args:
        arguments: ``sys.argv``.
        interpreter_arguments: ``sys.orig_argv``, with the interpreter and its options before these.
    """
    head = interpreter_arguments[: len(interpreter_arguments) - len(arguments) + 1]
    if head[-2:-1] and head[-2].startswith("-") and head[-2].endswith("m") and head[-1] == "pytest":
        return tuple(head)
    script = Path(next(iter(arguments), ""))
    named = script.name != "pytest" or shutil.which("pytest") == str(script.absolute())
    return ("pytest",) if named else (arguments[0],)


def given_options(
    words: Collection[str],
    options: Collection[str],
    own: Collection[str] = (),
    flags: Collection[str] = (),
) -> Iterator[str]:
    """Yield options of a command line, each as one word.

    Args:
        words: the command line.
        options: those to yield, as they are written.
        own: further options, by name: "run_slow" is ``--run-slow``.
        flags: names of options that take no value.
    """
    flags = {"noconftest", *flags}
    remaining = iter(words)
    for word in remaining:
        name, equals, _ = word.partition("=")
        key = name.removeprefix("--").replace("-", "_")
        if not word.startswith("--"):
            if word[:2] in options:
                value = word[2:] or next(remaining, "")
                # A plugin that is switched off has no tests.
                yield from () if f"{word[:2]}{value}".startswith("-pno:") else (word[:2] + value,)
        elif name in options or key in own:
            yield word if equals or key in flags else f"{name}={next(remaining, '')}"


def choose_where_torch_is_imported(config: pytest.Config) -> None:
    """Choose at once if all code is to see the GPU, and no import of torch is to come."""
    if "torch" in sys.modules and config.stash[SETTINGS].shown_always:
        choice_of(config)


def choice_of(config: pytest.Config) -> Choice:
    """Return the session's device, chosen at its first use or when torch is imported."""
    if CHOICE in config.stash:
        return config.stash[CHOICE]
    from pytest_gpumem.devices.cards import find_card
    from pytest_gpumem.devices.select import choose
    from pytest_gpumem.devices.virtual.device import VirtualDevice

    GUARD.remove()  # it chooses at the import of torch, which choosing itself may do
    settings = config.stash[SETTINGS]
    worker = getattr(config, "workerinput", {}).get("workerid", "")
    card, rank, loaded = find_card(settings.card), current_rank(), VirtualDevice.loaded()
    if loaded is not None and loaded.named is not None and not settings.names_card:
        card = loaded.named  # by a conftest file's use_virtual_gpu()
    choice = choose(settings.device, card, worker=worker, rank=rank)
    virtual = choice.device
    if isinstance(virtual, VirtualDevice) and settings.names_card:
        virtual.demanded = card
        config.add_cleanup(lambda: setattr(virtual, "demanded", None))
    if isinstance(virtual, VirtualDevice) and settings.shown_always > virtual.shown_always:
        config.add_cleanup(partial(virtual.show_always, virtual.shown_always))
        virtual.show_always(settings.shown_always)
    config.stash[CHOICE] = choice
    return choice
