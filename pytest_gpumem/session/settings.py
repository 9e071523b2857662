"""Define the options: each is --gpumem-NAME on the command line and gpumem_NAME in the ini file.

:class:`Settings` is their table: the options of pytest and of ``gpumem run``, the ini settings and
docs/reference/options.md are generated from it. Every pytest session on a machine with the plugin
imports this module, so slow imports wait for a value that needs them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from pytest_gpumem.errors import SpecError
from pytest_gpumem.session.output_files import Output, require_replaceable

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from pytest_gpumem.judge.verdict import Policy
    from pytest_gpumem.sizes import Tolerance


class Option(NamedTuple):
    """One option of the plugin."""

    name: str
    """the name in the ini file, without "gpumem_" """
    default: str | bool
    text: str
    """its effect, in Markdown"""
    metavar: str = ""
    """the value's placeholder in the help; "" if the help shows the choices"""
    choices: tuple[str, ...] = ()
    read: Callable[[str], object] | None = None
    """parses the option's text; None if the text itself is the value"""
    page: str = ""
    """a Markdown link to further documentation; "" without one"""
    is_list: bool = False
    """whether its value in the ini file may be a list"""
    of_flag: str = ""
    """the option's value if its flag takes no value and is set; "" if the flag takes a value"""
    repeated: bool = False
    """whether it affects figures or baselines: commands that reports print then repeat it"""
    shown: bool = False
    """whether reports show its value if that is not the default"""
    of_run: str = ""
    """its name in ``gpumem run``; "" if ``gpumem run`` does not have it"""
    text_of_run: str = ""
    """its effect in ``gpumem run``, in Markdown; "" if ``text`` says it"""

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return f"--gpumem-{self.name.replace('_', '-')}"

    @property
    def ini(self) -> str:
        """Its name in the ini file."""
        return f"gpumem_{self.name}"

    @property
    def help(self) -> str:
        """Its effect, as plain text for a terminal."""
        return self.text.replace("`", "")


def _option(default: str | bool, text: str, **more: Any) -> Any:  # noqa: ANN401, FBT001 - a field of any type
    """Return a field of :class:`Settings` with its option; ``more`` goes to Option."""
    return field(metadata={"option": partial(Option, default=default, text=text, **more)})


def _output(text: str, **more: Any) -> Any:  # noqa: ANN401 - likewise
    """Return a field of :class:`Settings` that names a report's file; ``more`` goes to Output."""

    def option(name: str) -> Option:
        report = f"write the report --gpumem-{name}"
        return Option(name, "", text, metavar="PATH", of_run=name, text_of_run=report)

    return field(metadata={"option": option, "output": partial(Output, **more)})


DEVICES: Final = ("auto", "cuda", "accelerator", "virtual", "none")
"""values of ``--gpumem-device``"""
NOTE_OR_FAIL: Final = ("note", "fail")
FIRST_OPTIONS: Final = 5
"""number of options that a newcomer needs: the first ones, which the help lists separately"""
MAX_SHOWN_LENGTH: Final = 100
"""maximum number of characters of an option with its value in an error"""


def _read_card(name: str) -> str:
    from pytest_gpumem.devices.cards import find_card

    if "," in name:
        remedy = f"to run every marked test on each of them, write --gpumem-cards={name}"
        raise SpecError(name, "this names several cards, but the virtual GPU is one card", remedy)
    return find_card(name).name


def _read_against(device: str) -> str:
    """Return the baseline key of a device given as KIND:NAME."""
    from pytest_gpumem.measurement import device_key

    kind, _, name = device.strip().partition(":")
    if kind == "virtual" and name.strip():
        return device_key("virtual", _read_card(name.strip()))
    if kind == "cuda" and name.strip():
        return device_key("cuda", name.strip())
    raise SpecError(device, "this is not a device", "write virtual:L4, or cuda:NVIDIA L4")


def _read_visible(visible: str) -> str:
    """Parse which code sees the virtual GPU: "test", "session" or "session:4"."""
    from pytest_gpumem.spec import MAX_DEVICES

    word, colon, number = visible.strip().partition(":")
    digits = number.isdecimal() and number.isascii() and len(number) <= len(str(MAX_DEVICES))
    count = int(number) if digits else 0
    if word == "session" and (not colon or 1 <= count <= MAX_DEVICES):
        return f"session:{count}" if count > 1 else "session"
    remedy = f"write test, session, or session:4 for four GPUs (at most {MAX_DEVICES})"
    raise SpecError(visible, "this is not a valid choice", remedy)


