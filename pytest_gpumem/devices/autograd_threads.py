"""Waiting for autograd's threads, one a device, to let go of a backward pass."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.patches import Patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

ENGINE: Final = "_engine_run_backward"
"""the function of torch.autograd that every backward pass goes through"""
PASSES: Final = Patch(
    "torch.autograd",
    *(ENGINE, f"graph.{ENGINE}"),
    reason="a backward pass ends once autograd's threads have let go of its tensors",
)
CREATE_GRAPH: Final = 3
"""the place of its argument that has operations of the pass recorded"""
INPUTS: Final = 4
"""the place of its argument that names the tensors of which gradients are returned"""
MAX_WAIT_S: Final = 60
"""seconds, after which a thread of autograd's waits for the caller: no step is to hang by that"""
MAX_LOOKS: Final = 1000
"""times that threads are looked at, a millisecond apart, until they are taken for idle"""

_this_thread = threading.local()
_PROCESSES: Final[set[int]] = set()
"""ids of processes in which autograd's threads have been seen: forks of them have none"""


def await_autograd() -> list[object]:
    """Return once autograd's threads have let go of the backward passes that have ended.

    A device's thread wakes the caller first, and then drops its reference to the pass
    (``thread_main`` of torch/csrc/autograd/engine.cpp): with the gradients of operations that did
    not run, where an error ended it, and with the callbacks that were queued for its end. FSDP's
    holds the sharded module. The thread takes the next operation after that.

    Returns:
        all objects of that next operation: the threads may hold those. None without
        threads.
    """
    import torch

    objects: list[object] = []
    if not has_autograd_threads():
        return objects
    with torch.inference_mode(mode=False), torch.enable_grad():
        for device in range(torch.cuda.device_count()):
            # The thread of a device that was never used holds nothing, and a context takes memory.
            if not _was_used(device):
                continue
            leaf = torch.empty(0, device=f"cuda:{device}", requires_grad=True)  # takes no memory
            view, gradient = leaf.view(0), leaf.detach()  # a GPU runs nothing for these
            objects += [leaf, view, view.grad_fn, gradient]
            with unawaited():
                objects += _gradients(view, leaf, gradient)
    return objects


