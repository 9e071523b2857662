"""Measuring outside of pytest: ``with pytest_gpumem.measure() as m: step()``."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.devices import virtual
from pytest_gpumem.devices.select import DEFAULT_CARD, device_of_program
from pytest_gpumem.errors import DeviceError, GpuMemError, SpecError
from pytest_gpumem.meter.meter import ACTIVE, Meter
from pytest_gpumem.spec_fields import read_values

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from pytest_gpumem.devices.base import Values
    from pytest_gpumem.measurement import Measurement, Peak
    from pytest_gpumem.meter.peaks import Tally


def use_virtual_gpu(card: str = DEFAULT_CARD, *, devices: int = 1, values: Values = "auto") -> None:
    """Give this process a virtual GPU: for programs, and for a conftest file.

    Call it before torch is imported. In a session of pytest, all tests see this GPU. Marked tests
    run on its card, unless an option or the marker names another card.

    Args:
        card: a card's name, for example "T4"; ``pytest_gpumem.card_names()`` lists all names.
        devices: the number of GPUs, at most 16.
        values: which values are computed outside marked tests: "auto" (within a budget of work and
            memory; the default), "full" (all) or "off" (none: a step takes about half of the
            time).

    Raises:
        SpecError: the card or the choice of values is unknown.
        DeviceError: torch was imported already, or no virtual GPU can run here.
    """
    values = read_values("values", values)
    device = virtual.load(card)
    device.values.initial = values
    device.named = device.card
    device.card = device.demanded or device.card
    device.show_always(devices)
    import torch  # noqa: F401 - its import shows the GPU


class Measuring:
    """A measurement of a block. Its figures can be read after the block has ended.

    Within a marked test or ``gpumem run`` the block is an additional part, and the figures of the
    test or the program do not change.
    """

    def __init__(self, devices: int) -> None:
        self._devices = devices
        self._stack = ExitStack()
        self._measurement: Measurement | None = None

    def __enter__(self) -> Self:
        device, visible = device_of_program()
        if ACTIVE:
            outer = ACTIVE[-1]
            tally = self._stack.enter_context(outer.part())
            self._stack.push(lambda *_: self._finish(outer, tally))
            return self
        if self._devices > visible:
            if visible:
                raise DeviceError(
                    f"measure(devices={self._devices})",
                    f"{visible} GPU{'s' * (visible != 1)} can be seen here",
                    "request fewer GPUs",
                )
            raise DeviceError(
                "measure()",
                "there is no GPU here",
                "for a virtual GPU, call pytest_gpumem.use_virtual_gpu() before torch is "
                "imported, or measure in a test marked gpu_memory",
            )
        info = device.open(None, visible)
        meter = Meter(device, info, self._devices)
        with ExitStack() as stack:
            stack.callback(meter.stop)
            meter.start(count_held=True)
            stack.push(lambda *_: self._finish(meter, None))
            self._stack = stack.pop_all()
        return self

    def _finish(self, meter: Meter, tally: Tally | None) -> None:
        notes = [] if tally else meter.device.notes(Path.cwd())
        self._measurement = meter.result(tally=tally, notes=notes)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, traceback)

    @property
    def measurement(self) -> Measurement:
        """The block's measurement, with all figures and notes.

        Raises:
            GpuMemError: the block has not ended.
        """
        if self._measurement is None:
            raise GpuMemError(
                "measure()", "the block has not ended", "read the figures after the with statement"
            )
        return self._measurement

    @property
    def peaks(self) -> tuple[Peak, ...]:
        """The peaks in bytes, one per device."""
        return self.measurement.peaks

    @property
    def peak_allocated(self) -> int:
        """Peak bytes in live tensors, of the fullest device."""
        return self.measurement.peak_allocated

    @property
    def peak_reserved(self) -> int:
        """Peak bytes held by the caching allocator, of the fullest device."""
        return self.measurement.peak_reserved


def measure(*, devices: int = 1) -> Measuring:
    """Measure a block: ``with pytest_gpumem.measure() as m: step()``, then ``m.peak_allocated``.

    All memory of this process counts, including a model that was made before the block, because all
    of it has to fit. Before the block, garbage is collected, and cuBLAS's workspaces and cached
    segments are released. So the figures do not depend on earlier work.

    In a marked test, or inside another such block, the block is a part of the test or of the outer
    block. Then nothing is collected or released before it, because that would change the test's
    figures. Earlier garbage that is still allocated counts.

    Args:
        devices: how many devices to measure, from the first.

    Raises:
        SpecError: ``devices`` is not a number of devices.
        DeviceError: the machine has fewer GPUs (when the block begins).
    """
    number: object = devices  # a caller without types may pass anything
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise SpecError(
            f"measure(devices={devices!r})",
            "this is not a number of devices",
            "write devices=1 or more",
        )
    return Measuring(devices)