def _read_tolerance(tolerance: str) -> Tolerance:
    from pytest_gpumem.sizes import parse_tolerance

    return parse_tolerance(tolerance)


def _read_patterns(patterns: str) -> tuple[str, ...]:
    """Parse patterns of node ids; "true" means all tests, "false" none."""
    word = patterns.strip().lower()
    if word in {"", "0", "false", "no", "off"}:
        return ()
    if word in {"1", "true", "yes", "on"}:
        return ("*",)
    return tuple(pattern.strip() for pattern in patterns.split(",") if pattern.strip())


def _read_cards(cards: str) -> tuple[str, ...]:
    names = (_read_card(name) for name in map(str.strip, cards.split(",")) if name)
    return tuple(dict.fromkeys(names))


@dataclass(frozen=True)
class Settings:
    """A session's options, validated; in the order of help and documentation."""

    card: str = _option(
        "H100",
        "the GPU model of the virtual GPU, if the marker names none: `T4`, `L4`, `A100-80GB` ...",
        metavar="NAME",
        read=_read_card,
        repeated=True,
        shown=True,
    )
    update_baselines: bool = _option(
        default=False,
        text="write the baselines of the tests that run and pass",
        shown=True,
        of_run="update",
        text_of_run="write the baseline, if the program ends well",
    )
    html: Path | None = _output(
        "write an HTML page with every test's figures, timeline and breakdown to this file; the "
        "page needs no network",
        title="page",
        example="gpumem.html",
        beginning=rb'<!DOCTYPE html>(?s:.*)<meta name="generator" content="pytest-gpumem">\s*'
        rb"<title>GPU memory[,<]",
        renderer="report.page.html:page",
        needs=("jinja2", "run pip install 'pytest-gpumem[html]'"),
    )
    device: str = _option(
        "auto",
        "where marked tests run: `auto` (on a CUDA GPU if there is one, else on the accelerator "
        "that `torch.accelerator` names, else on the virtual GPU; without any they are skipped, or "
        "fail if `CI` is set), `cuda`, `accelerator` (XPU, MPS, NPU), `virtual`, or `none` (they "
        "are skipped)",
        choices=DEVICES,
        repeated=True,
        shown=True,
    )
    all: tuple[str, ...] = _option(
        "",
        "measure every test that takes device memory, marked or not; it implies "
        "`--gpumem-visible=session`. The ini file may have patterns of node ids instead of `true`",
        read=_read_patterns,
        page="[Existing suites](../how-to/existing-suites.md#one-line-for-all-of-it)",
        is_list=True,
        of_flag="true",
        repeated=True,
    )
    cards: tuple[str, ...] = _option(
        "",
        "run every marked test on each of these cards, and show which test fits which card: "
        "`T4,L4,H100`",
        metavar="NAME,NAME",
        read=_read_cards,
        is_list=True,
        repeated=True,
        shown=True,
    )
    visible: str = _option(
        "test",
        "which code sees the virtual GPU: `test` (only marked tests) or `session` (all code, from "
        "the import of torch on); `session:4` shows four GPUs",
        metavar="test|session",
        read=_read_visible,
        page="[Existing suites](../how-to/existing-suites.md)",
        repeated=True,
        shown=True,
    )
    values: Literal["auto", "full", "off"] = _option(
        "auto",
        "values on the virtual GPU: `auto` (within a budget of work and memory), `full` (all), "
        "`off`",
        choices=("auto", "full", "off"),
        page="[Values](../explanation/values.md)",
        repeated=True,
    )
    baseline_dir: Path = _option(
        "baselines",
        "folder of the baselines, relative to pytest's root folder. If the folder is above the "
        "root (`../baselines`), each package gets its own subfolder; `{torch}` in its name is "
        "replaced by torch's version",
        metavar="DIR",
        page="[Update torch](../how-to/toolchain-bumps.md)",
        repeated=True,
        of_run="baseline",
        text_of_run="compare the peaks with the baseline in this folder, one a device, a program "
        "and its arguments",
    )
    missing_baseline: Literal["auto", "note", "fail"] = _option(
        "auto",
        "a test without a usable baseline: `auto` (fails if the environment variable `CI` is set, "
        "else passes with a note), `note` (passes with a note) or `fail`",
        choices=("auto", *NOTE_OR_FAIL),
        shown=True,
    )
    shrinkage: Literal["note", "fail"] = _option(
        "note",
        "a peak that is below its baseline by more than the tolerance: `note` or `fail`",
        choices=NOTE_OR_FAIL,
        shown=True,
    )
    provenance: Literal["compare", "note", "fail"] = _option(
        "compare",
        "a baseline made with another torch, CUDA, cuDNN, driver or allocator setting: `compare` "
        "(as any other), `note` (beyond tolerance: a note, no failure) or `fail`",
        choices=("compare", *NOTE_OR_FAIL),
        shown=True,
    )
    skip_too_large: bool = _option(
        default=False,
        text="skip a test that needs more memory than the GPU has, by its baseline or, without "
        "one, by its limit; if `CI` is set, a session that measures no other test fails",
        page="[Small and large GPUs](../how-to/many-cards.md#a-suite-for-small-and-large-gpus)",
        shown=True,
    )
    stale: Literal["note", "fail", "delete"] = _option(
        "note",
        "baselines whose tests are gone, after a full collection: `note`, `fail` or `delete`",
        choices=(*NOTE_OR_FAIL, "delete"),
    )
    attribution: Literal["auto", "on", "off"] = _option(
        "auto",
        "explain where peaks come from, and what would fit: `auto` (for tests that fail; for all "
        "tests if baselines or a page are written; with a JSON report, also for tests that are "
        "new or shrank), `on` (for all tests), `off`",
        choices=("auto", "on", "off"),
        page="[When it is recorded](breakdown.md#when-it-is-recorded)",
    )
    snapshots: Path | None = _option(
        "",
        "folder for the allocator's snapshots of tests that do not fit or grew, by a second run",
        metavar="DIR",
        page="[memory_viz](https://pytorch.org/memory_viz) opens them",
    )
    tolerance: Tolerance | None = _option(
        "",
        'how far a peak may be from its baseline: "2%", "64MiB" or "2%, 64MiB" (the larger); by '
        "default 0.1% or 1 MiB allocated, 0.1% or 20 MiB reserved, and 3% with `--gpumem-against`",
        metavar="SIZE",
        read=_read_tolerance,
        page="[tolerance](marker.md#tolerance)",
        shown=True,
        of_run="tolerance",
        text_of_run='as --gpumem-tolerance: "2%", "64MiB"',
    )
    guard: Literal["both", "allocated"] = _option(
        "both",
        "which peaks are compared with their baselines: `both`, or `allocated` (peak reserved, "
        "which includes the allocator's cache, is only shown)",
        choices=("both", "allocated"),
        shown=True,
    )
    json: Path | None = _output(
        "write every result to this file as JSON, for programs",
        title="JSON report",
        example="gpumem.json",
        beginning=rb'\{\s*"format": \d+,\s*"gpumem": ".*",\s*"created": ',
        renderer="report.json_report:json_lines",
    )
    artifact: str = _option(
        "",
        "the name of the CI artifact with the JSON report: failures then print the command that "
        "accepts their figures on another machine",
        metavar="NAME",
        page="[Across machines](../how-to/across-machines.md)",
    )
    markdown: Path | None = _output(
        "write the failures and every result to this file as Markdown",
        title="Markdown report",
        example="gpumem.md",
        beginning=rb"## GPU memory: ",
        renderer="report.markdown:markdown",
    )
    github: Literal["auto", "off"] = _option(
        "auto",
        "under GitHub Actions: `auto` (add the report to the job's summary, annotate the lines of "
        "tests that failed) or `off`",
        choices=("auto", "off"),
    )
    against: str = _option(
        "",
        "compare tests with the baselines of another device, for example a real run with its "
        "prediction: `virtual:L4`, `cuda:NVIDIA L4`",
        metavar="KIND:NAME",
        read=_read_against,
        shown=True,
    )
    repeated: tuple[str, ...] = ()
    """command-line options that affect the figures and the comparison"""
    arguments: tuple[str, ...] = ()
    """files and folders given on the command line"""
    nearest_dirs: tuple[Path, ...] = ()
    """baseline folders of other torch versions, the nearest first, for tests without a baseline in
    ``baseline_dir``"""
    folder_by_torch: str = ""
    """a proposed folder name with torch's version in it; "" if the name has it already"""
    names_card: bool = False
    """whether an option names the card, which is otherwise the default"""

    @property
    def writes(self) -> bool:
        """Whether a report file is requested."""
        return any(getattr(self, output.name) is not None for output in OUTPUTS)

    @property
    def shown_always(self) -> int:
        """The number of virtual GPUs that all code sees; 0: only marked tests see any."""
        word, _, number = self.visible.partition(":")
        return int(number or 1) if word == "session" else 0

    @property
    def on_github(self) -> bool:
        """Whether to write GitHub's job summary and annotations."""
        asked = "GITHUB_STEP_SUMMARY" in os.environ or "GITHUB_ACTIONS" in os.environ
        return asked and self.github == "auto"

    @property
    def strict_in_ci(self) -> bool:
        """Whether tests without a baseline fail because this is CI, and not by an option."""
        return self.missing_baseline == "auto" and in_ci()

    @property
    def absent_device_fails(self) -> bool:
        """Whether marked tests fail without a device, so that CI cannot pass unmeasured.

        With ``--gpumem-device=none`` they are skipped on purpose.
        """
        return self.device != "none" and in_ci()

    @property
    def policy(self) -> Policy:
        """The options that affect verdicts."""
        from pytest_gpumem.judge.verdict import BASE_COMMIT, Policy

        fails = self.missing_baseline == "fail" or self.strict_in_ci
        return Policy(
            missing_baseline="fail" if fails else "note",
            shrinkage=self.shrinkage,
            provenance=self.provenance,
            tolerance=self.tolerance,
            guard=self.guard,
            updating=self.update_baselines,
            against=self.against,
            repeated=self.repeated,
            base_commit=os.environ.get(BASE_COMMIT, ""),
        )


