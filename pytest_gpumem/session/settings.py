"""The options: each on the command line as --gpumem-NAME and in the ini file as gpumem_NAME.

Every pytest session of a machine that has the plugin imports this: slow imports wait for a value
that needs them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from pytest_gpumem.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pytest_gpumem.judge.verdict import Policy
    from pytest_gpumem.sizes import Tolerance


class OutputFile(NamedTuple):
    """A file that an option has a session write; session/outputs.py has its writer."""

    title: str
    """as messages name it"""
    example: str
    """a name that it may have"""


class Option(NamedTuple):
    """One option of the plugin."""

    name: str
    """as in the ini file, without "gpumem_" """
    help: str
    default: str | bool
    metavar: str = ""
    """the help's word for the value; "": the choices"""
    choices: tuple[str, ...] = ()
    is_list: bool = False
    """whether the ini file may have a list"""
    of_flag: str = ""
    """the value on the command line, where the option takes none; "": it takes one"""
    file: OutputFile | None = None
    """the file that the option names"""

    @property
    def flag(self) -> str:
        """As on the command line."""
        return f"--gpumem-{self.name.replace('_', '-')}"

    @property
    def ini(self) -> str:
        """As in the ini file."""
        return f"gpumem_{self.name}"


DEVICES: Final = ("auto", "cuda", "virtual", "none")
"""values of ``--gpumem-device``"""
NOTE_OR_FAIL: Final = ("note", "fail")

OPTIONS: Final = (
    Option("card", "the GPU model of the virtual GPU: T4, L4, A100-80GB ...", "H100", "NAME"),
    Option("update_baselines", "write the baselines of the tests that run and pass", default=False),
    Option(
        "html",
        "write an HTML page to this file: every test's figures, timeline and breakdown; "
        "the page needs no network",
        "",
        "PATH",
        file=OutputFile("page", "gpumem.html"),
    ),
    Option(
        "device",
        "where marked tests run: auto (on a real GPU if there is one, else on the virtual "
        "GPU), cuda, virtual, or none (they are skipped)",
        "auto",
        choices=DEVICES,
    ),
    Option(
        "all",
        "measure every test that takes device memory, marked or not; implies visible=session; "
        "in the ini file, or with -o gpumem_all=..., write patterns of node ids instead of true: "
        "tests/gpu/*,tests/test_models.py::*",
        "",
        is_list=True,
        of_flag="true",
    ),
    Option(
        "cards",
        (
            "run every marked test on each of these cards, and show which test fits which "
            "card: T4,L4,H100"
        ),
        "",
        "NAME,NAME",
        is_list=True,
    ),
    Option(
        "visible",
        "which code sees the virtual GPU: test (only marked tests) or session (all code, from the "
        "import of torch on; session:4 shows four GPUs)",
        "test",
        "test|session",
    ),
    Option(
        "values",
        "values on the virtual GPU: auto (within a budget of work and memory), full (all), off",
        "auto",
        choices=("auto", "full", "off"),
    ),
    Option(
        "baseline_dir",
        (
            "folder of the baselines, relative to the root folder; {torch} in its name is "
            "replaced by torch's version, such as 2.15"
        ),
        "baselines",
        "DIR",
    ),
    Option(
        "missing_baseline",
        "a test without a usable baseline: auto (fails if the environment variable CI is "
        "set, else passes with a note), note (passes with a note) or fail",
        "auto",
        choices=("auto", *NOTE_OR_FAIL),
    ),
    Option(
        "shrinkage",
        "a peak that is below its baseline by more than the tolerance: note or fail",
        "note",
        choices=NOTE_OR_FAIL,
    ),
    Option(
        "provenance",
        "a baseline made with another torch, CUDA, cuDNN, driver or allocator setting: compare "
        "(as any other), note (beyond tolerance: a note, no failure) or fail",
        "compare",
        choices=("compare", "note", "fail"),
    ),
    Option(
        "stale",
        "baselines whose tests are gone, after a full collection: note or fail",
        "note",
        choices=NOTE_OR_FAIL,
    ),
    Option(
        "attribution",
        "explain where peaks come from, and what would fit: auto (for tests that fail; for all "
        "tests if baselines or a page are written; with a JSON report, also for tests that are "
        "new or shrank), on (for all tests), off",
        "auto",
        choices=("auto", "on", "off"),
    ),
    Option(
        "snapshots",
        "folder for the allocator's snapshots, to open at https://pytorch.org/memory_viz: "
        "of tests that do not fit or grew, by a second run (without this option, no "
        "snapshot is kept)",
        "",
        "DIR",
    ),
    Option(
        "tolerance",
        'how far a peak may be from its baseline: "2%%", "64MiB" or "2%%, 64MiB" (the larger); '
        "by default 0.1%% or 1 MiB allocated, 0.1%% or 20 MiB reserved; with "
        "--gpumem-against 3%% instead of 0.1%%",
        "",
        "SIZE",
    ),
    Option(
        "guard",
        "which peaks are compared with their baselines: both, or allocated (peak reserved, "
        "which includes the allocator's cache, is only shown)",
        "both",
        choices=("both", "allocated"),
    ),
    Option(
        "json",
        "write every result to this file as JSON, for programs",
        "",
        "PATH",
        file=OutputFile("JSON report", "gpumem.json"),
    ),
    Option(
        "artifact",
        "the name of the CI artifact with the JSON report: failures then print the command "
        "that accepts their figures on another machine",
        "",
        "NAME",
    ),
    Option(
        "markdown",
        "write the failures and every result to this file as Markdown",
        "",
        "PATH",
        file=OutputFile("Markdown report", "gpumem.md"),
    ),
    Option(
        "github",
        "under GitHub Actions: auto (add the report to the job's summary, annotate the lines of "
        "tests that failed) or off",
        "auto",
        choices=("auto", "off"),
    ),
    Option(
        "against",
        "compare tests with the baselines of another device, for example a real run with its "
        'prediction: "virtual:L4", "cuda:NVIDIA L4"',
        "",
        "KIND:NAME",
    ),
)
FIRST_OPTIONS: Final = 5
"""options that a newcomer needs: help and documentation begin with them"""

