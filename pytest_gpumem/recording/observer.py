"""Observe a run's tensors, module calls, passes and steps by wrapping PyTorch's functions.

Record the addresses of modules' and optimizers' tensors, and the times of calls and passes. No
strong reference to a tensor is held. The wrappers run at every module call of every test on the
virtual GPU, so they record as little as they can. What they recorded is interpreted only when a
test is explained.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import weakref
from operator import is_
from time import time_ns
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from pytest_gpumem.patches import Patch
from pytest_gpumem.recording.module_hooks import hook_calls
from pytest_gpumem.recording.optimizer_watch import steps_around
from pytest_gpumem.recording.plain_tensors import gradients_of, place_of, plain_tensors
from pytest_gpumem.recording.wrapped_functions import WRAPPED
from pytest_gpumem.source_lines import users_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import ExitStack
    from types import CodeType

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from pytest_gpumem.measurement import Category
    from pytest_gpumem.recording.recording import Recording
    from pytest_gpumem.source_lines import Line

OBSERVED: Final = Patch(
    "torch",
    *("nn.Module.__setattr__", "nn.Module.add_module", "nn.Module.register_parameter"),
    *("nn.Module.register_buffer", "nn.Module._apply", "nn.Module.zero_grad"),
    *("optim.Optimizer.zero_grad", "utils.swap_tensors", "amp.autocast_mode.autocast.__enter__"),
    reason="a report names a peak's parameters, buffers and gradients, and says if autocast ran",
)
PASSES: Final = Patch(
    "torch.autograd",
    *("backward", "grad"),
    reason="a report says whether a block was allocated in a backward pass",
)
Kind: TypeAlias = Literal["", "call", "backward", "optimizer", "end"]
MAX_DEPTH: Final = 4
"""levels of nested lists and dicts that are searched for tensors in a module's arguments"""