OPTIONS: Final[tuple[Option, ...]] = tuple(
    column.metadata["option"](name=column.name) for column in fields(Settings) if column.metadata
)
OUTPUTS: Final[tuple[Output, ...]] = tuple(
    column.metadata["output"](name=column.name)
    for column in fields(Settings)
    if "output" in column.metadata
)
"""report files, in the order in which they are written"""


def add_options_of_run(parser: argparse._ArgumentGroup) -> None:
    """Add the plugin's options that ``gpumem run`` has, under the names that they have there."""
    for option in OPTIONS:
        text = (option.text_of_run or option.text).replace("`", "").replace("%", "%%")
        flag = f"--{option.of_run}"
        if isinstance(option.default, bool) and option.of_run:
            parser.add_argument(flag, action="store_true", help=text)
        elif option.of_run:
            parser.add_argument(flag, metavar=option.metavar, help=text)


def in_ci() -> bool:
    """Return whether the environment says that this is CI."""
    return os.environ.get("CI", "").strip().lower() not in {"", "0", "false"}


def read_settings(get: Callable[[Option], tuple[object, str]], root: Path) -> Settings:
    """Read and validate the session's settings.

    ``get`` returns an option's value and where it was given: "--gpumem-card" or "gpumem_card".
    Relative folders, and relative files in the ini file, are below ``root``; relative files on the
    command line are below the working folder.
    """
    read = {option: get(option) for option in OPTIONS}
    values = {option.name: _read_option(option, *read[option], root) for option in OPTIONS}
    written = {option.name: f"{where}={value}" for option, (value, where) in read.items()}
    given = {
        option.name
        for option, (value, where) in read.items()
        if where != option.ini or value != option.default
    }
    repeated = tuple(
        where if value == option.of_flag else written[option.name]
        for option, (value, where) in read.items()
        if option.repeated and where == option.flag
    )
    for name, nothing in (("cards", ()), ("all", ()), ("tolerance", None)):
        values[name] = values[name] or nothing
    if values["all"] and "visible" not in given:
        values["visible"] = "session"  # otherwise conditions at module level would skip the tests
    template = folder_of_root(str(values["baseline_dir"]), root)
    folders = [root / template]
    names_torch = "{torch}" in str(template)
    proposed = "" if names_torch else f"{str(values['baseline_dir']).rstrip('/')}/torch-{{torch}}"
    if names_torch:
        from pytest_gpumem.baselines.paths import baseline_folders

        folders = baseline_folders(root, template)
    values["baseline_dir"], values["nearest_dirs"] = folders[0], tuple(folders[1:])
    _require_possible(folders[0], written["baseline_dir"], "baseline_dir")
    _require_possible(root / str(values["snapshots"]), written["snapshots"], "snapshots")
    option_of: dict[object, str] = {}
    for name, path in ((output.name, values[output.name]) for output in OUTPUTS):
        if path is None:
            continue
        file = os.path.normpath(str(path))
        if file in option_of:  # the second would overwrite the first
            problem = f"--gpumem-{option_of[file]} names the same file"
            raise SpecError(f"--gpumem-{name}={path}", problem, "name two different files")
        option_of[file] = name
    if values["against"] and values["update_baselines"]:
        problem = "a comparison with another device's baselines records no baseline"
        remedy = "write only one of the two options"
        raise SpecError("--gpumem-against with --gpumem-update-baselines", problem, remedy)
    folder = str(values["snapshots"]).strip()
    values["snapshots"] = root / folder if folder else None
    derived = {"repeated": repeated, "names_card": "card" in given, "folder_by_torch": proposed}
    return Settings(**values, **derived)  # type: ignore[arg-type] # each was read above


