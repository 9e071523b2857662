"""Run one session's marked tests: begin each before its setup, and finish it after its call."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.baselines.store import BaselineStore
from pytest_gpumem.devices.base import FOREIGN_KERNELS
from pytest_gpumem.errors import DeviceError, GpuMemError
from pytest_gpumem.meter.out_of_memory import find_out_of_memory
from pytest_gpumem.notes import NoteKind
from pytest_gpumem.session.origin import session_accept_command
from pytest_gpumem.sizes import format_size
from pytest_gpumem.testrun.explainer import Explainer
from pytest_gpumem.testrun.judging import Judging
from pytest_gpumem.testrun.pipeline import Pipeline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpumem.devices.select import Choice
    from pytest_gpumem.judge.result import Result
    from pytest_gpumem.session.settings import Settings
    from pytest_gpumem.spec import MemorySpec
    from pytest_gpumem.testrun.marked_item import MarkedItem
    from pytest_gpumem.testrun.rerun import Runner
    from pytest_gpumem.testrun.run import Run

NOT_COMPUTED = (
    "the virtual GPU did not compute some values: if this caused the error, guard this code "
    'with `if gpu_memory.computes:` or use values="full" (--gpumem-values=full, for a program '
    "--values=full)"
)
LOST_TO_KERNELS = (
    f"the virtual GPU did not compute some values: {FOREIGN_KERNELS} compute none, not "
    'even with values="full"; if this caused the error, guard this code with '
    "`if gpu_memory.computes:`, or check these values on the CPU or on a real GPU"
)
NOT_COMPUTABLE = (
    "the virtual GPU did not compute some values, although it computed all that it can: "
    "TorchScript's fused code and CUDA graphs compute no values; check these values "
    "on the CPU or on a real GPU"
)
OF_COMPILED = (
    "on the virtual GPU values in code of torch.compile may be unknown, and sizes that depend on "
    'computed values may not match them: values="off" (--gpumem-values=off) computes none'
)


class MemorySession:
    """One process's marked tests, with their device, baselines and results."""

    def __init__(
        self, settings: Settings, runner: Runner, launcher: tuple[str, ...] = ("pytest",)
    ) -> None:
        self.settings, self.runner = settings, runner
        strict = settings.provenance == "fail"
        self.store = BaselineStore(settings.baseline_dir, follow_provenance=strict)
        nearest_stores = [BaselineStore(folder) for folder in settings.nearest_dirs]
        policy = replace(
            settings.policy, launcher=launcher, accept=session_accept_command(settings)
        )
        judging = Judging([self.store, *nearest_stores], policy)
        device = runner.choice.device
        wanted = settings.attribution != "off" or settings.snapshots is not None
        if not wanted or device is None or not device.explains():
            self.explainer = Explainer(judging)
        else:
            # explain is imported only here: measuring does not depend on it.
            from pytest_gpumem.explain.answers import PeakExplainer
            from pytest_gpumem.explain.explanations import ExplainPolicy

            explain_policy = ExplainPolicy(
                attribution=settings.attribution,
                snapshots=settings.snapshots,
                timelines=settings.html is not None,
                updating=settings.update_baselines,
                reporting=settings.json is not None,
            )
            self.explainer = PeakExplainer(self.runner, judging, explain_policy)
        judging.explain = self.explainer.explain
        self._judging = judging
        self._pipeline = Pipeline(self.runner, judging, self.explainer, settings.snapshots)

    @property
    def choice(self) -> Choice:
        """The session's device."""
        return self.runner.choice

    @property
    def run(self) -> Run | None:
        """The marked test that runs now; None outside of one."""
        return self.runner.run

    def begin(self, item: MarkedItem, spec: MemorySpec) -> None:
        """Open the device for a test; ``run`` stays None if the session has no device.

        Raises:
            TooSmallError: the machine has too few or too small GPUs for the test.
            DeviceError: the device does not match what the test declares, or is of another type
                than that of ``--gpumem-against``.
        """
        self.runner.begin(
            item,
            spec,
            record=self.explainer.records(spec, predicted=self.choice.card is not None),
            values=spec.values or self.settings.values,
            explainer=self.explainer,
        )
        if self.run is None:
            return
        try:
            self._judging.require_alike(self.run.info)
            if self.settings.skip_too_large:
                self._judging.require_room(item, spec, self.run.info)
        except DeviceError:
            self.runner.end()
            raise

    def finish(
        self, item: MarkedItem, error: BaseException | None, *, debugging: bool = False
    ) -> list[Result]:
        """Measure, explain and judge a test that has ended, and its parts.

        With ``debugging`` the test is not run again, so that a debugger sees the error's frames. A
        test with another error than running out of memory or a server's refusal to start has no
        results.
        """
        run = self.runner.run
        assert run is not None  # noqa: S101 - for the type checker
        results = self._pipeline.finish(item, error, debugging=debugging)
        if error is not None:
            _explain_values(run, error)
        return results

    def finish_torn_down(self, item: MarkedItem, results: Sequence[Result]) -> list[Result]:
        """Judge the memory that a test left behind; see :meth:`Pipeline.finish_torn_down`."""
        return self._pipeline.finish_torn_down(item, results)

    def end(self) -> None:
        """Release the device."""
        self.runner.end()


def _explain_values(run: Run, error: BaseException) -> None:
    """Add to a test's error that values which the virtual GPU did not compute may be its cause."""
    own, values = isinstance(error, GpuMemError), run.device.values
    # Tests and libraries raise these errors for wrong values; PyTorch raises a RuntimeError for
    # wrong sizes.
    kinds: tuple[type, ...] = (AssertionError, ValueError, ArithmeticError, LookupError)
    if "pytest" in sys.modules:  # not in gpumem run
        kinds += (sys.modules["pytest"].fail.Exception,)
    of_values = isinstance(error, kinds) and not own
    of_sizes = isinstance(error, RuntimeError) and not (
        own
        or isinstance(error, (NotImplementedError, RecursionError))
        or find_out_of_memory(error) is not None
    )
    if not (of_values or of_sizes) or not values.has_guessed(failed=of_values):
        return
    measured = run.measurement()
    compiled = any(note.kind is NoteKind.COMPILATION for note in measured.notes)
    if compiled and not of_values:
        reason = OF_COMPILED
    elif values.all_computed:
        reason = NOT_COMPUTABLE
    else:
        reason = LOST_TO_KERNELS if values.lost_to_kernels else NOT_COMPUTED
    # This is what add_note() does in Python 3.11; from that version on pytest shows the notes.
    vars(error).setdefault("__notes__", []).append(
        f"{reason}; the peak before the failure was {format_size(measured.peak_allocated)} "
        f"allocated, {format_size(measured.peak_reserved)} reserved"
    )