MAX_SHOWN_LENGTH: Final = 100
"""characters of a value that an error shows"""
REPEATED: Final = {"device", "card", "cards", "all", "visible", "values", "baseline_dir"}
"""options that decide the figures, and the baselines to compare with"""


FILES: Final = {option.name: option.file for option in OPTIONS if option.file is not None}
"""by the option that names the file"""


class Settings(NamedTuple):
    """The options of a session, checked."""

    device: str
    card: str
    """a card's canonical name"""
    all: tuple[str, ...]
    """patterns of the node ids of tests that are measured without a marker"""
    visible: str
    """"test", "session" or "session:4" """
    cards: tuple[str, ...]
    """canonical names of the cards that every marked test runs on; empty: those of the markers"""
    values: Literal["auto", "full", "off"]
    update_baselines: bool
    baseline_dir: Path
    """where baselines are written"""
    missing_baseline: Literal["auto", "note", "fail"]
    shrinkage: Literal["note", "fail"]
    provenance: Literal["compare", "note", "fail"]
    stale: Literal["note", "fail"]
    attribution: Literal["auto", "on", "off"]
    snapshots: Path | None
    """the folder for them; None: no option asks for any"""
    tolerance: Tolerance | None
    guard: Literal["both", "allocated"]
    html: Path | None
    """where the page is to be written"""
    json: Path | None
    """where the JSON report is to be written"""
    artifact: str
    """the name under which CI keeps the JSON report; "" where that is not known"""
    markdown: Path | None
    """where the report in Markdown is to be written"""
    github: Literal["auto", "off"]
    against: str
    """the key of the device with the baselines to compare with; "": the tests' own"""
    repeated: tuple[str, ...] = ()
    """the options of the command line that decide the figures and the comparison"""
    arguments: tuple[str, ...] = ()
    """the files and folders that the command line names"""
    nearest_dirs: tuple[Path, ...] = ()
    """folders of other versions of torch, the nearest first, for tests without a baseline in the
    first"""
    folder_by_torch: str = ""
    """the name of the folder with torch's version in it, which is proposed; "": the name has it"""
    names_card: bool = False
    """whether an option names the card; else it is the default"""

    @property
    def writes(self) -> bool:
        """Whether it names a file for a report."""
        return any(getattr(self, name) is not None for name in FILES)

    @property
    def shown_always(self) -> int:
        """The number of virtual GPUs that all code of the session sees; 0: marked tests alone."""
        word, _, number = self.visible.partition(":")
        return int(number or 1) if word == "session" else 0

    @property
    def on_github(self) -> bool:
        """Whether GitHub Actions is to be told."""
        asked = "GITHUB_STEP_SUMMARY" in os.environ or "GITHUB_ACTIONS" in os.environ
        return asked and self.github == "auto"

    @property
    def missing_fails(self) -> bool:
        """Whether a test without a baseline to compare with fails."""
        return self.missing_baseline == "fail" or self.strict_in_ci

    @property
    def strict_in_ci(self) -> bool:
        """Whether that is so because the session runs in CI, and no option says otherwise."""
        return self.missing_baseline == "auto" and in_ci()

    @property
    def absent_device_fails(self) -> bool:
        """Whether marked tests fail without a device, so that CI does not pass unmeasured.

        With ``--gpumem-device=none`` they are skipped on purpose.
        """
        return self.device != "none" and in_ci()

    @property
    def policy(self) -> Policy:
        """The options that bear on verdicts."""
        from pytest_gpumem.judge.verdict import BASE_COMMIT, Policy

        return Policy(
            missing_baseline="fail" if self.missing_fails else "note",
            shrinkage=self.shrinkage,
            provenance=self.provenance,
            tolerance=self.tolerance,
            guard=self.guard,
            updating=self.update_baselines,
            against=self.against,
            repeated=self.repeated,
            base_commit=os.environ.get(BASE_COMMIT, ""),
        )


