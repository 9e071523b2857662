"""Change the card of a process: PyTorch caches a card's properties, and choices based on them.

The cards of a real machine never change, so PyTorch clears none of these caches. If they were left,
what a test allocates would depend on the cards of the tests before it.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_gpumem.devices.virtual.gpu_choices import cublas_workspace
from pytest_gpumem.devices.virtual.library import CAPACITIES, NativeLibrary
from pytest_gpumem.errors import DeviceError
from pytest_gpumem.recording.allocator_view import VIEW

if TYPE_CHECKING:
    from types import ModuleType

    from pytest_gpumem.devices.cards import Card

# at::cuda::getDeviceProperties(c10::DeviceIndex), declared in ATen/cuda/CUDAContextLight.h, returns
# a pointer to PyTorch's cached properties; DeviceIndex is int8_t, in older versions int16_t
_PROPERTIES: Final = (
    ("_ZN2at4cuda19getDevicePropertiesEa", ctypes.c_int8),
    ("_ZN2at4cuda19getDevicePropertiesEs", ctypes.c_int16),
)

# at::native::_cudnn_set_conv_benchmark_empty_cache(bool), declared in ATen/native/ConvUtils.h
_EMPTYING: Final = "_ZN2at6native37_cudnn_set_conv_benchmark_empty_cacheEb"

# The cache of cub::PtxVersion, declared in cub/util_device.cuh: for each of 128 devices a flag, an
# architecture and an error. The architecture decides how much temporary memory CUB asks for. All
# zero is an empty cache.
_ARCHITECTURES: Final = (
    "_ZZN14at_cuda_detail3cub26GetPerDeviceAttributeCacheINS0_18PtxVersionCacheTagEEE"
    "RNS0_23PerDeviceAttributeCacheEvE5cache"
)
_ArchitectureCache = ctypes.c_int32 * 3 * 128

CUDNN_FIRST: Final = ((9, 0), (10, 0))
"""compute capabilities on which newer versions of PyTorch try cuDNN's attention first
(check_prefer_cudnn_attention in ATen/native/transformers/cuda/sdp_utils.cpp)"""


class CardChange:
    """Makes PyTorch forget the card of earlier tests."""

    def __init__(self, library: NativeLibrary, torch: ModuleType) -> None:
        self._library = library
        self._torch = torch
        folder = Path(torch.__file__ or "").parent / "lib"
        self._cuda = ctypes.CDLL(str(folder / "libtorch_cuda.so"))
        self._cpu = ctypes.CDLL(str(folder / "libtorch_cpu.so"))
        self._runtime = int(torch.version.cuda.split(".")[0])
        self._card: Card | None = None
        self._orders: tuple[list[int], list[int]] | None = None
        """order of attention's backends on most cards, and on those of CUDNN_FIRST"""

    def to(self, card: Card) -> None:
        """Make PyTorch use a card, after CUDA has started.

        Raises:
            DeviceError: this version of PyTorch keeps the earlier card.
        """
        previous = self._card
        self._library.set_card(card)
        if not (self._forget_architecture() and self._fill_properties()) and previous:
            self._library.set_card(previous)
            raise DeviceError(
                f"card {card.name!r}",
                f"torch {self._torch.__version__} keeps the properties of {previous.name}",
                "run the tests of each card in a separate process",
            )
        self._card = card
        self._library.switch_emptying(getattr(self._cpu, _EMPTYING, None))
        self._set_attention_order(card)
        if not os.environ.get("CUBLAS_WORKSPACE_CONFIG"):
            # A PyTorch that has this setter caches the workspace size for the process's first card,
            # and its own reset restores that size. Older versions read the card each time.
            with suppress(AttributeError):
                self._torch._C._cuda_setCublasWorkspaceSize(cublas_workspace(card.capability))

    def _fill_properties(self) -> bool:
        """Overwrite PyTorch's cached properties; return whether they were found."""
        for symbol, index_type in _PROPERTIES:
            get = getattr(self._cuda, symbol, None)
            if get is not None:
                get.restype, get.argtypes = ctypes.c_void_p, [index_type]
                for index in range(CAPACITIES.devices):
                    self._library.fill_properties(get(index), index, self._runtime)
                return True
        return False

    def _forget_architecture(self) -> bool:
        """Clear CUB's cached architectures; return whether they were found."""
        try:
            cache = _ArchitectureCache.in_dll(self._cuda, _ARCHITECTURES)
        except ValueError:
            return False
        ctypes.memset(ctypes.byref(cache), 0, ctypes.sizeof(cache))
        return True

    def _set_attention_order(self, card: Card) -> None:
        """Set the order in which scaled_dot_product_attention tries its backends.

        PyTorch chooses the order once, at the first call in a process. So both orders are read when
        the first card is set: the default, and the one that PyTorch chooses on CUDNN_FIRST cards.
        Versions without a getter choose at each call.
        """
        torch = self._torch
        if not hasattr(torch._C, "_get_sdp_priority_order"):
            return
        if self._orders is None:
            usual = torch._C._get_sdp_priority_order()
            self._library.set_card(replace(card, capability=CUDNN_FIRST[0]))
            self._fill_properties()
            with VIEW.hidden([torch.cuda.current_device()]):
                tensor = torch.empty(1, 1, 8, 8, device="cuda", dtype=torch.float16)
                torch._fused_sdp_choice(tensor, tensor, tensor)
                del tensor
                torch.cuda.empty_cache()
            self._orders = usual, torch._C._get_sdp_priority_order()
            self._library.set_card(card)
            self._fill_properties()
        torch._C._set_sdp_priority_order(self._orders[card.capability in CUDNN_FIRST])
