"""The fixture ``gpu_memory``: a test's access to its own measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.errors import SpecError
from pytest_gpumem.fit.prober import Prober
from pytest_gpumem.measurement import Peak
from pytest_gpumem.sizes import format_size, parse_tolerance
from pytest_gpumem.torchrun_env import current_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch

    from pytest_gpumem.fit.scaling import Scaling
    from pytest_gpumem.fit.search import Largest
    from pytest_gpumem.testrun.run import PartFigures, Run


class GpuMemory:
    """The fixture ``gpu_memory``: a test's access to its own measurement while it runs."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def device(self) -> torch.device:
        """The first of the test's devices, to make tensors on."""
        return self.devices[0]

    @property
    def devices(self) -> list[torch.device]:
        """The test's devices: as many as its marker says (``devices=2``), else one."""
        import torch

        return [torch.device("cuda", index) for index in self._run.meter.devices]

    @property
    def batch_size(self) -> int:
        """The batch size that the marker declares.

        Raises:
            SpecError: it declares none.
        """
        batch_size = self._run.read_batch_size()
        if batch_size is None:
            raise SpecError(
                "gpu_memory.batch_size",
                "the marker declares no batch size",
                "write @pytest.mark.gpu_memory(batch_size=32)",
            )
        return batch_size

    @property
    def variant(self) -> Mapping[str, object]:
        """The options of the variant that is tried, of the marker's ``variants``; else empty.

        A test passes it on: ``train(**gpu_memory.variant)``, or looks into it:
        ``with torch.autocast("cuda", enabled="amp" in gpu_memory.variant)``.
        """
        return self._run.read_variant()

    @property
    def world_size(self) -> int:
        """The number of ranks, as the marker declares or torchrun has it; else 1."""
        started = current_rank()
        return self._run.spec.world_size or (started.size if started else 1)

    @property
    def rank(self) -> int:
        """Which of them this test is."""
        started = current_rank()
        if self._run.spec.rank is None and started:
            return started.rank
        return self._run.spec.rank or 0

    @property
    def card(self) -> str:
        """The device's name: the card's on the virtual GPU, CUDA's on a real one."""
        return self._run.info.name

    @property
    def computes(self) -> bool:
        """Whether all values are computed: on a real GPU, and with ``values="full"``."""
        return self._run.device.values.all_computed

    @property
    def peak(self) -> Peak:
        """The test's peaks so far, of the fullest device, in bytes."""
        peaks = self._run.meter.peaks()
        return Peak(_most(peaks, "allocated"), _most(peaks, "reserved"))

    @property
    def peak_allocated(self) -> int:
        """Peak bytes in live tensors so far, of the fullest device."""
        return self.peak.allocated

    @property
    def peak_reserved(self) -> int:
        """Peak bytes held by the caching allocator so far, of the fullest device."""
        return self.peak.reserved

    @property
    def allocated(self) -> int:
        """Bytes in the test's live tensors now, of the fullest device."""
        return _most(self._run.meter.counted(), "allocated")

    @property
    def reserved(self) -> int:
        """Bytes that the caching allocator holds for the test now, of the fullest device."""
        return _most(self._run.meter.counted(), "reserved")

    def step(self) -> None:
        """Say that a step of the test has ended, where ``steady=True`` is to go by that.

        Without it steps end with those of the optimizer that stepped first.
        """
        if self._run.spec.steady:
            self._run.meter.steps.mark()

    def assume(self, *, masks: float) -> None:
        """Say what a virtual GPU assumes of values that it does not compute.

        Args:
            masks: the share of an unknown mask that is true, 0.5 if the test does not say; with 1
                all of it is, so that sizes which depend on masks are at their largest.

        Raises:
            SpecError: it is no share.
        """
        number: object = masks  # a caller without types may pass anything
        is_share = isinstance(number, (int, float)) and 0 <= number <= 1
        if not is_share or isinstance(number, bool):
            raise SpecError(
                f"gpu_memory.assume(masks={masks!r})",
                "this is not a share",
                "write a number from 0 (no mask element is true) to 1 (all are true)",
            )
        self._run.assumes = True
        self._run.device.values.assume_masks(masks)

    def measure(self, name: str, **declared: object) -> AbstractContextManager[PartFigures]:
        """Measure a part of the test: ``with gpu_memory.measure("forward", max_gib=2) as part:``.

        A part counts all that the test holds while it runs, and has figures, budget and baseline
        entry of its own. The same name again counts to the same part.

        Args:
            name: unique within the test's parts.
            declared: max_gib, max_allocated_gib, max_reserved_gib, tolerance, batch_size, baseline,
                as on the marker; at_most and less_than, a limit on peak allocated that an earlier
                part tells: ``at_most="eager + 64MiB"``, ``at_most=1.1, of=eager``,
                ``less_than=eager``.

        Returns:
            a context manager that gives :class:`PartFigures`.

        Raises:
            SpecError: a mistake in the name or the declaration.
        """
        return self._run.part(name, declared)

    def largest(  # noqa: PLR0913 - all but the step by name, as users write them
        self,
        step: Callable[[int], object],
        start: int = 1,
        limit: int | None = None,
        *,
        multiple: int = 1,
        headroom: str | None = None,
        baseline: str | None = None,
    ) -> Largest:
        """Find the largest value for which ``step(value)`` fits.

        It fits within the test's ``max_gib`` or card, else on the device. Every probe runs on a
        clean allocator, where the test's live tensors count. The answer was seen to fit, and the
        next value was seen not to; if probes showed a larger value that fits beyond one that does
        not, the result says so. The probes count neither for the test's figures nor for its
        baseline.

        Args:
            step: takes one training step (two, if its optimizer is made in it) with a batch size,
                a sequence length, a depth, an image side: any whole number.
            start: the value to begin with.
            limit: the largest value of interest; None for no limit.
            multiple: only multiples of this are tried.
            headroom: memory that has to stay free: "5%" of what a step may reserve, "512MiB", or
                the larger of "5%, 512MiB".
            baseline: a name, unique within the test's parts: the value has a baseline, and the test
                fails where fewer fit than before.

        Returns:
            the value (0: none fits), its peak, every probe, and the end of the search; as text a
            sentence.

        Raises:
            SpecError: a mistake in an argument. Errors of the step pass through, but for those of
                running out of memory.
        """
        run, call = self._run, "gpu_memory.largest"
        run.require_alone()
        if baseline is not None and (not baseline.strip() or baseline in run.parts):
            raise SpecError(
                f"{call}(baseline={baseline!r})",
                "this name is empty, or a part of the test has it",
                'write for example baseline="batch"',
            )
        capacity = run.meter.capacity
        free = parse_tolerance(headroom).allowance(capacity) if headroom else 0
        if free >= capacity:
            raise SpecError(
                f"{call}(headroom={headroom!r})",
                f"this headroom leaves nothing of {format_size(capacity)}",
                'write for example headroom="5%"',
            )
        cap = run.meter.cap(capacity - free) if free else None
        try:
            largest = self._prober().largest(step, start, limit, multiple=multiple)
        finally:
            if free:
                run.meter.cap(cap)
        if baseline is not None:
            run.searches[baseline] = largest
        return largest

    def scaling(
        self, step: Callable[[int], object], sizes: Iterable[int], *, predict: int | None = None
    ) -> Scaling:
        """Find how a step's memory grows: peak allocated = fixed + per_sample * size.

        The line is by least squares through the sizes that fit, each run on a clean allocator. If
        three or more are not on a line, the source lines are named that are the reason. The probes
        count neither for the test's figures nor for its baseline.

        Args:
            step: takes one training step with a size, as for :meth:`largest`.
            sizes: two or more.
            predict: a size that the line is to be checked at, by running it.

        Returns:
            the lines of allocated and reserved, with their residuals; as text a sentence. All in
            bytes.

        Raises:
            SpecError: a mistake in an argument.
            GpuMemError: fewer than two of the sizes fit.
        """
        self._run.require_alone()
        return self._prober().scaling(step, sizes, predict)

    def _prober(self) -> Prober:
        return Prober(self._run.meter, self._run.root, self._run.progress)


def _most(peaks: Sequence[Peak], which: str) -> int:
    return max((getattr(peak, which) for peak in peaks), default=0)
