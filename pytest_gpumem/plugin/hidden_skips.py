"""Marked tests that were skipped because no GPU was shown while their file was imported.

The virtual GPU is hidden outside of marked tests, unless ``--gpumem-visible=session``: a condition
like ``skipif(not torch.cuda.is_available())`` is evaluated at the import, and holds for good.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from pytest_gpumem.session.hidden_skip import HiddenSkip

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

ABOUT_GPUS: Final = re.compile(r"cuda|gpu|device|accelerator|hardware", re.IGNORECASE)
"""words of a reason that tell of a missing GPU"""


def hidden_skip(
    config: pytest.Config, path: Path, reason: str, *, whole_file: bool = False
) -> HiddenSkip | None:
    """Return the record of a skip that the hidden GPU explains; None of any other.

    ``reason`` has no "Skipped: "; with ``whole_file`` the file was skipped as it was collected.
    """
    from pytest_gpumem.devices import virtual

    question = virtual.question_of(path, config.rootpath)
    if question is None or not (question.direct or ABOUT_GPUS.search(reason)):
        return None
    return HiddenSkip(whole_file, reason, question.place(config.rootpath))


def skip_reason(longrepr: object) -> str:
    """Return the reason of a skipped report: pytest keeps file, line and "Skipped: reason"."""
    message = longrepr[2] if isinstance(longrepr, tuple) else longrepr
    return str(message).removeprefix("Skipped: ")


def skip_decorated(item: pytest.Item) -> bool:
    """Return whether unittest's decorators skip a test: it does so itself, in the call."""
    owners = (getattr(item, "obj", None), getattr(item, "cls", None))
    return any(getattr(owner, "__unittest_skip__", False) for owner in owners)