def in_ci() -> bool:
    """Return whether the environment says that this session runs in CI."""
    return os.environ.get("CI", "").strip().lower() not in {"", "0", "false"}


def read_settings(get: Callable[[Option], tuple[object, str]], root: Path) -> Settings:
    """Return the session's settings.

    Args:
        get: returns an option's value and where it was given ("--gpumem-card", "gpumem_card").
        root: the folder that relative folders start from, and relative files of the ini file;
            those of the command line start from the working folder.
    """
    read = {option: get(option) for option in OPTIONS}
    values = {option.name: _read_option(option, *read[option], root) for option in OPTIONS}
    repeated = tuple(
        where if value == option.of_flag else f"{where}={value}"
        for option, (value, where) in read.items()
        if option.name in REPEATED and where == option.flag
    )
    values["cards"] = values["cards"] or ()
    values["all"] = values["all"] or ()
    if values["all"] and not _is_given("visible", read):
        values["visible"] = "session"  # or conditions at the top of files would skip the tests
    template = folder_of_root(str(values["baseline_dir"]), root)
    folders = [root / template]
    names_torch = "{torch}" in str(template)
    proposed = "" if names_torch else f"{str(values['baseline_dir']).rstrip('/')}/torch-{{torch}}"
    if names_torch:
        from pytest_gpumem.baselines.torch_folders import baseline_folders

        folders = baseline_folders(root, template)
    values["baseline_dir"], values["nearest_dirs"] = folders[0], tuple(folders[1:])
    for option, (folder_name, where) in read.items():
        if option.name in {"baseline_dir", "snapshots"}:
            place = folders[0] if option.name == "baseline_dir" else root / str(folder_name)
            _require_possible(place, f"{where}={folder_name}", option.name)
    option_of: dict[object, str] = {}
    for name in FILES:
        path = values[name]
        if path is not None and path in option_of:  # the second would replace the first
            raise SpecError(
                f"--gpumem-{name}={path}",
                f"--gpumem-{option_of[path]} names the same file",
                "name two different files",
            )
        option_of[path] = name
    if values["against"] and values["update_baselines"]:
        raise SpecError(
            "--gpumem-against with --gpumem-update-baselines",
            "a comparison with another device's baselines records no baseline",
            "write only one of the two options",
        )
    folder = str(values["snapshots"]).strip()
    values["snapshots"] = root / folder if folder else None
    derived = {
        "repeated": repeated,
        "names_card": _is_given("card", read),
        "folder_by_torch": proposed,
    }
    return Settings(**values, **derived)  # type: ignore[arg-type] # each was read above


def _is_given(name: str, read: Mapping[Option, tuple[object, str]]) -> bool:
    """Return whether an option has another value than its default, or stands on a command line."""
    return any(
        where != option.ini or value != option.default
        for option, (value, where) in read.items()
        if option.name == name
    )


def _read_option(option: Option, value: object, where: str, root: Path) -> object:
    if option.name in FILES:
        _require_possible(root / str(value), f"{where}={value}", FILES[option.name].example)
        return _output_path(option.name, str(value), where, root)
    if value == option.default and not option.name.endswith("tolerance"):
        return value
    if isinstance(option.default, bool) and not isinstance(value, bool):
        raise SpecError(f"{where}={value}", "this is not a truth value", f"write {where}=true")
    if option.choices and value not in option.choices:
        choices = " or ".join(f"{where}={choice}" for choice in option.choices)
        raise SpecError(f"{where}={value}", "this is not a valid choice", f"write {choices}")
    if option.name == "baseline_dir" and not str(value).strip():
        raise SpecError(f"{where}=", "this is not a folder", f"write {where}=baselines")
    try:
        reader = _READERS.get(option.name)
        return reader(str(value)) if reader else value
    except SpecError as error:
        raise SpecError(f"{where}={value}", error.problem, error.remedy) from error


