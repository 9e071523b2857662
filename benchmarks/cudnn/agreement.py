"""How often cuDNN's versions agree in the workspaces of convolutions drawn at random.

    python -m benchmarks.cudnn.agreement [--cudnn VERSION=PATH ...] [--python PATH ...]

Which plan cuDNN ranks first, and thus the size of the workspace, depends on its version. The tables
show how far the virtual GPU may rely on the answers of another version.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from benchmarks.cudnn.asking import ask, options, there
from benchmarks.harness import line, open_card, publish, table

CARDS = ("RTX 3090", "L4", "A100-80GB", "H100", "RTX 5090")
PASSES = ("forward", "data gradient", "filter gradient")
MAX_WORKSPACE = 2**30
"""bytes of the largest tensor of a convolution"""

Answers = Mapping[str, int | str]
"""bytes, or the error that PyTorch raised, by card, number of the convolution, and pass"""


@dataclass(frozen=True)
class Conv:
    """One convolution; ``last``: in the memory format channels_last."""

    images: tuple[int, ...]
    weights: tuple[int, ...]
    stride: int
    padding: int
    groups: int
    dtype: str
    last: bool

    @property
    def result(self) -> tuple[int, ...]:
        """The output's shape."""
        places = (
            (size + 2 * self.padding - kernel) // self.stride + 1
            for size, kernel in zip(self.images[2:], self.weights[2:], strict=True)
        )
        return self.images[0], self.weights[0], *places

    @property
    def size(self) -> int:
        """Bytes of the input, the weight and the output."""
        shapes = (self.images, self.weights, self.result)
        return sum(math.prod(it) for it in shapes) * (4 if self.dtype == "float32" else 2)


