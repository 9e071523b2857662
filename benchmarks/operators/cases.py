"""The calls of results.py: PyTorch's operators with their samples, and torchvision's.

Besides plain calls there are calls in place, calls with ``out=``, samples with sparse layouts and
with jagged nested tensors, and operators on lists of tensors (``_foreach_add``).
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.operators.sweep import database, kinds_of, name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

SPARSE = ("sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")


CRASHING = {"split_with_sizes"}
"""operators whose backward pass with nested tensors crashes, also on the CPU (torch 2.15)"""


class Case(NamedTuple):
    """One call."""

    label: str
    """type and variant"""
    function: Callable[..., Any]
    sample: Any
    """PyTorch's SampleInput, on the host"""
    grad: bool
    """whether the results are differentiated"""


Entries = dict[str, "Callable[[Iterable[str], int], Iterator[Case]]"]
"""by operator: a function that yields calls, given names of types and most samples per type"""


FOREACH = ("unary", "binary", "pointwise", "reduce", "other")
"""kinds of operators on lists of tensors; PyTorch's tests have a list of operators for each kind"""


def entries() -> Entries:
    """Return a function per operator that yields its calls."""
    plain = database()  # first: it replaces a missing package that PyTorch's tests import
    from torch.testing._internal import common_methods_invocations as lists
    from torch.testing._internal.opinfo.definitions.nested import njt_op_db

    calls: Entries = {name_of(op): partial(plain_calls, op) for op in plain}
    foreach = chain.from_iterable(getattr(lists, f"foreach_{kind}_op_db") for kind in FOREACH)
    calls |= {op.name: partial(list_calls, op) for op in foreach}
    jagged = (op for op in njt_op_db if op.supports_njt)
    calls |= {f"nested {name_of(op)}": partial(jagged_calls, op) for op in jagged}
    calls |= {f"torchvision {name}": partial(vision_calls, name) for name in vision()}
    return calls


def differentiates(op: Any, kind: Any) -> bool:  # noqa: ANN401 - an OpInfo, a type
    """Return whether an operator has gradients for a type on both devices."""
    backward = (op.supported_backward_dtypes(device) for device in ("cpu", "cuda"))
    return op.supports_autograd and all(kind in kinds for kinds in backward)


def first(most: int, samples: Callable[..., Iterable[Any]], *kinds: object) -> Iterator[Any]:
    """Yield a function's first samples, up to the first one that cannot be made."""
    iterator = None
    for _ in range(most):
        try:
            iterator = iterator or iter(samples("cpu", *kinds, requires_grad=False))
            sample = next(iterator, None)
        except Exception:  # noqa: BLE001 - PyTorch's own code
            return
        if sample is None:
            return
        if not sample.kwargs.get("dropout_p"):
            yield sample


def plain_calls(op: Any, kinds: Iterable[str], most: int) -> Iterator[Case]:  # noqa: ANN401
    """Yield an operator's calls: plain, in place, with out=, of sparse tensors."""
    import torch

    for kind in kinds_of(op, kinds):
        name, grad = str(kind)[6:], differentiates(op, kind)
        for sample in first(most, op.sample_inputs, kind):
            yield Case(name, op, sample, grad)
            if op.inplace_variant is not None and not sample.broadcasts_input:
                yield Case(f"{name} in place", op.inplace_variant, sample, grad=False)
            if op.supports_out:
                yield Case(f"{name} out=", partial(into_out, op), sample, grad=False)
        for name_of_layout in SPARSE:
            layout = getattr(torch, name_of_layout)
            if op.supports_sparse_layout(layout):
                for sample in first(most, partial(op.sample_inputs_sparse, layout), kind):
                    yield Case(f"{name} {name_of_layout}", op, sample, grad=False)