def folder_of_root(name: str, root: Path) -> str:
    """Return the name of the baselines' folder: of one above the root, the root's own part.

    Packages of one repository have roots of their own, and modules of the same names: in a common
    folder ("../baselines") each has a folder, named as the root is from that folder.
    """
    above = Path(os.path.normpath(name)).parts.count(os.pardir)
    if Path(name).is_absolute() or not 0 < above <= len(root.parts) - 1:
        return name
    if any(path.name.startswith(("virtual-", "cuda-")) for path in (root / name).glob("*-*/")):
        return name  # the folder of a root above, as gpumem prune may be told below it
    return str(Path(name, *root.parts[-above:]))


def _require_possible(path: Path, argument: str, example: str) -> None:
    """Refuse a path that no file can have: with a NUL, too long, of no encoding."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    except (OSError, ValueError) as error:  # else the session's last act would fail, its writing
        from pytest_gpumem.report.text import printable

        problem = error.strerror if isinstance(error, OSError) else error
        raise SpecError(
            printable(argument)
            if len(argument) <= MAX_SHOWN_LENGTH
            else f"{printable(argument[:MAX_SHOWN_LENGTH])}...",
            f"no file can have this name ({problem})",
            f"write a shorter name without special characters, such as {example}",
        ) from None


def _output_path(option: str, value: str, where: str, root: Path) -> Path | None:
    from importlib.util import find_spec

    on_command_line = where.startswith("--")
    if not value.strip() and not on_command_line:
        return None
    name = os.path.expanduser(value.strip())  # noqa: PTH111 - a "~" that names no user stays
    path = Path(name) if on_command_line else root / name
    if not value.strip() or name.endswith(os.sep) or path.is_dir():
        raise SpecError(
            f"{where}={value}", "this is not a file", f"write {where}={FILES[option].example}"
        )
    if option == "html" and find_spec("jinja2") is None:
        raise SpecError(
            f"{where}={value}",
            "the page needs jinja2, which is not installed",
            "run pip install 'pytest-gpumem[html]'",
        )
    from pytest_gpumem.report.output_files import require_replaceable

    require_replaceable(path, option, f"{where}={value}")
    return path.absolute()


def _read_card(name: str) -> str:
    from pytest_gpumem.devices.cards import find_card

    if "," in name:
        raise SpecError(
            name,
            "this names several cards, but the virtual GPU is one card",
            f"to run every marked test on each of them, write --gpumem-cards={name}",
        )
    return find_card(name).name


def _read_against(device: str) -> str:
    """Return the key of the baselines of a device that is given as KIND:NAME."""
    from pytest_gpumem.measurement import device_key

    kind, _, name = device.strip().partition(":")
    if kind == "virtual" and name.strip():
        return device_key("virtual", _read_card(name.strip()))
    if kind == "cuda" and name.strip():
        return device_key("cuda", name.strip())
    raise SpecError(device, "this is not a device", "write virtual:L4, or cuda:NVIDIA L4")


def _read_visible(visible: str) -> str:
    """Return the audience of the virtual GPU: "test", "session" or "session:4"."""
    from pytest_gpumem.spec import MAX_DEVICES

    word, colon, number = visible.strip().partition(":")
    digits = number.isdecimal() and number.isascii() and len(number) <= len(str(MAX_DEVICES))
    count = int(number) if digits else 0
    if word == "session" and (not colon or 1 <= count <= MAX_DEVICES):
        return f"session:{count}" if count > 1 else "session"
    raise SpecError(
        visible,
        "this is not a valid choice",
        f"write test, session, or session:4 for four GPUs (at most {MAX_DEVICES})",
    )


def _read_tolerance(tolerance: str) -> Tolerance | None:
    if not tolerance:
        return None
    from pytest_gpumem.sizes import parse_tolerance

    return parse_tolerance(tolerance)


def _read_patterns(patterns: str) -> tuple[str, ...]:
    """Return patterns of node ids; "true" stands for all of them, "false" for none."""
    word = patterns.strip().lower()
    if word in {"", "0", "false", "no", "off"}:
        return ()
    if word in {"1", "true", "yes", "on"}:
        return ("*",)
    return tuple(pattern.strip() for pattern in patterns.split(",") if pattern.strip())


_READERS: Final[Mapping[str, Callable[[str], object]]] = {
    "all": _read_patterns,
    "card": _read_card,
    "cards": lambda cards: tuple(
        dict.fromkeys(_read_card(name) for name in map(str.strip, cards.split(",")) if name)
    ),
    "tolerance": _read_tolerance,
    "visible": _read_visible,
    "against": _read_against,
}
