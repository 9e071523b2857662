"""Convolution nets of torch 2.6 that are furthest off, with workspaces at single convolutions.

    python -m benchmarks.cudnn.taken_apart

It needs torch 2.6.0 and torchvision 0.21.0. Their cuDNN 9.1 cannot be asked, so the rows of
results/published.txt have no workspaces. Here one is allocated behind a convolution or its
gradients, as PyTorch does, to see which place and size brings the peak to the published one.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.harness import MIB, in_fork, line, publish, table
from benchmarks.published.rows import KINDS, Row, read

os.environ["GPUMEM_CUDNN"] = "none"

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor

    from pytest_gpumem.devices.virtual.device import VirtualDevice

NETS = ("MnasNet", "MobileNetV2", "ConvNeXtTiny", "MNASNet", "mobilenet_v2", "convnext_tiny")
SIDE = 43
"""of the images behind the first convolution of MNASNet and MobileNetV2"""


@dataclass(frozen=True)
class Place:
    """Where workspaces lie, and how large they are.

    Attributes:
        size: bytes, by a convolution's input, filter and result, and whether it is backwards.
        small: cuBLAS has its small workspaces.
    """

    name: str
    size: Callable[[Tensor, Tensor, Tensor, bool], float] = lambda *_: 0
    small: bool = False


def bytes_of(*tensors: Tensor) -> int:
    """Return what tensors take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def first_backward(mib: float) -> Callable[[Tensor, Tensor, Tensor, bool], float]:
    """Return the size of a workspace for the gradient of the first filter."""
    return lambda x, _w, _y, backward: mib * MIB * len(x) if backward and x.shape[1] == 3 else 0


def expanding(x: Tensor, w: Tensor, y: Tensor, backward: bool) -> float:
    """Return what cuDNN 9.8's engine 34 takes for the gradient of 16 channels at 43x43.

    Copies of input and result, and 128 channels of the images: 1.354 MiB a sample where it makes
    48 channels of them, 1.693 for 96.
    """
    if not backward or w.shape[1] != 16 or x.shape[-1] != SIDE:
        return 0
    return bytes_of(x, y) + len(x) * 128 * SIDE * SIDE * 4


def downsampling(x: Tensor, _w: Tensor, y: Tensor, backward: bool) -> float:
    """Return copies of input and result of ConvNeXt's three convolutions of 2x2."""
    return bytes_of(x, y) if not backward and x.shape[1] != 3 else 0


DEPTHWISE = (
    Place("no workspace"),
    *(Place(f"first, {mib} MiB a sample", first_backward(mib)) for mib in (1.6, 1.7, 1.8, 1.9)),
    Place("expansion, engine 34", expanding),
)
CONVNEXT = (
    Place("no workspace"),
    Place("small cuBLAS", small=True),
    Place("2x2, copies", downsampling),
)


def workspaces(place: Place) -> AbstractContextManager[object]:
    """Return a context in which convolutions have the workspaces of a place."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten

    class Workspaces(TorchDispatchMode):
        def __torch_dispatch__(
            self,
            func: Callable[..., Tensor],
            _types: object,
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Tensor:
            result = func(*args, **(kwargs or {}))
            size = 0.0
            if func is aten.convolution.default:
                images, groups = args[0], args[8]
                size = place.size(images, args[1], result, False)
            elif func is aten.convolution_backward.default:
                images, groups = args[1], args[9]
                size = place.size(images, args[2], args[0], True)
            if size and groups != images.shape[1]:  # depthwise ones have kernels of PyTorch's own
                torch.empty(int(size), dtype=torch.uint8, device="cuda")
            return result

    return Workspaces()


def work(device: VirtualDevice, row: Row, place: Place) -> Iterator[float]:
    """Yield the peak of a row with the workspaces of a place, in MiB; run in a fork."""
    from benchmarks.published import xmem
    from pytest_gpumem.devices.cards import find_card

    if place.small:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    device.open(find_card(row.card), 1)
    with workspaces(place):
        yield xmem.vision_step(**row.call[2])


def tables(device: VirtualDevice) -> Iterator[str]:
    """Yield the table of each kind of net."""
    rows = [row for row in read() if row.kind == KINDS[1] and not row.real_oom]
    rows = [row for row in rows if row.name.split()[0] in NETS and row.torch == "2.6.0"]
    for places, named in ((DEPTHWISE, ("M", "m")), (CONVNEXT, ("C", "c"))):
        lines = []
        for row in (row for row in rows if row.name.startswith(named)):
            peaks = [in_fork(work, device, row, place) for place in places]
            differences = [f"{peak - row.real:+.0f}" for peak in peaks]
            lines.append([row.name, row.card, f"{row.real:.0f}", *differences])
            print(*lines[-1], file=sys.stderr, flush=True)
        heads = ["step", "card", "real MiB", *(place.name for place in places)]
        yield table(lines, heads)


def main() -> None:
    """Print and keep the tables."""
    from pytest_gpumem.devices.cards import CARDS
    from pytest_gpumem.devices.virtual.device import VirtualDevice

    device = VirtualDevice.load(CARDS["RTX 3060"])
    import torch
    import torchvision

    versions = f"torch {torch.__version__}, torchvision {torchvision.__version__}"
    title = "Peak reserved, virtual less real, in MiB, with workspaces at single convolutions"
    publish("taken_apart", "\n".join([title, line(), versions, "", "\n\n".join(tables(device))]))


if __name__ == "__main__":
    main()
