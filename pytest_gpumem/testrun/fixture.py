"""The fixture ``gpu_memory``: lets a test read its own measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.errors import SpecError, is_own_error
from pytest_gpumem.fit.prober import Prober
from pytest_gpumem.meter.peaks import fullest
from pytest_gpumem.sizes import format_size, parse_tolerance
from pytest_gpumem.torchrun_env import current_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractContextManager

    import torch

    from pytest_gpumem.fit.scaling import Scaling
    from pytest_gpumem.fit.search import Largest
    from pytest_gpumem.measurement import Peak
    from pytest_gpumem.testrun.run import PartFigures, Run

__tracebackhide__ = is_own_error


class GpuMemory:
    """The fixture ``gpu_memory``: lets a test read its own measurement while it runs."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def device(self) -> torch.device:
        """The first of the test's devices, to make tensors on."""
        return self.devices[0]

    @property
    def devices(self) -> list[torch.device]:
        """The test's devices: the number that its marker declares (``devices=2``), or one."""
        import torch

        return [
            torch.device(self._run.info.device_type, index) for index in self._run.meter.devices
        ]

    @property
    def batch_size(self) -> int:
        """The batch size that the marker declares.

        Raises:
            SpecError: the marker declares no batch size.
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
        """The current variant's options, from the marker's ``variants``; empty without variants.

        A test passes the options on, ``train(**gpu_memory.variant)``, or looks for a name,
        ``with torch.autocast("cuda", enabled="amp" in gpu_memory.variant)``.
        """
        return self._run.read_variant()

    @property
    def world_size(self) -> int:
        """The number of ranks, from the marker or torchrun; otherwise 1."""
        started = current_rank()
        return self._run.spec.world_size or (started.size if started else 1)

    @property
    def rank(self) -> int:
        """The number of this test's rank, from 0."""
        started = current_rank()
        if self._run.spec.rank is None and started:
            return started.rank
        return self._run.spec.rank or 0

    @property
    def card(self) -> str:
        """The device's name: the card on the virtual GPU, CUDA's name on a real GPU."""
        return self._run.info.name

    @property
    def computes(self) -> bool:
        """Whether all values are computed: on a real GPU, and with ``values="full"``."""
        return self._run.device.values.all_computed

    @property
    def peak(self) -> Peak:
        """The test's peaks so far, of the fullest device, in bytes."""
        return fullest(self._run.meter.peaks())

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
        return fullest(self._run.meter.counted()).allocated

    @property
    def reserved(self) -> int:
        """Bytes that the caching allocator holds for the test now, of the fullest device."""
        return fullest(self._run.meter.counted()).reserved

    def step(self) -> None:
        """Mark the end of a step, for ``steady=True``.

        Without such a call, a step ends whenever the first optimizer that steps twice has stepped.
        If no optimizer steps twice, it ends whenever any optimizer has stepped.
        """
        self._run.meter.steps.mark()

    def assume(self, *, masks: float) -> None:
        """Set which values the virtual GPU assumes for values that it does not compute.

        Args:
            masks: the share of an unknown mask that is true; the default is 0.5. With 1, the whole
                mask is true, so sizes that depend on masks are at their maximum.

        Raises:
            SpecError: ``masks`` is not a fraction.
        """
        number: object = masks  # a caller without types may pass anything
        is_share = isinstance(number, (int, float)) and 0 <= number <= 1
        if not is_share or isinstance(number, bool):
            raise SpecError(
                f"gpu_memory.assume(masks={masks!r})",
                "this is not a fraction",
                "write a number from 0 (no mask element is true) to 1 (all are true)",
            )
        self._run.device.values.assume_masks(masks)

    def measure(self, name: str, **declared: object) -> AbstractContextManager[PartFigures]:
        """Measure a part of the test: ``with gpu_memory.measure("forward", max_gib=2) as part:``.

        A part counts all memory of the test while the part runs. It has its own figures, budget and
        baseline. Blocks with the same name are one part: its peaks are the highest of all blocks,
        and the memory that it holds at the end is that of the last block. They declare the same.

        Args:
            name: unique within the test's parts.
            declared: fields of the marker that a part may have (docs/reference/marker.md), such as
                max_allocated_gib, tolerance and baseline; at_most, less_than, at_least and
                more_than, limits that depend on an earlier part, or on the memory before:
                ``at_most="eager + 64MiB"``, ``at_most=1.1, of=eager``, ``less_than=eager``,
                ``at_most="before + 50MiB"``; figure, the figure that those limits apply to:
                "allocated" (peak), "reserved" (peak), "active" (peak) or "held" (allocated at the
                end).

        Returns:
            a context manager that yields :class:`PartFigures`.

        Raises:
            SpecError: a mistake in the name or the declaration, or another one than that of an
                earlier block with this name.
        """
        return self._run.part(name, declared)

    def ordered(self, chain: str, *, figure: str = "allocated") -> None:
        """Require an order of measured parts: ``gpu_memory.ordered("leaf < block <= whole")``.

        Args:
            chain: names of parts with "<" and "<=" between them.
            figure: as for :meth:`measure`.

        Raises:
            SpecError: a mistake in the order.
        """
        self._run.order(chain, figure)

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

        The limit is the test's ``max_gib`` or card, else the device's memory. Every probe runs on
        a clean allocator, and the test's live tensors count. The answer ran and fitted; unless the
        search ended for another reason, the next value ran and did not fit. If probes show that a
        larger value fits although a smaller value does not, the result says so. Probes do not count
        in the test's figures and baseline.

        Args:
            step: a function that takes one training step (two steps, if it creates the optimizer).
                Its argument is any whole number, such as a batch size, a sequence length, a depth,
                or the side of an image.
            start: the first value to try.
            limit: the largest value to try; None for no limit.
            multiple: only multiples of this number are tried.
            headroom: memory that must stay free: "5%" of the memory that a step may reserve,
                "512MiB", or the larger of "5%, 512MiB".
            baseline: a name, unique within the test's parts. The answer then has a baseline, and
                the test fails if the answer is smaller than in the baseline.

        Returns:
            the largest value, with its peak, all probes, and the reason why the search ended. The
            value is 0 if no value fits. ``str()`` of the result is a sentence.

        Raises:
            SpecError: a mistake in an argument. Errors of the step pass through, except for
                out-of-memory errors.
        """
        run, call = self._run, "gpu_memory.largest"
        if baseline is not None and (not baseline.strip() or baseline in run.parts):
            raise SpecError(
                f"{call}(baseline={baseline!r})",
                "this name is empty, or a part of the test has it",
                'write for example baseline="batch"',
            )
        capacity = run.meter.room.capacity
        free = parse_tolerance(headroom).allowance(capacity) if headroom else 0
        if free >= capacity:
            raise SpecError(
                f"{call}(headroom={headroom!r})",
                f"this headroom leaves nothing of {format_size(capacity)}",
                'write for example headroom="5%"',
            )
        cap = run.meter.room.cap(capacity - free) if free else None
        try:
            largest = self._prober().largest(step, start, limit, multiple=multiple)
        finally:
            if free:
                run.meter.room.cap(cap)
        if baseline is not None:
            run.searches[baseline] = largest
        return largest

    def scaling(
        self, step: Callable[[int], object], sizes: Iterable[int], *, predict: int | None = None
    ) -> Scaling:
        """Find how a step's memory grows: peak allocated = fixed + per_sample * size.

        Each size runs on a clean allocator. The line is fitted by least squares to the sizes that
        fit. If three or more sizes are not on a line, the result names the source lines that are
        the reason. Probes do not count in the test's figures and baseline.

        Args:
            step: a function that takes one training step with a size, as for :meth:`largest`.
            sizes: two or more sizes.
            predict: one more size, which also runs, to check the line.

        Returns:
            the lines of allocated and reserved memory in bytes, with their residuals. ``str()`` of
            the result is a sentence.

        Raises:
            SpecError: a mistake in an argument.
            GpuMemError: fewer than two of the sizes fit.
        """
        return self._prober().scaling(step, sizes, predict)

    def _prober(self) -> Prober:
        return Prober(self._run.meter, self._run.progress, self._run.breakdown)
