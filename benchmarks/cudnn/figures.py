"""Workspaces of convolutions as PyTorch's allocator counts them, in bytes.

Imported once the virtual GPU is loaded, by measured.py and agreement.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F  # noqa: N812 - its usual name

if TYPE_CHECKING:
    from benchmarks.cudnn.agreement import Conv

Shapes = tuple[list[int], list[int]]


@torch.no_grad()
def workspace(shapes: Shapes, dtype: str, *, bias: bool, padding: int, asked: bool) -> int:
    """Return the bytes that a convolution allocates in addition to its output.

    With ``asked``, the requested bytes; else those of the block, which may exceed the request by up
    to 1 MiB, depending on what else the process has cached.
    """
    x, w = (torch.zeros(it, dtype=getattr(torch, dtype), device="cuda") for it in shapes)
    b = torch.zeros(len(w), dtype=x.dtype, device="cuda") if bias else None
    call = F.conv2d if x.dim() == 4 else F.conv3d
    _reset()
    y = call(x, w, b, padding=padding)
    kind = "requested_bytes" if asked else "allocated_bytes"
    stats = torch.cuda.memory_stats()
    size = stats[f"{kind}.all.peak"] - stats[f"{kind}.all.current"]
    del y
    return size


@torch.no_grad()
def peak(shapes: Shapes, dtype: str, *, bias: bool, padding: int, asked: bool) -> int:
    """Return the peak of the script in pytorch/pytorch#166643, with 10 of its 100 rounds."""
    assert not asked
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.empty_cache()
    all_shapes = [*shapes, shapes[1][:1]] if bias else [*shapes]
    tensors = [torch.randn(it, device="cuda").type(getattr(torch, dtype)) for it in all_shapes]
    for _ in range(10):
        out = F.conv3d(*tensors, padding=padding)
    torch.cuda.synchronize()
    del out
    return torch.cuda.max_memory_allocated()


def taken(conv: Conv, index: int) -> int | str:
    """Return the workspace of a pass, or its error; 0: forward, 1: data, 2: filter gradient."""
    form = torch.contiguous_format
    if conv.last:
        form = torch.channels_last if len(conv.images) == 4 else torch.channels_last_3d
    shapes = (conv.images, conv.weights, conv.result)
    dtype = getattr(torch, conv.dtype)
    x, w, g = (torch.empty(it, dtype=dtype, device="cuda", memory_format=form) for it in shapes)
    places = len(conv.images) - 2
    told = [[conv.stride] * places, [conv.padding] * places, [1] * places]
    told += [False, [0] * places, conv.groups]
    _reset()
    try:
        if index == 0:
            out = torch.ops.aten.convolution(x, w, None, *told)
        else:
            mask = [index == 1, index == 2, False]
            out = torch.ops.aten.convolution_backward(g, x, w, None, *told, mask)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    size = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del out
    return size


def _reset() -> None:
    torch.cuda.empty_cache()  # the workspace gets a segment of its own
    torch.cuda.reset_peak_memory_stats()
