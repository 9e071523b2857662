"""Replaces cuDNN's dropout state of recurrent networks, so that each test creates its own.

PyTorch creates a device's state (some 4 MiB) at the first recurrent network with dropout, and
caches it for the life of the process. For later tests it would be foreign memory, which is not
counted: their peaks would be lower than alone. So the first such network of each test gets a new
state.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.devices.cuda_graphs import GRAPHS
from pytest_gpumem.notes import Note, NoteKind
from pytest_gpumem.patches import Patch
from pytest_gpumem.recording.plain_tensors import place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch._ops import OpOverload

    Function = Callable[..., object]
    IsForeign = Callable[[tuple[int, int]], bool]

RECURRENT: Final = Patch(
    "torch._VF",
    *("lstm", "gru", "rnn_tanh", "rnn_relu"),
    reason="cuDNN's state of dropout is new in each test",
)
KEPT: Final = Note(
    NoteKind.EARLIER_MEMORY,
    "an earlier CUDA graph uses cuDNN's state of dropout, which is not counted: alone, the test "
    "takes some 4 MiB more",
)


class DropoutStates:
    """Replaces this process's dropout states that are older than the test."""

    def __init__(self) -> None:
        self._is_foreign: IsForeign | None = None
        """whether the block at (device, address) is older than the test; None outside of tests"""
        self._earlier: list[Tensor] = []
        """the replaced states: references keep their memory allocated until the test has ended"""
        self.notes: tuple[Note, ...] = ()
        self._wrappers: dict[str, Function] = {}
        """RECURRENT's wrapped functions by name; created once, as torch.jit looks functions up by
        id"""

    @contextmanager
    def renewed(self, is_foreign: IsForeign) -> Iterator[None]:
        """Replace states that are foreign memory when a network uses them."""
        import torch

        if not self._wrappers:
            self._wrap()
        before, self._is_foreign, self.notes = self._is_foreign, is_foreign, ()
        earlier, self._earlier = self._earlier, []
        try:
            with ExitStack() as stack:
                RECURRENT.put(torch._VF, self._wrappers, stack)
                yield
        finally:
            self._is_foreign, self._earlier = before, earlier

    def _wrap(self) -> None:
        import torch
        from torch.jit._builtins import _register_builtin
        from torch.utils._python_dispatch import TorchDispatchMode

        composite = torch._C.DispatchKey.CompositeImplicitAutograd

        class Renewing(TorchDispatchMode):
            def __torch_dispatch__(
                self,
                function: OpOverload,
                _: object,
                args: Any = (),  # noqa: ANN401 - PyTorch's
                kwargs: Any = None,  # noqa: ANN401 - PyTorch's
            ) -> object:
                if function is torch.ops.aten._cudnn_rnn.default and args[-1] is not None:
                    DROPOUT._renew(args[-1])  # the only place where Python can reach the state
                name = function.name().removeprefix("aten::").partition(".")[0]
                if name in RECURRENT.names:  # in inference mode it is not decomposed yet
                    with self:
                        return function._op_dk(composite, *args, **(kwargs or {}))
                return function(*args, **(kwargs or {}))

        def make(function: Function) -> Function:
            def call(*args: Any) -> object:  # noqa: ANN401 - PyTorch's
                drops = any(isinstance(value, float) and value for value in args)
                if self._is_foreign is None or not drops or not args[0].is_cuda:
                    return function(*args)
                with Renewing():  # type: ignore[no-untyped-call]
                    return function(*args)

            # Warning filters match the module that calls PyTorch's function.
            scope = {**globals(), "__name__": "torch.nn.modules.rnn"}
            as_torch = FunctionType(call.__code__, scope, call.__name__, None, call.__closure__)
            _register_builtin(as_torch, f"aten::{function.__name__}")
            return as_torch

        functions = RECURRENT.values(torch._VF)
        self._wrappers = {name: make(function) for name, function in functions.items()}

    def _renew(self, state: Tensor) -> None:
        """Put a new state into PyTorch's cached tensor if the old state is foreign memory."""
        import torch

        place = place_of(state)
        if self._is_foreign is None or not self._is_foreign(place):
            return
        if place in GRAPHS.blocks:  # a replay of the graph may write to it
            self.notes = (KEPT,)
            return
        self._earlier.append(state.detach())
        seed = int(torch.empty((), dtype=torch.int64).random_().item())  # as in PyTorch
        with torch.inference_mode(mode=False):  # tests could not train with an inference tensor
            state.data = torch._cudnn_init_dropout_state(
                0.5,  # each network sets its own rate
                train=True,
                dropout_seed=seed,
                dtype=state.dtype,
                device=state.device,
            )


DROPOUT: Final = DropoutStates()