def _gradients(
    output: torch.Tensor, leaf: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return what ``torch.autograd.grad`` does, which imports sympy to compare two shapes.

    The first import of sympy takes seconds, and no step has needed it where a loss is a scalar.
    """
    import torch

    run_backward = vars(torch.autograd.graph)[ENGINE]
    keep_graph = create_graph = may_be_unused = False
    arguments = (output,), (gradient,), keep_graph, create_graph, (leaf,), may_be_unused
    gradients: tuple[torch.Tensor, ...] = run_backward(*arguments, accumulate_grad=False)
    return gradients


@contextmanager
def unawaited() -> Iterator[None]:
    """Have nothing wait for the backward passes of this thread in the block: they are our own.

    A thread of autograd's may wait for the block, and would be waited for.
    """
    waits = getattr(_this_thread, "waits", False)
    _this_thread.waits = True
    try:
        yield
    finally:
        _this_thread.waits = waits


def is_outermost_pass() -> bool:
    """Return whether a backward pass that begins now is a program's, and in no other pass.

    Reentrant checkpoints run passes inside a pass, and :func:`await_autograd` one of its own.
    """
    import torch

    return torch._C._current_graph_task_id() == -1 and not getattr(_this_thread, "waits", False)


def _was_used(device: int) -> bool:
    """Return whether this process has a context on a device."""
    import torch

    bindings: Any = torch._C  # torch 2.14's stubs have not all of them
    return bool(bindings._cuda_hasPrimaryContext(device))


@contextmanager
def awaited_passes() -> Iterator[None]:
    """Have backward passes wait for autograd's threads in the block, where these hold memory yet.

    They do after an error, and where gradients are returned: a gradient that is not accumulated
    stays in the last operation until the thread drops that. A step that goes on would have the
    memory or not, as threads happen to run.
    """
    import torch

    def awaiting(run_backward: Callable[..., object]) -> Callable[..., object]:
        def run_and_wait(*args: object, **options: object) -> object:
            __tracebackhide__ = True
            if len(args) > CREATE_GRAPH and args[CREATE_GRAPH]:
                NODE_NUMBERS.align()
            try:
                result = run_backward(*args, **options)
            except BaseException:
                with suppress(Exception):  # after an error of CUDA's every call fails
                    await_autograd()
                raise
            if len(args) > INPUTS and args[INPUTS] and not getattr(_this_thread, "waits", False):
                _run_apart(await_autograd)
            return result

        return run_and_wait

    with ExitStack() as stack:
        PASSES.wrap(torch.autograd, awaiting, stack)
        yield


class NodeNumbers:
    """The numbers of autograd's nodes, by which a backward pass orders operations.

    Each thread counts the nodes that it makes. Those of a pass with ``create_graph=True`` are made
    by the devices' threads: whether the next pass runs them before nodes of the caller's would
    depend on how many nodes either thread has made for earlier tests, and by that its peak would.
    """

    def __init__(self) -> None:
        self._first = 0
        """the next number of the thread that measures, when a step began"""
        self._aligned: set[int] = set()
        """devices whose threads have numbers of the step"""

    def begin(self) -> None:
        """Note that a step begins on this thread, whose numbers are no lower than the devices'."""
        import torch

        next_number = torch._C._autograd._get_sequence_nr
        if self._aligned:
            numbers: list[int] = []
            _run_apart(lambda: _on_threads(self._aligned, lambda: numbers.append(next_number())))
            with torch.inference_mode(mode=False):
                _make_nodes(max(numbers, default=0))
        self._aligned.clear()
        self._first = next_number()

    def align(self) -> None:
        """Have the devices' threads go on with the number with which the step began."""
        import torch

        devices = {*filter(_was_used, range(torch.cuda.device_count()))}
        new = devices - self._aligned
        if new and _run_apart(lambda: _on_threads(new, lambda: _make_nodes(self._first))):
            self._aligned |= new


NODE_NUMBERS: Final = NodeNumbers()


def _on_threads(devices: set[int], function: Callable[[], object]) -> None:
    """Call a function on autograd's threads of some devices."""
    import torch

    class OnThread(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: object, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone()

        @staticmethod
        def backward(_ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
            function()
            return gradients[0]

    for device in sorted(devices):
        leaf = torch.empty(0, device=f"cuda:{device}", requires_grad=True)
        apply: Any = OnThread.apply
        _gradients(apply(leaf), leaf, torch.empty_like(leaf))


def _make_nodes(number: int) -> None:
    """Make nodes on this thread until the next one has a number, if it is lower yet."""
    import torch

    leaf = torch.empty(0, device="cpu", requires_grad=True)
    with torch.enable_grad():
        for _ in range(number - torch._C._autograd._get_sequence_nr()):
            leaf.view(0)


def _run_apart(function: Callable[[], object]) -> bool:
    """Call a function that runs backward passes, on a thread that has none of the caller's modes.

    Returns:
        whether that was done: not within a backward pass, which a thread of autograd's may be
        running, nor where it would be captured in a CUDA graph or compiled.
    """
    import torch

    compiler = sys.modules.get("torch._dynamo.compiled_autograd")
    if (
        torch._C._current_graph_task_id() != -1
        or torch.cuda.is_current_stream_capturing()
        or getattr(compiler, "compiled_autograd_enabled", False)
    ):
        return False

    def run() -> None:
        _this_thread.waits = True
        with suppress(Exception):  # after an error of CUDA's every call fails
            function()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(MAX_WAIT_S)
    return True


def await_idle_threads() -> None:
    """Return once autograd's threads sleep though Python is free for them: they wait for work.

    Their last pass has ended, but they may want Python yet to let go of it.
    """
    last_looks: list[str] = []
    for _ in range(MAX_LOOKS):
        time.sleep(0.001)  # Python is free meanwhile
        looks = []
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # it has ended meanwhile
                status = (task / "status").read_text(encoding="ascii", errors="replace")
                if status.startswith("Name:\tpt_autograd"):
                    looks.append(status)
        if looks == last_looks and not any("State:\tR" in status for status in looks):
            return
        last_looks = looks


def has_autograd_threads() -> bool:
    """Return whether autograd has started threads of devices in this process (on Linux).

    They stay until the process ends.
    """
    if os.getpid() in _PROCESSES:
        return True
    for name in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has ended meanwhile
            if name.read_text(encoding="ascii", errors="replace").startswith("pt_autograd"):
                _PROCESSES.add(os.getpid())
                return True
    return False