def drawn(count: int, seed: int = 1) -> list[Conv]:
    """Draw convolutions with sizes as in networks, the same ones for the same seed."""
    draw = random.Random(seed)  # noqa: S311 - no secret
    found: list[Conv] = []
    while len(found) < count:
        kernel = draw.choice((1, 3, 3, 3, 5, 7))
        into, out = (
            draw.choice((3, 16, 64, 96, 128, 256, 512)),
            draw.choice((16, 64, 128, 256, 512)),
        )
        groups = draw.choice((1, 1, 1, into)) if into > 3 else 1
        out = into if groups > 1 else out
        if draw.random() < 0.15:
            places = (draw.choice((4, 8)), *[draw.choice((14, 28, 56))] * 2)
        else:
            places = (draw.choice((7, 14, 28, 56, 112, 224)),) * 2
        images = (draw.choice((1, 2, 8, 32)), into, *places)
        weights = (out, into // groups, *[kernel] * len(places))
        padding = draw.choice((kernel // 2, kernel // 2, 0))
        if kernel > min(places) + 2 * padding:
            continue
        dtype = draw.choice(("float32", "float16", "bfloat16"))
        stride, last = draw.choice((1, 1, 2)), draw.random() < 0.4
        one = Conv(images, weights, stride, padding, groups, dtype, last)
        if one.size <= MAX_WORKSPACE and one not in found:
            found.append(one)
    return found


# -- in a process of its own --


def measure(task: dict[str, Any]) -> list[Any]:
    """Run the drawn convolutions on one card; return the answers, and cuDNN's version."""
    from pytest_gpumem.devices.cards import find_card

    device = open_card(find_card(task["card"]))
    from benchmarks.cudnn.figures import taken

    answers: dict[str, int | str] = {}
    for number, conv in enumerate(drawn(task["sweep"])):
        for index, name in enumerate(PASSES):
            before = device.library.convolutions().asked
            answer = taken(conv, index)
            if isinstance(answer, str) or device.library.convolutions().asked > before:
                answers[f"{number} {name}"] = answer  # else PyTorch uses a kernel of its own
    return [answers, device.library.cudnn_found()]


# -- the versions side by side --


def compare(count: int, python: str, cudnns: Mapping[str, str]) -> list[str]:
    """Run the sweep; return a text on how often each two versions of cuDNN agree."""
    answers: dict[str, dict[str, int | str]] = {}
    text = []
    for version, path in cudnns.items():
        of: dict[str, int | str] = {}
        for card in CARDS:
            said = ask(python, path, {"sweep": count, "card": card})
            if isinstance(said, str):
                text.append(f"cuDNN {version}, {card}: {said}")
                continue
            of |= {f"{card} {key}": value for key, value in said[0].items()}
        answers[version] = of
    pairs = list(combinations(answers, 2))
    rows = [[f"{a}, {b}", *agreement(count, answers[a], answers[b])] for a, b in pairs]
    heads = ["cuDNNs", "asked", "the same", "%", *[f"{it} %" for it in PASSES], "off by, median"]
    heads += ["90th percentile", "by 10 % or less, %"]
    return [
        f"{count} convolutions drawn at random, their three passes, on {', '.join(CARDS)};",
        "those are left out for which PyTorch has kernels of its own. How often two versions of",
        "cuDNN take the same workspace. Off by: where they do not, the difference as a share of",
        "the convolution's three tensors; the last column counts the same ones as well.",
        "",
        *text,
        table(rows, heads),
        "",
        *by_card(pairs, answers),
        "",
        *refusals(answers),
    ]


def both(one: Answers, other: Answers) -> list[tuple[str, int, int]]:
    """Return (key, bytes, bytes) for each workspace that both versions answered."""
    keys = [key for key in one if isinstance(one[key], int) and isinstance(other.get(key), int)]
    return [(key, int(one[key]), int(other[key])) for key in keys]


def share(pairs: list[tuple[str, int, int]]) -> str:
    """Return the share of pairs with equal bytes, in percent."""
    return f"{100 * sum(a == b for _, a, b in pairs) / len(pairs):.1f}" if pairs else "-"


def agreement(count: int, one: Answers, other: Answers) -> list[str]:
    """Return a row of the table, on two versions."""
    these = both(one, other)
    convs = drawn(count)
    off = sorted(
        abs(a - b) / next(c.size for i, c in enumerate(convs) if f" {i} " in key)
        for key, a, b in these
        if a != b
    )
    same = len(these) - len(off)
    near = same + sum(it <= 0.1 for it in off)
    passes = [share([it for it in these if it[0].endswith(name)]) for name in PASSES]
    said = [f"{len(these)}", f"{same}", share(these), *passes]
    if not off:
        return [*said, "-", "-", "100.0"]
    upper = off[round(0.9 * (len(off) - 1))]
    near_share = f"{100 * near / len(these):.1f}"
    return [*said, f"{statistics.median(off):.2f}", f"{upper:.2f}", near_share]


def by_card(pairs: list[tuple[str, str]], answers: Mapping[str, Answers]) -> list[str]:
    """Return how often neighbouring versions have the same answer, in percent, by card."""
    rows = []
    for a, b in pairs:
        these = both(answers[a], answers[b])
        of = [share([it for it in these if it[0].startswith(f"{card} ")]) for card in CARDS]
        rows.append([f"{a}, {b}", *of])
    return ["The same, in percent, by card:", table(rows, ["cuDNNs", *CARDS])]


def refusals(answers: Mapping[str, Answers]) -> list[str]:
    """Return the number of answers and the errors of each version."""
    said = []
    for version, of in answers.items():
        errors = [it for it in of.values() if isinstance(it, str)]
        kinds = [f"{errors.count(it)}: {it[:70]}" for it in dict.fromkeys(errors)]
        said.append(f"cuDNN {version}: {len(of)} asked, {len(errors)} refused {'; '.join(kinds)}")
    return said


def main() -> None:
    """Print the tables, and write them to the results."""
    parser = options(__doc__)
    parser.add_argument("--shapes", type=int, default=120, help="convolutions drawn (120)")
    parser.add_argument("--dry", action="store_true", help="record nothing")
    given = parser.parse_args()
    text = [line(), "", *compare(given.shapes, sys.executable, there(given)[1])]
    publish("workspace_sweep", "\n".join(text), keep=not given.dry)


if __name__ == "__main__":
    main()
