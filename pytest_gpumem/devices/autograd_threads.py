"""Makes the peaks of backward passes independent of autograd's device threads.

Waits until the threads have released a backward pass, and aligns their sequence numbers.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.patches import Patch
from pytest_gpumem.recording.allocator_view import VIEW

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

ENGINE: Final = "_engine_run_backward"
"""the function in torch.autograd that runs every backward pass"""
PASSES: Final = Patch(
    "torch.autograd",
    *(ENGINE, f"graph.{ENGINE}"),
    reason="a backward pass ends once autograd's threads have let go of its tensors",
)
CREATE_GRAPH: Final = 3
"""index of the engine's argument ``create_graph``"""
INPUTS: Final = 4
"""index of the engine's argument ``inputs``: the tensors whose gradients are returned"""
MAX_WAIT_S: Final = 60
"""seconds after which to stop waiting for a thread of autograd: the thread may be waiting for the
caller, and no step may hang"""
MAX_LOOKS: Final = 1000
"""number of polls, a millisecond apart, after which the threads are assumed to be idle"""

_this_thread = threading.local()
_PROCESSES: Final[set[int]] = set()
"""ids of processes with autograd threads; a fork does not inherit the threads"""


def await_autograd() -> list[object]:
    """Wait until autograd's threads have dropped all references to finished backward passes.

    A device's thread wakes the caller first, and then drops its reference to the pass
    (``thread_main`` in torch/csrc/autograd/engine.cpp). The pass holds references to the gradients
    of operations that did not run because of an error, and to the callbacks queued for its end:
    FSDP's callback references the sharded module. The thread takes its next operation only after it
    has dropped that reference: so each used device's thread gets a backward pass of an empty
    tensor, whose end is awaited.

    Returns:
        all objects of that empty pass, which the threads may still reference; none if there are no
            threads.
    """
    import torch

    objects: list[object] = []
    if not has_autograd_threads():
        return objects
    with torch.inference_mode(mode=False), torch.enable_grad():
        # Skip unused devices: their threads hold no memory, and a CUDA context would allocate some.
        for device in VIEW.backend.used_devices():
            leaf = _empty_leaf(device)
            view, gradient = leaf.view(0), leaf.detach()  # these launch no kernel
            objects += [leaf, view, view.grad_fn, gradient]
            with unawaited():
                objects += _gradients(view, leaf, gradient)
    return objects