class Observer:
    """Writes the calls of PyTorch's functions to a recording."""

    def __init__(
        self, recording: Recording, at_moment: Callable[[Recording], None] | None = None
    ) -> None:
        """Store the recording, and ``at_moment``, which is called at each moment.

        A moment is the start or the end of a module call, a backward pass or an optimizer step.
        """
        import torch

        self._recording = recording
        self._at_moment = at_moment
        self._numbers = itertools.count()
        """yields the number of the next call or pass"""
        self._active: list[int] = []
        """the running calls, outermost first, as a flat list: the module's id and the call's number
        for each"""
        self._backwards = 0
        """number of running backward passes, including nested ones"""
        self._step: int | None = None
        """the number of the running optimizer step; None if there is none. If the step raises,
        PyTorch runs no hook at its end, and a later hook resets the number"""
        self._wrapper: CodeType | None = None
        """the code of PyTorch's wrapper around every optimizer step"""
        self._names: dict[int, tuple[weakref.ref[Module], str]] = {}
        """the path of each module that was seen, by its id"""
        self._trees: weakref.WeakKeyDictionary[Module, _Tree] = weakref.WeakKeyDictionary()
        """by outermost module: the paths and tensors below it"""
        self._parameters: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._last_seen: tuple[list[weakref.ref[Tensor]], Sequence[str]] = [], []
        """the parameters of the last call of ``_see_parameters``, and their names"""
        self._initial_parameters: set[int] = set()
        """ids of the parameters that had memory when the outermost module was called"""
        self._states: dict[int, tuple[int, list[tuple[int, int]]]] = {}
        """by optimizer id: the number of its states, and the addresses of some, to notice a
        change"""
        self._applying = 0
        self._compiling: Callable[[], bool] = torch.compiler.is_compiling
        """whether modules are traced for export, with tensors that have no memory"""
        self._tensor, self._module = torch.Tensor, torch.nn.Module
        self._autocasts: Callable[[str], bool] = torch.is_autocast_enabled
        self._graphs: Callable[[], bool] = torch.is_grad_enabled
        self._norms: tuple[type[Module], ...] = (torch.nn.modules.batchnorm._BatchNorm,)
        """classes that normalize over a whole batch"""
        self._plain = {torch.Tensor, torch.nn.Parameter}
        """classes that wrap no other tensors"""
        self._bypassed = torch._C.DisableTorchFunctionSubclass
        """context in which ``__torch_function__`` of subclasses is not called; some raise"""
        self._lazy = torch.nn.UninitializedParameter
        """parameters of lazy modules, which get memory in the first call"""

    def install(self, stack: ExitStack) -> None:
        """Wrap the functions until the stack is closed."""
        import torch
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        arounds = {
            "__setattr__": self.around_setattr,
            "add_module": self.followed_by(lambda *_, **__: self._trees.clear()),
            "register_parameter": self.followed_by(self._see_new_parameter),
            "register_buffer": self.followed_by(self._see_buffer),
            "_apply": self.around_apply,
            "zero_grad": self.around_zero_grad,
            "swap_tensors": self.around_swap,
            "__enter__": self.followed_by(self._see_autocast),
        }
        observed = OBSERVED.values(torch).items()
        WRAPPED.wrap(stack, {each: arounds[name.rpartition(".")[2]] for name, each in observed})
        passes = PASSES.values(torch.autograd).values()
        WRAPPED.wrap(stack, dict.fromkeys(passes, self.around_backward), traced=False)
        hook_calls(stack, self.enter_module, self.leave_module)
        WRAPPED.hook(stack, register_optimizer_step_pre_hook(self.begin_step))
        WRAPPED.hook(stack, register_optimizer_step_post_hook(self.end_step))

    def _note(self, kind: Kind, number: int, line: Line | None = None) -> None:
        """Record that a pass begins ("backward", "optimizer"), ends ("end") or goes on ("")."""
        self._recording.moments += (time_ns(), kind, number, line, False)
        self._look()

    def _look(self) -> None:
        if self._at_moment is not None:
            self._at_moment(self._recording)

    # -- modules --

    def enter_module(self, module: Module, _args: object) -> None:
        """Record the start of a module's call."""
        recording, active = self._recording, self._active
        if not active:
            if self._compiling():
                return
            self._end_failed_step()
            self._see_autocast()
            self._see_all(module)
        if not recording.batch_norm and isinstance(module, self._norms):
            recording.batch_norm = module.training
        number = next(self._numbers)
        # One "+=": threads that run modules at the same time must not mix their moments.
        recording.moments += (time_ns(), "call", number, self._name(module), self._graphs())
        active += (id(module), number)
        if self._at_moment is not None:
            self._at_moment(recording)

    def leave_module(self, module: Module, args: object, *results: object) -> None:
        """Record the end of a module's call.

        ``results`` are the call's kwargs and its output (None after an error).
        """
        active = self._active
        at = len(active) - 2
        while at >= 0 and active[at] != id(module):
            at -= 2
        if at < 0 and self._compiling():  # enter_module returned early, too
            return
        recording, number = self._recording, active[at + 1] if at >= 0 else -1
        is_outermost = len(active) == 2  # noqa: PLR2004 - a module and its number
        outputs = nested_tensors(results[-1], MAX_DEPTH) if is_outermost else []
        has_graph = not outputs or any(tensor.grad_fn is not None for tensor in outputs)
        recording.moments += (time_ns(), "end", number, None, has_graph)
        if self._at_moment is not None:
            self._at_moment(recording)
        if at < 0:
            return
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in self._initial_parameters:
                # FSDP unsharded the parameter during the call.
                self._see_parameters([parameter], [f"{self._name(module)}.{key}"])
        del active[at : at + 2]
        if not active:
            batch = [
                tensor
                for tensor in nested_tensors((args, *results[:-1]), MAX_DEPTH)
                if tensor.grad_fn is None
            ]
            self._sweep("batch data", batch)
            # Tagged as activations: hints tell an output from inner activations by the tag.
            self._sweep("activations", outputs)

    def followed_by(
        self, then: Callable[..., object]
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a wrapper that runs a method and then calls ``then`` with the same arguments."""

        def around(method: Callable[..., Any]) -> Callable[..., Any]:
            def followed_method(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
                __tracebackhide__ = True
                result = method(*args, **kwargs)
                then(*args, **kwargs)
                return result

            return followed_method

        return around

    def _see_autocast(self, *_: object) -> None:
        recording = self._recording
        recording.autocast = recording.autocast or self._autocasts(recording.device_type)

    def _see_new_parameter(self, module: Module, name: str, *_: object, **__: object) -> None:
        parameter = _registered(module._parameters, name)
        if parameter is not None and not self._compiling():
            self._trees.clear()
            self._see_parameters([parameter], [f"{self._name(module)}.{name}"])

    def around_setattr(self, assign: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``Module.__setattr__``, which assigns submodules and buffers."""
        tensor, kind = self._tensor, self._module

        def __setattr__(module: Module, name: str, value: object) -> None:  # noqa: N807 - PyTorch's
            __tracebackhide__ = True
            assign(module, name, value)
            if isinstance(value, kind):
                self._trees.clear()
            elif isinstance(value, tensor) and name in module._buffers:
                self._see_buffer(module, name)

        return __setattr__

    def _see_buffer(self, module: Module, name: str, *_: object, **__: object) -> None:
        buffer = _registered(module._buffers, name)
        if buffer is not None and not self._compiling():
            self._sweep("buffers", [buffer], [f"{self._name(module)}.{name}"])

    def around_apply(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``Module._apply``: record a module's tensors after it was moved or converted."""

        def observed_apply(module: Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            __tracebackhide__ = True
            self._applying += 1
            try:
                return apply(module, *args, **kwargs)
            finally:
                self._applying -= 1
                if not self._applying:  # _apply calls itself for each submodule
                    self._see_all(module)

        return observed_apply

    def around_swap(self, swap: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``torch.utils.swap_tensors``, which refuses tensors that have weak references.

        The observer holds weak references to parameters, and drops those to ``t1`` and ``t2`` for
        the call.
        """

        def swap_tensors(t1: Tensor, t2: Tensor) -> None:
            __tracebackhide__ = True
            known = [tensor for tensor in (t1, t2) if id(tensor) in self._parameters]
            names = [self._parameters.pop(id(tensor))[1] for tensor in known]
            self._last_seen = [], []
            try:
                swap(t1, t2)
            finally:
                self._see_parameters(known, names)

        return swap_tensors

    def _name(self, module: Module) -> str:
        entry = self._names.get(id(module))
        # Python may reuse the id of a freed object.
        return entry[1] if entry and entry[0]() is module else type(module).__name__

    def _see_all(self, root: Module) -> None:
        tree = self._trees.get(root)
        if tree is None:
            tree = self._trees[root] = _Tree(root)
        self._names.update(tree.names)
        parameters, names = tree.tensors("_parameters")
        lazy = (id(each) for each in parameters if type(each) is self._lazy)
        self._initial_parameters = set(map(id, parameters)).difference(lazy)
        self._see_parameters(parameters, names)
        self._sweep("buffers", *tree.tensors("_buffers"))

    def _see_parameters(self, parameters: Sequence[Tensor], names: Sequence[str]) -> None:
        if not parameters:
            return
        tensors, seen_names = self._last_seen
        # They are usually the parameters of the last call: compare without a Python loop.
        if names != seen_names or not all(map(is_, map(weakref.ref.__call__, tensors), parameters)):
            for parameter, name in zip(parameters, names, strict=True):
                self._parameters[id(parameter)] = (weakref.ref(parameter), name)
                with self._bypassed():
                    if parameter.device.type == self._recording.device_type:
                        self._recording.dtypes.add(str(parameter.dtype).removeprefix("torch."))
            self._last_seen = [*map(weakref.ref, parameters)], names
        self._sweep("parameters", parameters, names)

    def _parameter_name(self, parameter: Tensor) -> str:
        entry = self._parameters.get(id(parameter))
        return entry[1] if entry else ""

    # -- passes --

    def around_backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that runs a backward pass; a nested pass belongs to the outer one."""
        parameters = inspect.signature(run)

        def backward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            __tracebackhide__ = True
            arguments = parameters.bind(*args, **kwargs).arguments
            retain = arguments.get("retain_graph")
            retain = arguments.get("create_graph") if retain is None else retain
            line = users_line(sys._getframe(1)) if retain else None
            if line is not None:
                roots = arguments.get("tensors", arguments.get("outputs"))
                for root in roots if isinstance(roots, (tuple, list)) else (roots,):
                    if getattr(root, "grad_fn", None) is not None:
                        self._recording.retained_graphs[root.grad_fn._sequence_nr()] = line
            self._backwards += 1
            if self._backwards > 1:
                outermost = None
            else:
                self._end_failed_step()
                outermost = self._begin("backward")
            try:
                return run(*args, **kwargs)
            finally:
                end = time_ns()
                self._backwards -= 1
                if outermost is not None:
                    self._recording.moments += (end, "end", outermost, None, False)
                    self._see_gradients()
                    self._look()

        return backward

    def around_zero_grad(self, zero_grad: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a ``zero_grad``; record the lines that call it with ``set_to_none=False``."""

        def observed_zero_grad(owner: Any, set_to_none: bool = True) -> Any:  # noqa: ANN401, FBT001, FBT002 - PyTorch's
            __tracebackhide__ = True
            if not set_to_none and not self._compiling():
                line = users_line(sys._getframe(1))
                if line is not None and line not in self._recording.zeroed_gradients:
                    self._recording.zeroed_gradients.append(line)
            return zero_grad(owner, set_to_none)

        return observed_zero_grad

    def begin_step(self, optimizer: Optimizer, *_: object) -> None:
        """Record the start of an optimizer's step."""
        if self._compiling():
            return
        self._wrapper = sys._getframe(1).f_code
        self._end_failed_step()
        parameters = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) not in self._initial_parameters  # _see_all() records those
        ]
        self._see_parameters(parameters, [self._parameter_name(each) for each in parameters])
        self._see_gradients()
        # Steps nest: a step may call that of its base class, or that of another optimizer.
        if self._step is None:
            self._step = self._begin("optimizer")
        else:
            self._note("", self._step)
        fresh = "" if optimizer.state else type(optimizer).__name__
        self._recording.stepped += (self._step, id(optimizer), fresh)

    def end_step(self, optimizer: Optimizer, *_: object) -> None:
        """Record the end of an optimizer's step, and its state."""
        if self._compiling():
            return
        ends = steps_around(sys._getframe(1).f_back, self._wrapper) == 0
        self._note("end" if ends else "", -1 if self._step is None else self._step)
        if ends:
            self._step = None
        states = list(optimizer.state.values())
        # Most optimizers update their state in place; new tensors change some of the addresses.
        samples = [states[at] for at in (0, len(states) // 2, -1)] if states else []
        places = [
            place_of(tensor) for state in samples for tensor in nested_tensors(state, MAX_DEPTH)
        ]
        if self._states.get(id(optimizer)) == (len(states), places):
            return
        self._states[id(optimizer)] = len(states), places
        tensors: list[Tensor] = []
        names: list[str] = []
        for parameter, state in zip(list(optimizer.state), states, strict=True):
            tensors += (inside := nested_tensors(state, MAX_DEPTH))
            names += [self._parameter_name(parameter)] * len(inside)
        self._sweep("optimizer state", tensors, names)

    def _begin(self, name: Literal["backward", "optimizer"]) -> int:
        line = users_line(sys._getframe(2))
        number = next(self._numbers)
        self._note(name, number, line and self._recording.lines.setdefault(line, line))
        return number

    def _end_failed_step(self) -> None:
        """End a step that raised: PyTorch runs no hook then."""
        if self._step is not None and steps_around(sys._getframe(2).f_back, self._wrapper) == 0:
            self._note("end", self._step)
            self._step = None

    def _see_gradients(self) -> None:
        entries = list(self._parameters.values())
        gradients = gradients_of(reference() for reference, _ in entries)
        names = [
            name for (_, name), each in zip(entries, gradients, strict=True) if each is not None
        ]
        self._sweep("gradients", [each for each in gradients if each is not None], names)

    def _sweep(
        self, category: Category, tensors: Sequence[Tensor], names_of: Sequence[str] | None = None
    ) -> None:
        """Record the addresses of tensors, and their names if they are given."""
        time = time_ns()
        names: list[str] = []
        addresses: list[int] = []
        if self._plain.issuperset(map(type, tensors)):
            try:  # no Python loop, to be fast: a model's parameters are swept in each step
                addresses += map(self._tensor.data_ptr, tensors)
                names += names_of or [""] * len(tensors)
                tensors = ()
            except RuntimeError:  # some tensors have no storage
                addresses.clear()
        for tensor, name in zip(tensors, names_of or itertools.repeat("")):  # noqa: B905 - no end
            for part in plain_tensors(tensor):
                names.append(name)
                addresses.append(place_of(part)[1])
        if names:
            self._recording.seen += [time, category, len(names), *names, *addresses]


class _Tree:
    """The paths and tensors of a module and its submodules, by weak references."""

    def __init__(self, root: Module) -> None:
        top = type(root).__name__
        self.names: dict[int, tuple[weakref.ref[Module], str]] = {}
        for path, module in root.named_modules():
            self.names[id(module)] = weakref.ref(module), f"{top}.{path}" if path else top
        self._paths: dict[str, list[tuple[weakref.ref[Module], dict[str, str]]]] = {
            kind: [
                (reference, {key: f"{name}.{key}" for key in getattr(module, kind).keys()})  # noqa: SIM118 - see _registered
                for reference, name in self.names.values()
                if (module := reference()) is not None and getattr(module, kind)
            ]
            for kind in ("_parameters", "_buffers")
        }

    def tensors(self, kind: Literal["_parameters", "_buffers"]) -> tuple[list[Tensor], list[str]]:
        """Return the modules' current parameters or buffers, and their paths.

        Nothing checks what a program puts into these dicts: with tensordict, a buffer may be a
        TensorDict. Only tensors are taken.
        """
        from torch import Tensor

        tensors: list[Tensor] = []
        names: list[str] = []
        for reference, paths in self._paths[kind]:
            module = reference()
            for key, tensor in getattr(module, kind).items() if module is not None else ():
                if isinstance(tensor, Tensor) and key in paths:
                    tensors.append(tensor)
                    names.append(paths[key])
        return tensors, names


def _registered(tensors: Mapping[str, Tensor | None], name: str) -> Tensor | None:
    """Return a module's parameter or buffer by name.

    In modules of ``torch.jit.script`` or ``torch.jit.trace`` the dicts have neither ``get`` nor
    iteration (``torch.jit._script.OrderedDictWrapper``).
    """
    from torch import Tensor

    found = tensors[name] if name in tensors else None  # noqa: SIM401
    return found if isinstance(found, Tensor) else None  # see _Tree.tensors


def nested_tensors(value: object, depth: int) -> list[Tensor]:
    """Return the tensors in lists and dicts, down to a depth of nesting."""
    from torch import Tensor

    tensors: list[Tensor] = []
    level = [value]
    for _ in range(depth + 1):
        below: list[object] = []
        for element in level:
            if isinstance(element, Tensor):
                tensors.append(element)
            elif isinstance(element, dict):
                below.extend(element.values())
            elif isinstance(element, (list, tuple)):
                below.extend(element)
        level = below
    return tensors
