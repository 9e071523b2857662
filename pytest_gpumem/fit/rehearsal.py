"""Rehearsing a step: its requests to the allocator made again, for another value, without the step.

PyTorch's caching allocator decides whether a step fits: by rounding, splitting, fragmentation, and
the segments that it gives back at its cap. The same requests with other sizes therefore predict
whether the step would fit with another value, in milliseconds and on any device; a run of the step
checks the prediction.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.meter.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_REQUESTS: Final = 200_000
"""requests of one device that are still rehearsed"""
FAR: Final = 8
"""times the larger of two points up to which a line through them is trusted"""
MAX_POINTS: Final = 3
"""values that a request's size is interpolated through: a constant, a line, a parabola"""


@dataclass(frozen=True)
class Script:
    """The requests and frees of one step at one device's allocator, in their order."""

    sizes: tuple[int, ...]
    """bytes of each request"""
    streams: tuple[int, ...]
    """of each request"""
    order: tuple[int, ...]
    """the next request (-1), or the number of the request that is freed"""

    def like(self, script: Script) -> bool:
        """Return whether both have the same requests in the same order, but for sizes."""
        return self.order == script.order and self.streams == script.streams


def script_of(events: Sequence[dict[str, Any]]) -> Script | None:
    """Return a device's script from its history; None where it cannot be performed again."""
    sizes: list[int] = []
    streams: list[int] = []
    order: list[int] = []
    living: dict[int, int] = {}
    for event in events:
        action = event["action"]
        if action == "alloc":
            living[event["addr"]] = len(sizes)
            sizes.append(event["size"])
            streams.append(event["stream"])
            order.append(-1)
        elif action == "free_completed":
            number = living.pop(event["addr"], None)
            if number is None:  # a block of before: how large it would be is not known
                return None
            order.append(number)
        elif action in {"segment_free", "segment_unmap"}:  # the step emptied the cache
            return None
    if len(order) > MAX_REQUESTS:
        return None
    return Script(tuple(sizes), tuple(streams), tuple(order))


class Rehearsal:
    """Predicts from the scripts of some values whether another value would fit.

    Args:
        stage: a context in which memory may be taken: settled at its beginning and end.
        first: the number of the first device that scripts are of.
    """

    def __init__(self, stage: Callable[[], Any], *, first: int = 0) -> None:
        self._stage = stage
        self._first = first
        self._scripts: dict[int, list[Script]] = {}
        self._answers: dict[int, bool] = {}

    def learn(self, value: int, scripts: Sequence[Script | None]) -> None:
        """Take the scripts of a value that fits, one a device."""
        complete = [script for script in scripts if script is not None]
        if len(complete) == len(scripts):
            self._scripts[value] = complete
            self._answers.clear()

    def largest(self, low: int, high: int | None, highest: int, step: int) -> int | None:
        """Return the largest value that would fit.

        Args:
            low: fits.
            high: does not; None: not known.
            highest: the largest of interest.
            step: only ``low`` plus multiples of it are considered.

        Returns:
            None where nothing can be predicted: fewer than two values are known, or they differ in
            more than sizes.
        """
        points = self._points()
        if points is None:
            return None
        if len(points) < MAX_POINTS:  # of a parabola two points tell little
            highest = min(highest, FAR * points[-1][0])
        if highest <= low:
            return None
        stride = step
        while high is None or low + stride < high:
            value = low + stride
            if value > highest:
                high = highest + step - (highest - low) % step
                break
            if not self._fits(value):
                high = value
                break
            low, stride = value, 2 * stride
        while high - low > step:
            middle = low + (high - low) // (2 * step) * step
            if self._fits(middle):
                low = middle
            else:
                high = middle
        return low

    def _points(self) -> list[tuple[int, list[Script]]] | None:
        """Return the largest values whose scripts are alike; two at least."""
        groups: list[list[tuple[int, list[Script]]]] = []
        for value, scripts in sorted(self._scripts.items()):
            for group in groups:
                if all(map(Script.like, scripts, group[0][1])):
                    group.append((value, scripts))
                    break
            else:
                groups.append([(value, scripts)])
        usable = [group[-MAX_POINTS:] for group in groups if len(group) > 1]
        return max(usable, key=lambda group: group[-1][0], default=None)

    def _fits(self, value: int) -> bool:
        if value not in self._answers:
            points = self._points() or []
            values = [known_value for known_value, _ in points]
            factors = lagrange_weights(values, value)
            with self._stage():
                self._answers[value] = all(
                    perform(
                        self._first + device, [scripts[device] for _, scripts in points], factors
                    )
                    for device in range(len(points[-1][1]))
                )
        return self._answers[value]


def lagrange_weights(values: Sequence[int], at: int) -> list[Fraction]:
    """Return the weights of a polynomial's values at some points that give its value at another."""
    weights = []
    for value in values:
        weight = Fraction(1)
        for node in values:
            if node != value:
                weight *= Fraction(at - node, value - node)
        weights.append(weight)
    return weights


def perform(device: int, scripts: Sequence[Script], factors: Sequence[Fraction]) -> bool:
    """Perform a script's requests; return whether all were met."""
    # Whole numbers and one division a request: thousands of fractions would take seconds.
    scale = 1
    for factor in factors:
        scale *= factor.denominator
    whole = [int(factor * scale) for factor in factors]
    columns = zip(*(script.sizes for script in scripts), strict=True)
    sizes = [
        max(1, -(-sum(w * size for w, size in zip(whole, column, strict=True)) // scale))
        for column in columns
    ]
    blocks = _Blocks(device)
    try:
        numbers = iter(range(len(sizes)))
        for freed in scripts[-1].order:
            if freed < 0:
                number = next(numbers)
                if not blocks.take(sizes[number], scripts[-1].streams[number]):
                    return False
            else:
                blocks.give(freed)
        return True
    finally:
        blocks.give_all()


class _Blocks:
    """The blocks of one rehearsal."""

    def __init__(self, device: int) -> None:
        import torch

        self._device = device
        self._torch = torch
        self._living: dict[int, int] = {}
        self._number = 0

    def take(self, size: int, stream: int) -> bool:
        try:
            address = self._torch.cuda.caching_allocator_alloc(size, self._device, stream)
        except RuntimeError as error:
            if is_out_of_memory(error):
                return False
            raise
        self._living[self._number] = address
        self._number += 1
        return True

    def give(self, number: int) -> None:
        self._torch.cuda.caching_allocator_delete(self._living.pop(number))

    def give_all(self) -> None:
        for number in list(self._living):
            self.give(number)