def _gradients(
    output: torch.Tensor, leaf: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Compute gradients like ``torch.autograd.grad``, but without importing sympy.

    ``grad`` uses sympy to compare two shapes. The first import of sympy takes seconds, and a step
    with a scalar loss does not need it.
    """
    import torch

    run_backward = vars(torch.autograd.graph)[ENGINE]
    keep_graph = create_graph = may_be_unused = False
    arguments = (output,), (gradient,), keep_graph, create_graph, (leaf,), may_be_unused
    gradients: tuple[torch.Tensor, ...] = run_backward(*arguments, accumulate_grad=False)
    return gradients


@contextmanager
def unawaited() -> Iterator[None]:
    """Do not wait for this thread's backward passes in the block: they are this package's own.

    One of autograd's threads may be waiting for the block: to wait for that thread would be a
    deadlock.
    """
    waits = getattr(_this_thread, "waits", False)
    _this_thread.waits = True
    try:
        yield
    finally:
        _this_thread.waits = waits


def is_outermost_pass() -> bool:
    """Return whether a backward pass that begins now is the program's own and not nested.

    Reentrant checkpoints run passes inside a pass, and :func:`await_autograd` runs its own pass.
    """
    import torch

    return torch._C._current_graph_task_id() == -1 and not getattr(_this_thread, "waits", False)


def _empty_leaf(device: int) -> torch.Tensor:
    """Return an empty leaf tensor on a device, which takes no memory there."""
    import torch

    return torch.empty(0, device=f"{VIEW.backend.device_type}:{device}", requires_grad=True)


@contextmanager
def awaited_passes() -> Iterator[None]:
    """Make backward passes in the block wait for autograd's threads if these may still hold memory.

    They hold memory after an error, and when gradients are returned: a gradient that is not
    accumulated stays in the last operation until the thread drops the operation. Without the wait,
    the threads' timing would decide whether the step still has that memory.
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
                with suppress(Exception):  # after a CUDA error every call fails
                    await_autograd()
                raise
            if len(args) > INPUTS and args[INPUTS] and not getattr(_this_thread, "waits", False):
                _run_on_new_thread(await_autograd)
            return result

        return run_and_wait

    with ExitStack() as stack:
        PASSES.wrap(torch.autograd, awaiting, stack)
        yield


class NodeNumbers:
    """Aligns autograd's sequence numbers, by which a backward pass orders its operations.

    Each thread counts the nodes that it creates. With ``create_graph=True`` the devices' threads
    create nodes too. Without this class, the order in which the next pass runs the nodes of all
    threads, and with it the peak, would depend on how many nodes the threads have created in
    earlier tests: a gradient penalty of a critic with convolutions took 503 MiB alone, and 630 MiB
    after a test of a Hessian (H100).
    """

    def __init__(self) -> None:
        self._first = 0
        """the measuring thread's next sequence number when the step began"""
        self._aligned: set[int] = set()
        """devices whose threads have been advanced to that number"""

    def begin(self) -> None:
        """Start a step: raise this thread's sequence number to the device threads' highest."""
        import torch

        next_number = torch._C._autograd._get_sequence_nr
        if self._aligned:
            numbers: list[int] = []
            _run_on_new_thread(
                lambda: _on_threads(self._aligned, lambda: numbers.append(next_number()))
            )
            with torch.inference_mode(mode=False):
                _make_nodes(max(numbers, default=0))
        self._aligned.clear()
        self._first = next_number()

    def align(self) -> None:
        """Advance the devices' threads to the sequence number at which the step began."""
        new = {*VIEW.backend.used_devices()} - self._aligned
        if new and _run_on_new_thread(lambda: _on_threads(new, lambda: _make_nodes(self._first))):
            self._aligned |= new


NODE_NUMBERS: Final = NodeNumbers()


def _on_threads(devices: set[int], function: Callable[[], object]) -> None:
    """Call a function on the autograd threads of some devices."""
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
        leaf = _empty_leaf(device)
        apply: Any = OnThread.apply
        _gradients(apply(leaf), leaf, torch.empty_like(leaf))


def _make_nodes(number: int) -> None:
    """Create nodes on this thread until its next sequence number is at least ``number``."""
    import torch

    leaf = torch.empty(0, device="cpu", requires_grad=True)
    with torch.enable_grad():
        for _ in range(number - torch._C._autograd._get_sequence_nr()):
            leaf.view(0)


def _run_on_new_thread(function: Callable[[], object]) -> bool:
    """Call a function, which runs backward passes, on a new thread without the caller's modes.

    Returns:
        whether the function was called: it is not called inside a backward pass, which one of
            autograd's threads may be running, while a CUDA graph is captured, or while compiled
            autograd is enabled.
    """
    import torch

    compiler = sys.modules.get("torch._dynamo.compiled_autograd")
    if (
        torch._C._current_graph_task_id() != -1
        or VIEW.backend.is_capturing()
        or getattr(compiler, "compiled_autograd_enabled", False)
    ):
        return False

    def run() -> None:
        _this_thread.waits = True
        with suppress(Exception):  # after a CUDA error every call fails
            function()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(MAX_WAIT_S)
    return True


def await_idle_threads() -> None:
    """Wait until autograd's threads sleep although the GIL is free, which means that they are idle.

    Their last pass has ended, but they may still need the GIL to release it.
    """
    last_looks: list[str] = []
    for _ in range(MAX_LOOKS):
        time.sleep(0.001)  # releases the GIL
        looks = []
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # the thread has ended
                status = (task / "status").read_text(encoding="ascii", errors="replace")
                if status.startswith("Name:\tpt_autograd"):
                    looks.append(status)
        if looks == last_looks and not any("State:\tR" in status for status in looks):
            return
        last_looks = looks


def has_autograd_threads() -> bool:
    """Return whether autograd has started device threads in this process (on Linux).

    Such threads live until the process ends.
    """
    if os.getpid() in _PROCESSES:
        return True
    for name in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # the thread has ended
            if name.read_text(encoding="ascii", errors="replace").startswith("pt_autograd"):
                _PROCESSES.add(os.getpid())
                return True
    return False
