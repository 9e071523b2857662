"""Values, workspaces and compiled code of a process with a virtual GPU, and the notes on them.

The measuring process has an :class:`Aspects`, and so does each Python process that it starts.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.devices.torch_import import hide_from_compiler
from pytest_gpumem.devices.virtual.compilation import Compilation
from pytest_gpumem.devices.virtual.gpu_choices import GpuChoices
from pytest_gpumem.devices.virtual.linked_functions import has_checked_functions
from pytest_gpumem.devices.virtual.missing_libraries import CUDNN
from pytest_gpumem.devices.virtual.quirks import install_hooks
from pytest_gpumem.devices.virtual.value_engine import VirtualValues
from pytest_gpumem.notes import Note, NoteKind, notes_of
from pytest_gpumem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from pytest_gpumem.devices.virtual import GuessRows
    from pytest_gpumem.devices.virtual.library import NativeLibrary
    from pytest_gpumem.devices.virtual.linked_functions import LinkedFunctions


class Aspects:
    """Computes values, collects what a GPU may do differently, and watches the compiler."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self.values = VirtualValues(library)
        self.gpu_choices = GpuChoices(library)
        self._compilation = Compilation(self.values.computing_separately, self.gpu_choices)
        self._unanswered = ""

    def install(self) -> None:
        """Patch PyTorch's compiler and other libraries: now, or once they are imported."""
        self._compilation.install()
        hide_from_compiler()
        install_hooks()

    def read_versions(self, torch: ModuleType, stubs: Sequence[str]) -> None:
        """Read CUDA's and cuDNN's versions from torch; note functions that are not implemented.

        Args:
            torch: a build with CUDA.
            stubs: SONAMEs of the CUDA libraries that are not installed.
        """
        major, minor = (int(part) for part in torch.version.cuda.split(".")[:2])
        cudnn = 0
        with suppress(AttributeError):  # a build without cuDNN
            # cudnnGetVersion's number for the cuDNN that PyTorch was compiled for
            parts = map(int, torch._C._cudnn.getCompileVersion())
            cudnn = sum(part * weight for part, weight in zip(parts, (10000, 100, 1), strict=True))
        self._library.set_versions(major * 1000 + minor * 10, cudnn)
        self.gpu_choices.convolutions.set_version(cudnn)
        if any(name.startswith(CUDNN) for name in stubs):
            self.gpu_choices.convolutions.missing_package = f"nvidia-cudnn-cu{major}"
        if not has_checked_functions(torch.__version__):
            self._unanswered = self.linked_functions(torch).sentence(torch.__version__)

    def linked_functions(self, torch: ModuleType | None) -> LinkedFunctions:
        """Return the CUDA functions that torch links, and which of them are not implemented."""
        folder = Path(getattr(torch, "__file__", None) or "").parent / "lib"
        return self._library.linked_functions(folder)

    def begin(self) -> None:
        """Begin a run: reset the state of the previous one."""
        self.gpu_choices.assume_sizes("usual")
        self.gpu_choices.begin()
        self._compilation.begin()
        self._library.forget_managed_peak()
        self.values.restart()

    def notes(self, root: Path) -> list[Note]:
        """Return notes on the run's figures; file names are relative to ``root``."""
        return [*notes_of(NoteKind.VALUES, self.values.notes(root)), *self._notes_beside_values()]

    def report(self) -> tuple[GuessRows, list[Note]]:
        """Return the uncomputed values that this process branched on, and notes on its figures.

        The parent adds up the values of its child processes, and reports equal notes once.
        """
        rows, sentences = self.values.guesses()
        return rows, [*notes_of(NoteKind.VALUES, sentences), *self._notes_beside_values()]

    def _notes_beside_values(self) -> list[Note]:
        """Return notes on the run's figures, except for notes on values."""
        managed = self._library.managed().peak_bytes
        outside = (
            f"{format_size(managed)} of managed memory (cudaMallocManaged), outside PyTorch's "
            "allocator, are not in the peaks: a full GPU moves this memory to the host"
        )
        sentences = {
            NoteKind.WORKSPACES: self.gpu_choices.notes(),
            NoteKind.STREAMS: self.gpu_choices.stream_notes(),
            NoteKind.COMPILATION: self._compilation.notes(),
            NoteKind.TIMING: self._compilation.timing_notes(),
            NoteKind.TORCH: [self._unanswered] if self._unanswered else [],
            NoteKind.OUTSIDE: [outside] if managed else [],
        }
        return [note for kind, texts in sentences.items() for note in notes_of(kind, texts)]
