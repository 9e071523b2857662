"""The options: each on the command line as --gpumem-NAME and in the ini file as gpumem_NAME."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from pytest_gpumem.errors import SpecError
from pytest_gpumem.sizes import parse_tolerance
from pytest_gpumem.verdict import Policy

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pytest_gpumem.sizes import Tolerance


class Option(NamedTuple):
    """One option of the plugin."""

    name: str
    """as in the ini file, without "gpumem_" """
    help: str
    default: str | bool
    metavar: str = ""
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """As on the command line."""
        return f"--gpumem-{self.name.replace('_', '-')}"

    @property
    def ini(self) -> str:
        """As in the ini file."""
        return f"gpumem_{self.name}"


NOTE_OR_FAIL: Final = ("note", "fail")

OPTIONS: Final = (
    Option(
        "device",
        "where marked tests run: auto (a real GPU, else the virtual one), cuda, virtual, none",
        "auto",
        "NAME",
    ),
    Option("card", "which GPU the virtual one is: T4, L4, A100-80GB ...", "H100", "NAME"),
    Option("update_baselines", "write the baselines of the tests that run and pass", default=False),
    Option("baseline_dir", "folder of the baselines, from the root folder", "baselines", "DIR"),
    Option(
        "missing_baseline",
        "a test without a baseline: note (it passes with a note) or fail",
        "note",
        "note|fail",
        NOTE_OR_FAIL,
    ),
    Option(
        "shrinkage",
        "a peak below its baseline by more than the tolerance: note or fail",
        "note",
        "note|fail",
        NOTE_OR_FAIL,
    ),
    Option(
        "tolerance",
        'how far a peak may be from its baseline: "2%%", "64MiB" or "2%%, 64MiB" (the larger); '
        "by default 0.1%% or 1 MiB allocated, 0.1%% or 20 MiB reserved",
        "",
        "SIZE",
    ),
)


@dataclass(frozen=True)
class Settings:
    """What a session was told."""

    device: str
    card: str
    update_baselines: bool
    baseline_dir: Path
    missing_baseline: Literal["note", "fail"]
    shrinkage: Literal["note", "fail"]
    tolerance: Tolerance | None

    @property
    def policy(self) -> Policy:
        """What of it bears on verdicts."""
        return Policy(
            missing_baseline=self.missing_baseline,
            shrinkage=self.shrinkage,
            tolerance=self.tolerance,
            updating=self.update_baselines,
        )


def read_settings(
    get: Callable[[Option], tuple[object, str]], root: Path, find_card: Callable[[str], str]
) -> Settings:
    """Return the session's settings.

    Args:
        get: returns an option's value and where it was given ("--gpumem-card", "gpumem_card in
            pytest.ini").
        root: the folder that relative folders start from.
        find_card: returns a card's canonical name.

    Raises:
        SpecError: a value that cannot be understood.
    """
    values: dict[str, object] = {}
    for option in OPTIONS:
        value, where = get(option)
        if option.choices and value not in option.choices:
            raise SpecError(
                f"{where}={value}",
                "there is no such choice",
                f"write {' or '.join(option.choices)}",
            )
        try:
            if option.name == "card":
                value = find_card(str(value))
            elif option.name == "tolerance":
                value = parse_tolerance(value) if value else None
        except SpecError as error:
            raise SpecError(f"{where}={value}", error.problem, error.remedy) from error
        values[option.name] = value
    values["baseline_dir"] = root / str(values["baseline_dir"])
    return Settings(**values)  # type: ignore[arg-type] # each was read above