def _read_option(option: Option, value: object, where: str, root: Path) -> object:
    output = next((output for output in OUTPUTS if output.name == option.name), None)
    if output is not None:
        name, on_command_line = str(value).strip(), where.startswith("--")
        _require_possible(root / str(value), f"{where}={value}", output.example)
        if not name and not on_command_line:
            return None
        path = Path(os.path.expanduser(name))  # noqa: PTH111 - a "~" that names no user stays
        path = path if on_command_line else root / path
        if not name or name.endswith(os.sep) or path.is_dir():
            example = f"write {where}={output.example}"
            raise SpecError(f"{where}={value}", "this is not a file", example)
        output.require(f"{where}={value}")
        require_replaceable(path, output.beginning, f"{where}={value}")
        return path.absolute()
    if value == option.default:
        return value
    if isinstance(option.default, bool) and not isinstance(value, bool):
        raise SpecError(f"{where}={value}", "this is not a truth value", f"write {where}=true")
    if option.choices and value not in option.choices:
        choices = " or ".join(f"{where}={choice}" for choice in option.choices)
        raise SpecError(f"{where}={value}", "this is not a valid choice", f"write {choices}")
    if option.name == "baseline_dir" and not str(value).strip():
        raise SpecError(f"{where}=", "this is not a folder", f"write {where}=baselines")
    try:
        return option.read(str(value)) if option.read else value
    except SpecError as error:
        raise SpecError(f"{where}={value}", error.problem, error.remedy) from error