def into_out(op: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - an operator's
    """Run an operator with ``out=``: empty tensors with the types of its results."""
    import torch

    results = op(*args, **kwargs)
    if isinstance(results, torch.Tensor):
        return op(*args, **kwargs, out=results.new_empty(0))
    out = [result.new_empty(0) for result in results]
    return op(*args, **kwargs, out=tuple(out) if isinstance(results, tuple) else out)


def list_calls(op: Any, kinds: Iterable[str], most: int) -> Iterator[Case]:  # noqa: ANN401
    """Yield the calls of an operator on lists of tensors."""
    samples = partial(op.sample_inputs, num_input_tensors=[3], noncontiguous=False)
    for kind in kinds_of(op, kinds):
        for sample in first(2 * most, samples, kind):
            sample.kwargs.pop("disable_fastpath", None)
            for variant, label in ((op.method_variant, ""), (op.inplace_variant, " in place")):
                if variant is not None:
                    yield Case(f"{str(kind)[6:]}{label}", variant, sample, grad=False)


def jagged_calls(op: Any, kinds: Iterable[str], most: int) -> Iterator[Case]:  # noqa: ANN401
    """Yield an operator's calls with jagged nested tensors."""
    if "float32" in kinds:
        for kind in kinds_of(op, ["float32"]):
            for sample in first(2 * most, op.sample_inputs, kind):
                grad = differentiates(op, kind) and op.name not in CRASHING
                yield Case(str(kind)[6:], op.op, sample, grad)


def vision_calls(name: str, kinds: Iterable[str], most: int) -> Iterator[Case]:
    """Yield the calls of an operator of torchvision."""
    import torch
    from torch.testing._internal.opinfo.core import SampleInput

    function, arguments, grad = vision()[name]
    for kind in kinds:
        if kind in {"float32", "bfloat16"}:
            for args in arguments(getattr(torch, kind))[:most]:
                yield Case(kind, function, SampleInput(args[0], args=tuple(args[1:])), grad)


def vision() -> dict[str, tuple[Callable[..., Any], Callable[[Any], list[Any]], bool]]:
    """Return torchvision's operators: function, arguments for a type, whether it has gradients."""
    try:
        from torchvision import ops
    except ImportError:
        return {}
    import torch

    def boxes(kind: Any, count: int = 40) -> Any:  # noqa: ANN401 - tensors
        corners = torch.rand(count, 4, generator=torch.Generator().manual_seed(count)) * 4
        corners[:, 2:] += corners[:, :2]
        return corners.to(kind)

    def scores(kind: Any, count: int = 40) -> Any:  # noqa: ANN401
        return torch.linspace(0, 1, count).to(kind)

    def rois(kind: Any, count: int = 5) -> Any:  # noqa: ANN401
        return torch.cat([torch.zeros(count, 1).to(kind), boxes(kind, count)], 1)

    def image(kind: Any, channels: int = 4) -> Any:  # noqa: ANN401
        return torch.arange(64.0 * channels).reshape(1, channels, 8, 8).sin().to(kind)

    def masks(_kind: Any) -> Any:  # noqa: ANN401
        return torch.eye(6).bool().expand(3, 6, 6).contiguous()

    groups = torch.arange(40) % 3
    return {
        "nms": (
            ops.nms,
            lambda k: [[boxes(k), scores(k), 0.3], [boxes(k, 0), scores(k, 0), 0.3]],
            False,
        ),
        "batched_nms": (
            ops.batched_nms,
            lambda k: [
                [boxes(k), scores(k), groups, 0.3],
                [boxes(k, 0), scores(k, 0), groups[:0], 0.3],
            ],
            False,
        ),
        "remove_small_boxes": (ops.remove_small_boxes, lambda k: [[boxes(k), 1.0]], False),
        "clip_boxes_to_image": (ops.clip_boxes_to_image, lambda k: [[boxes(k), (4, 4)]], False),
        "box_iou": (ops.box_iou, lambda k: [[boxes(k), boxes(k, 7)]], False),
        "generalized_box_iou": (
            ops.generalized_box_iou,
            lambda k: [[boxes(k), boxes(k, 7)]],
            False,
        ),
        "box_convert": (ops.box_convert, lambda k: [[boxes(k), "xyxy", "cxcywh"]], False),
        "masks_to_boxes": (ops.masks_to_boxes, lambda k: [[masks(k)]], False),
        "roi_align": (
            ops.roi_align,
            lambda k: [[image(k), rois(k), 2], [image(k), rois(k, 0), 2]],
            True,
        ),
        "roi_pool": (ops.roi_pool, lambda k: [[image(k), rois(k), 2]], True),
        "ps_roi_align": (ops.ps_roi_align, lambda k: [[image(k), rois(k), 2]], True),
        "ps_roi_pool": (ops.ps_roi_pool, lambda k: [[image(k), rois(k), 2]], True),
        "deform_conv2d": (
            ops.deform_conv2d,
            lambda k: [[image(k), torch.zeros(1, 18, 6, 6).to(k), torch.ones(2, 4, 3, 3).to(k)]],
            True,
        ),
        "sigmoid_focal_loss": (
            ops.sigmoid_focal_loss,
            lambda k: [[image(k), image(k).sign().clamp(min=0)]],
            True,
        ),
    }
