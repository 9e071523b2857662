"""Report tests that were skipped because no GPU was visible while their file was imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_NOUNS: Final = {
    False: ("1 marked test", "marked tests"),
    True: ("1 file of marked tests", "files of marked tests"),
}


class HiddenSkip(NamedTuple):
    """A test, or file of tests, that a condition skipped while the GPU was hidden."""

    whole_file: bool
    reason: str
    place: str
    """the line that looked for GPUs: "tests/test_model.py:12" """


def hidden_skip_lines(skips: Iterable[HiddenSkip]) -> Iterator[str]:
    """Yield, for each reason, a sentence on the tests and one on the files skipped for it."""
    groups: dict[tuple[bool, str], list[HiddenSkip]] = {}
    for skip in skips:
        groups.setdefault((skip.whole_file, skip.reason), []).append(skip)
    for (whole_file, reason), members in groups.items():
        singular, several = _NOUNS[whole_file]
        subject = f"{singular} was" if len(members) == 1 else f"{len(members)} {several} were"
        yield (
            f"{subject} skipped ({reason}): {members[0].place} looked for GPUs during its "
            "import, when no GPU was visible; --gpumem-visible=session shows the virtual "
            "GPU from the start"
        )