DEVICE_FOLDERS: Final = ("virtual-", "cuda-", "xpu-", "mps-", "mtia-", "hpu-", "npu-")
"""how names of device folders begin; a third-party backend may choose another name"""


def folder_of_root(name: str, root: Path) -> str:
    """Return the baseline folder; a folder above the root gets a subfolder for this root.

    Packages of one repository have separate roots, and modules with equal names: in a shared folder
    ("../baselines") each root has its own subfolder, named by its path from there.
    """
    above = Path(os.path.normpath(name)).parts.count(os.pardir)
    if Path(name).is_absolute() or not 0 < above <= len(root.parts) - 1:
        return name
    if any(path.name.startswith(DEVICE_FOLDERS) for path in (root / name).glob("*-*/")):
        return name  # another root's baselines lie in it directly
    return str(Path(name, *root.parts[-above:]))


def _require_possible(path: Path, argument: str, example: str) -> None:
    """Refuse a path that cannot exist: with a NUL, too long, or not encodable."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    except (OSError, ValueError) as error:  # fail now, not when it is written at the session's end
        from pytest_gpumem.report.text import printable

        problem = error.strerror if isinstance(error, OSError) else error
        raise SpecError(
            printable(argument)
            if len(argument) <= MAX_SHOWN_LENGTH
            else f"{printable(argument[:MAX_SHOWN_LENGTH])}...",
            f"no file can have this name ({problem})",
            f"write a shorter name without special characters, such as {example}",
        ) from None
