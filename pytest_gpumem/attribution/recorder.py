"""Recording one run: the allocator's own history, and what was seen of tensors meanwhile.

The history (``torch.cuda.memory._record_memory_history``) says which block was allocated when, by
which Python lines. What a block is for is seen by PyTorch's global hooks: modules' and optimizers'
tensors are noted with their addresses, calls of modules, backward passes and optimizer steps with
their times. Both clocks are the same (microseconds since 1970). Nothing holds a tensor, nothing
changes what is allocated.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.attribution.optimizer_watch import steps_around
from pytest_gpumem.attribution.recording import (
    MOST_EVENTS,
    Call,
    Pass,
    Recording,
    Span,
    Tag,
    beginning,
    now,
)
from pytest_gpumem.source_lines import users_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import CodeType

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from pytest_gpumem.measurement import Category

DEEPEST: Final = 4
"""levels of lists and dicts in a module's arguments that are searched for tensors"""


class Recorder:
    """Records from ``start`` to ``stop``."""

    def __init__(self) -> None:
        self._recording = Recording()
        self._stack = ExitStack()
        self._active: list[tuple[int, Call]] = []
        """calls under way, with the ids of their modules"""
        self._backwards = 0
        """passes under way, one in another"""
        self._step: Pass | None = None
        """the optimizer's step under way, as far as is known: an error may have ended it"""
        self._wrapper: CodeType | None = None
        """what PyTorch runs around every step of an optimizer"""
        self._names: weakref.WeakKeyDictionary[Module, str] = weakref.WeakKeyDictionary()
        self._parameters: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._seen: set[int] = set()
        """ids of the parameters that the call of the outermost module began with"""
        self._applying = 0
        self._compiling: Callable[[], bool] = bool
        """whether torch.compile looks at this rather than Python running it"""
        self._autocasts: Callable[[str], bool] = bool
        self._graphs: Callable[[], bool] = bool
        self._norms: tuple[type[Module], ...] = ()
        """classes that look at a whole batch"""

    def start(self, plugs: Iterable[tuple[int, int]] = ()) -> None:
        """Begin.

        Args:
            plugs: device and address of the blocks that only fill rooms.
        """
        import torch

        self._recording = Recording(plugs=list(plugs))
        self._compiling = torch.compiler.is_compiling
        self._autocasts = torch.is_autocast_enabled
        self._graphs = torch.is_grad_enabled
        self._norms = (torch.nn.modules.batchnorm._BatchNorm,)
        memory = torch.cuda.memory
        memory._record_memory_history(None)
        memory._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=MOST_EVENTS
        )
        self._stack.callback(memory._record_memory_history, None)
        self._recording.before = memory._snapshot()["segments"]
        self._recording.capability = torch.cuda.get_device_capability(0)
        self._hook()

    def so_far(self) -> Recording:
        """Return what was recorded until now; it goes on."""
        import torch

        snapshot = torch.cuda.memory._snapshot()
        return replace(self._recording, **_history(snapshot))

    def stop(self) -> Recording:
        """End it and return what was recorded; the cuBLAS workspaces are freed by this."""
        import torch

        recording = self._recording
        start = beginning()
        torch._C._cuda_clearCublasWorkspaces()
        recording.cleared.append(Span(start, now()))
        snapshot = torch.cuda.memory._snapshot()
        self.abandon()
        return replace(recording, snapshot=snapshot, **_history(snapshot))

    def abandon(self) -> None:
        """End it for nothing."""
        self._stack.close()

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Note that what is allocated inside is not the step's."""
        start = beginning()
        try:
            yield
        finally:
            self._recording.ours.append(Span(start, now()))

    # -- hooks --

    def _hook(self) -> None:
        from torch import autograd, nn
        from torch.nn.modules import module as modules
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        handles = [
            modules.register_module_forward_pre_hook(self._enter),
            modules.register_module_forward_hook(self._leave, with_kwargs=True, always_call=True),
            modules.register_module_parameter_registration_hook(self._parameter),
            modules.register_module_buffer_registration_hook(self._buffer),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        for handle in handles:
            self._stack.callback(_remove, handle)
        if hasattr(modules, "_has_any_global_hook"):  # torch.compile warns of them: not of ours
            ours = {handle.id for handle in handles}
            self._replace(modules, "_has_any_global_hook", lambda: _has_hooks(modules, ours))
        self._replace(autograd, "backward", self._around_backward(autograd.backward))
        self._replace(autograd, "grad", self._around_backward(autograd.grad))
        self._replace(nn.Module, "_apply", self._around_apply(nn.Module._apply))

    def _replace(self, owner: Any, name: str, value: object) -> None:  # noqa: ANN401
        self._stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    # -- modules --

    def _enter(self, module: Module, _args: object) -> None:
        if self._compiling():
            return
        if not self._active:
            self._end_failed_step()
            self._see_all(module)
        self._recording.autocast |= self._autocasts("cuda")
        self._recording.batch_norm |= module.training and isinstance(module, self._norms)
        call = Call(self._name(module), beginning(), grad=self._graphs())
        self._recording.calls.append(call)
        self._active.append((id(module), call))

    def _leave(self, module: Module, args: object, *more: object) -> None:
        """End a call: ``more`` is keyword arguments and output, the latter alone after an error."""
        if self._compiling():  # first of all: reading the clock would break the graph
            return
        time_now = now()
        at = next((it for it in reversed(self._active) if it[0] == id(module)), None)
        if at is None:
            return
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in self._seen:  # FSDP put it together
                self._see_parameter(parameter, f"{self._name(module)}.{key}")
        at[1].end = time_now
        self._active.remove(at)
        if not self._active:
            for tensor in _tensors((args, *more[:-1]), DEEPEST):
                if tensor.grad_fn is None:
                    self._tag(tensor, "batch data")
            for tensor in _tensors(more[-1], DEEPEST):
                self._tag(tensor, "activations")  # with a tag: an output

    def _name(self, module: Module) -> str:
        return self._names.get(module) or type(module).__name__

    def _see_all(self, root: Module) -> None:
        """Note the tensors of a module and of all below it, and where each of these is."""
        top = type(root).__name__
        self._seen.clear()
        for path, module in root.named_modules():
            name = f"{top}.{path}" if path else top
            self._names[module] = name
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    self._seen.add(id(parameter))
                    self._see_parameter(parameter, f"{name}.{key}")
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    self._tag(buffer, "buffers", f"{name}.{key}")

    def _see_parameter(self, parameter: Tensor, name: str) -> None:
        known = self._parameters.get(id(parameter))
        if known is None or known[1] != name or known[0]() is not parameter:
            self._parameters[id(parameter)] = (weakref.ref(parameter), name)
        self._tag(parameter, "parameters", name)
        if parameter.is_cuda:
            self._recording.dtypes.add(str(parameter.dtype).removeprefix("torch."))

    def _parameter(self, module: Module, key: str, parameter: Tensor | None) -> None:
        if parameter is not None and not self._compiling():
            self._see_parameter(parameter, f"{self._name(module)}.{key}")

    def _buffer(self, module: Module, key: str, buffer: Tensor | None) -> None:
        if buffer is not None and not self._compiling():
            self._tag(buffer, "buffers", f"{self._name(module)}.{key}")

    def _around_apply(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        """Look at a module again that was moved or converted."""

        @functools.wraps(apply)
        def _apply(module: Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            self._applying += 1
            try:
                return apply(module, *args, **kwargs)
            finally:
                self._applying -= 1
                if not self._applying:
                    self._see_all(module)

        return _apply

    # -- passes --

    def _around_backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def backward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            self._backwards += 1
            if self._backwards > 1:
                begun = None
            else:
                self._end_failed_step()
                begun = self._begin("backward")
            try:
                return run(*args, **kwargs)
            finally:
                time_now = now()
                self._backwards -= 1
                if begun is not None:
                    begun.end = time_now
                    self._see_gradients()

        return backward

    def _begin(self, name: str) -> Pass:
        begun = Pass(name, beginning(), users_line(sys._getframe(2)))
        self._recording.passes.append(begun)
        return begun

    def _see_gradients(self) -> None:
        for reference, name in list(self._parameters.values()):
            parameter = reference()
            if parameter is not None and parameter.grad is not None:
                self._tag(parameter.grad, "gradients", name)

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        if self._compiling():
            return
        self._wrapper = sys._getframe(1).f_code
        self._end_failed_step()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                known = self._parameters.get(id(parameter))
                self._see_parameter(parameter, known[1] if known else "")
        self._see_gradients()
        if self._step is None:  # else it is a step in a step, as when a class's calls its base's
            self._step = self._begin("optimizer")
            self._step.owner = id(optimizer)
            self._step.fresh = "" if optimizer.state else type(optimizer).__name__

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        if self._compiling():
            return
        time_now = now()
        if self._step is not None and steps_around(sys._getframe(1).f_back, self._wrapper) == 0:
            self._step.end = time_now
            self._step = None
        for parameter, state in optimizer.state.items():
            known = self._parameters.get(id(parameter))
            for tensor in _tensors(state, DEEPEST):
                self._tag(tensor, "optimizer state", known[1] if known else "")

    def _end_failed_step(self) -> None:
        """End the step that is no longer under way: an error left it, and no hook was called."""
        if self._step is not None and steps_around(sys._getframe(2).f_back, self._wrapper) == 0:
            self._step.end = now()
            self._step = None

    def _tag(self, tensor: Tensor, category: Category, name: str = "") -> None:
        tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
        device = tensor.get_device()
        if device < 0 or not tensor.is_cuda:
            return
        try:
            address = tensor.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):  # some have no storage
            return
        if address:
            self._recording.tags.append(Tag(time.time_ns() / 1000, device, address, category, name))


@contextmanager
def history() -> Iterator[list[list[dict[str, Any]]]]:
    """Keep the allocator's events of each device, without their causes, for when it has ended."""
    import torch

    memory = torch.cuda.memory
    found: list[list[dict[str, Any]]] = []
    memory._record_memory_history(None)
    memory._record_memory_history("all", context=None, max_entries=MOST_EVENTS)
    try:
        yield found
        found.extend(memory._snapshot()["device_traces"])
    finally:
        memory._record_memory_history(None)


def _history(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a recording that a snapshot has."""
    events = snapshot["device_traces"]
    return {
        "events": events,
        "settings": snapshot.get("allocator_settings", {}),
        "overflowed": any(len(it) >= MOST_EVENTS for it in events),
    }


def _has_hooks(modules: Any, ours: set[int]) -> bool:  # noqa: ANN401 - a module
    """Return whether there are global hooks on modules besides ours."""
    names = ("backward_pre_hooks", "backward_hooks", "forward_pre_hooks", "forward_hooks")
    return any(set(getattr(modules, f"_global_{name}", ())) - ours for name in names)


def _remove(handle: Any) -> None:  # noqa: ANN401 - a RemovableHandle
    """Remove a hook, with what PyTorch forgets: that it took keyword arguments."""
    from torch.nn.modules import module as modules

    handle.remove()
    getattr(modules, "_global_forward_hooks_with_kwargs", {}).pop(handle.id, None)


def _tensors(value: object, depth: int) -> list[Tensor]:
    """Return the tensors in lists and dicts, so many levels deep."""
    import torch

    found: list[Tensor] = []
    level = [value]
    for _ in range(depth + 1):
        below: list[object] = []
        for one in level:
            if isinstance(one, torch.Tensor):
                found.append(one)
            elif isinstance(one, dict):
                below.extend(one.values())
            elif isinstance(one, (list, tuple)):
                below.extend(one)
        level = below
    return found
