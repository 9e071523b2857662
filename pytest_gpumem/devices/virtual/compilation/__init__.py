"""``torch.compile`` on the virtual GPU: as on a GPU, but for kernels that are picked by time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.devices.torch_import import IMPORTS
from pytest_gpumem.devices.virtual.compilation import compiled_code, compiled_numbers, max_autotune
from pytest_gpumem.notes import NoteKind, notes_of

if TYPE_CHECKING:
    from pytest_gpumem.notes import Note


class Compilation:
    """What is compiled, and which compiled code runs."""

    def __init__(self) -> None:
        self._max_autotune = max_autotune.MaxAutotuneSwitch()
        self._compiled_code = compiled_code.CompiledCode()

    def install(self) -> None:
        """Wait for the imports of PyTorch's compiler."""
        IMPORTS.call_after(max_autotune.MODULE, self._max_autotune.install)
        IMPORTS.call_after(compiled_code.OUTPUT, self._compiled_code.install)
        IMPORTS.call_after(compiled_numbers.MODULE, compiled_numbers.trace_numbers)

    def begin(self) -> None:
        """Begin to watch a run."""
        self._max_autotune.begin()
        self._compiled_code.begin()

    def notes(self) -> list[Note]:
        """Return notes on the run: what was left out, and that its figures are less sure."""
        sentences = [*self._max_autotune.notes(), *self._compiled_code.notes()]
        return [*notes_of(NoteKind.COMPILATION, sentences)]
