"""Rehearsing a step: its requests to the allocator made again, for another value, without the step.

PyTorch's caching allocator decides whether a step fits: by rounding, splitting, fragmentation, and
the segments that it gives back at its cap. The same requests with other sizes therefore predict
whether the step would fit with another value, in milliseconds and on any device; a run of the step
checks the prediction.
"""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.recording.recording import Recording
from pytest_gpumem.replay.request_script import RequestScript, ServedRequests

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

FAR: Final = 8
"""times the larger of two points up to which a line through them is trusted"""
MAX_POINTS: Final = 3
"""values that a request's size is interpolated through: a constant, a line, a parabola"""


def rehearsable(events: Sequence[dict[str, Any]]) -> RequestScript | None:
    """Return a device's script from its history; None where it cannot be performed again."""
    script = RequestScript.read(Recording(events=[list(events)]), 0)
    if script is None or None in script.log.taken_back.values():
        return None  # how large a block of before would be is not known
    is_plain = all(action in {"take", "give"} for _, action, _ in script.steps)
    return script if is_plain else None  # else the step emptied the cache


def shape(script: RequestScript) -> Hashable:
    """Return the common part of scripts that differ in sizes alone."""
    order = tuple(number if action == "give" else -1 for _, action, number in script.steps)
    return order, tuple(request.stream for request in script.requests)


class Rehearsal:
    """Predicts from the scripts of some values whether another value would fit.

    ``stage`` is a context in which memory may be taken, settled at its beginning and end; ``first``
    is the number of the first device that scripts are of.
    """

    def __init__(self, stage: Callable[[], Any], *, first: int = 0) -> None:
        self._stage = stage
        self._first = first
        self._scripts: dict[int, list[RequestScript]] = {}
        self._shapes: dict[int, tuple[Hashable, ...]] = {}
        self._answers: dict[int, bool] = {}

    def learn(self, value: int, scripts: Sequence[RequestScript | None]) -> None:
        """Take the scripts of a value that fits, one a device."""
        complete = [script for script in scripts if script is not None]
        if len(complete) == len(scripts):
            self._scripts[value] = complete
            self._shapes[value] = tuple(map(shape, complete))
            self._answers.clear()

    def largest(self, low: int, high: int | None, highest: int, step: int) -> int | None:
        """Return the largest value that would fit.

        ``low`` fits, ``high`` does not (None: not known). Only ``low`` plus multiples of ``step``
        up to ``highest`` are considered.

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

    def _points(self) -> list[tuple[int, list[RequestScript]]] | None:
        """Return the largest values with scripts that are alike; two at least."""
        groups: defaultdict[Hashable, list[tuple[int, list[RequestScript]]]] = defaultdict(list)
        for value, scripts in sorted(self._scripts.items()):
            groups[self._shapes[value]].append((value, scripts))
        usable = [group[-MAX_POINTS:] for group in groups.values() if len(group) > 1]
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


def perform(device: int, scripts: Sequence[RequestScript], factors: Sequence[Fraction]) -> bool:
    """Perform a script's requests; return whether all were met."""
    # Whole numbers and one division a request: thousands of fractions would take seconds.
    scale = 1
    for factor in factors:
        scale *= factor.denominator
    whole = [int(factor * scale) for factor in factors]
    columns = zip(*(script.requests for script in scripts), strict=True)
    sizes = [
        max(1, -(-sum(w * like.size for w, like in zip(whole, alike, strict=True)) // scale))
        for alike in columns
    ]
    served = ServedRequests(device)
    try:
        for _, action, number in scripts[-1].steps:
            if action == "give":
                served.give(number)
            elif not served.take(number, sizes[number], scripts[-1].requests[number].stream):
                return False
        return True
    finally:
        served.give_all()
