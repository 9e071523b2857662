"""Computes collectives of CPU tensors for ranks with equal values, with torch 2.14 and older.

The fake group of newer versions computes them itself (``simulate_uniform_ranks``); that of older
versions leaves most outputs unchanged. Collectives that C++ code starts, such as DTensor's, are not
computed here.
"""

from __future__ import annotations

import importlib
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.patches import Patch, wrapped_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import ExitStack

    from torch import Tensor
    from torch.distributed import ProcessGroup, Work


def _reduce(tensor: Tensor, options: object, size: int) -> None:
    """Reduce a tensor in place, as if all other ranks had an equal one."""
    kinds: Any = importlib.import_module("torch.distributed").ReduceOp
    operation = getattr(options, "reduceOp", kinds.SUM)
    if operation == kinds.SUM:
        tensor.mul_(size)
    elif operation == kinds.PRODUCT:
        tensor.pow_(size)
    elif operation == kinds.BXOR and size % 2 == 0:
        tensor.zero_()


def _is_root(group: ProcessGroup, options: object) -> bool:
    return bool(group.rank() == getattr(options, "rootRank", 0))


def _all_reduce(group: ProcessGroup, tensors: Sequence[Tensor], options: object = None) -> None:
    for tensor in tensors:
        _reduce(tensor, options, group.size())


def _reduce_to_root(group: ProcessGroup, tensors: Sequence[Tensor], options: object = None) -> None:
    if _is_root(group, options):
        _all_reduce(group, tensors, options)


def _gather(
    group: ProcessGroup,
    outputs: Sequence[Sequence[Tensor]],
    inputs: Sequence[Tensor],
    options: object = None,
) -> None:
    if _is_root(group, options):
        _all_gather_coalesced(group, [[output] for output in outputs[0]], inputs)


def _all_gather_coalesced(
    _group: ProcessGroup,
    outputs: Sequence[Sequence[Tensor]],
    inputs: Sequence[Tensor],
    _options: object = None,
) -> None:
    for of_rank in outputs:
        for output, given in zip(of_rank, inputs, strict=True):
            output.copy_(given)


def _scatter(
    group: ProcessGroup,
    outputs: Sequence[Tensor],
    inputs: Sequence[Sequence[Tensor]],
    options: object = None,
) -> None:
    if _is_root(group, options):
        outputs[0].copy_(inputs[0][group.rank()])


def _reduce_scatter(
    group: ProcessGroup,
    outputs: Sequence[Tensor],
    inputs: Sequence[Sequence[Tensor]],
    options: object = None,
) -> None:
    for output, parts in zip(outputs, inputs, strict=True):
        output.copy_(parts[group.rank()])
        _reduce(output, options, group.size())


def _reduce_scatter_whole(
    group: ProcessGroup,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    options: object = None,
) -> None:
    _reduce_scatter(group, outputs, [whole.chunk(group.size()) for whole in inputs], options)


def _reduce_scatter_base(
    group: ProcessGroup, output: Tensor, whole: Tensor, options: object = None
) -> None:
    _reduce_scatter_whole(group, [output], [whole], options)


def _all_to_all(
    group: ProcessGroup,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    _options: object = None,
) -> None:
    for output in outputs:
        # Each rank sends the chunk that this rank would send to itself; repeat or cut it to the
        # output's size.
        given = inputs[group.rank()].flatten()
        repeats = -(-output.numel() // max(given.numel(), 1))
        output.copy_(given.repeat(repeats)[: output.numel()].view_as(output))


def _all_to_all_base(
    group: ProcessGroup,
    output: Tensor,
    whole: Tensor,
    output_sizes: Sequence[int],
    input_sizes: Sequence[int],
    _options: object = None,
) -> None:
    def parts(tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        return list(tensor.split(list(sizes) or [tensor.shape[0] // group.size()] * group.size()))

    _all_to_all(group, parts(output, output_sizes), parts(whole, input_sizes))


COLLECTIVES: Final[Mapping[str, Callable[..., None]]] = {
    "allreduce": _all_reduce,
    "allreduce_coalesced": _all_reduce,
    "reduce": _reduce_to_root,
    "gather": _gather,
    "allgather_coalesced": _all_gather_coalesced,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor_coalesced": _reduce_scatter_whole,
    "reduce_scatter_single_coalesced": _reduce_scatter_whole,
    "_reduce_scatter_base": _reduce_scatter_base,
    "reduce_scatter_single": _reduce_scatter_base,
    "alltoall": _all_to_all,
    "alltoall_base": _all_to_all_base,
    "all_to_all_single": _all_to_all_base,
}
METHODS: Final = Patch(
    "torch._C._distributed_c10d",
    *(f"ProcessGroup.{name}" for name in COLLECTIVES),
    reason="collectives of a lone rank's CPU tensors return what they do if all ranks are equal",
    versions="before torch 2.15",
)


@contextmanager
def reduced_to_themselves(device: str = "CUDA") -> Iterator[None]:
    """Make the all-reduce of a device's tensors return the tensors themselves.

    DistributedDataParallel takes the result from the future of the collective's Work, which the
    fake group of torch 2.11 and older sets to None.
    """
    import torch

    def reduce(tensors: list[torch.Tensor], *_arguments: object) -> tuple[list[torch.Tensor], Any]:
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        future: Any = torch.futures.Future(devices=list(devices))
        future.set_result(list(tensors))
        work: Any = torch._C._distributed_c10d._create_work_from_future(future)
        return tensors, work.boxed()

    library = torch.library.Library("c10d", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # overriding PyTorch's kernel warns
            library.impl("allreduce_", reduce, device)
        yield
    finally:
        library._destroy()


def _tensors(values: object) -> Iterator[Tensor]:
    if isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
    elif hasattr(values, "device"):
        yield values  # type: ignore[misc] # a tensor


def simulate_uniform_ranks(stack: ExitStack) -> None:
    """Compute the collectives of CPU tensors until the stack is closed."""
    bindings: Any = importlib.import_module(METHODS.module)

    def compute(collective: Callable[..., Work], group: ProcessGroup, *arguments: Any) -> Work:
        work = collective(group, *arguments)
        tensors = list(_tensors(arguments))
        if not tensors or tensors[0].device.type != "cpu":
            return work
        COLLECTIVES[collective.__name__](group, *arguments)
        future: Any = importlib.import_module("torch").futures.Future()
        future.set_result(list(_tensors(arguments[0])))
        result: Work = bindings._create_work_from_future(future)
        return result

    if not hasattr(getattr(bindings.FakeProcessGroup, "Options", None), "simulate_uniform_ranks"):
        # DistributedDataParallel's C++ code starts collectives, which METHODS does not reach.
        stack.enter_context(reduced_to_themselves("CPU"))
        METHODS.wrap(bindings, wrapped_by(compute), stack)
