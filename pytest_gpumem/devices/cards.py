"""GPU models as data: CUDA's report of each card, and the limits of a compute capability.

Total memory is ``cudaDeviceProp.totalGlobalMem``, which ``torch.cuda.get_device_properties``
gives as ``total_memory``. It is less than the size on the box, and moves by up to one per cent
with the driver and with ECC. Each card has one figure that somebody saw on such a card under
Linux, with as recent a driver as a record to the byte was found for. ``Card.source`` says where,
and what others saw. Where a log has no repository or issue to name, its driver and tool are given.

The CUDA context is memory that a process takes before its first allocation. NVIDIA documents no
figure. With lazy module loading (PyTorch's default since 1.13) published measurements lie between
107 MiB (RTX 4060 Ti) and 555 MiB (RTX PRO 6000 Blackwell), both in ggml-org/llama.cpp#23604;
before lazy loading it was 0.7 to 1.1 GiB. They follow 2 KiB for each thread that can be resident
on the card, plus 8 MiB, within 4 per cent on 5 of 5 cards (also H100, RTX 3090, RTX 6000 Ada); a
T4 showed 41 MiB more than that. A card without a measurement of its own has this estimate, and
says so.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from pytest_gpumem.devices.card_limits import LIMITS, ArchLimits
from pytest_gpumem.errors import SpecError
from pytest_gpumem.sizes import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class Card:
    """One GPU model, as CUDA reports it.

    Attributes:
        name: as users write it, such as ``A100-80GB``.
        device_name: ``cudaDeviceProp.name``.
        total_memory: ``cudaDeviceProp.totalGlobalMem``, in bytes.
        capability: compute capability, major and minor.
        sm_count: streaming multiprocessors.
        context: bytes that a CUDA context takes before the first allocation.
        l2_cache_size: in bytes.
        memory_bus_width: in bits.
        source: where these figures come from.
    """

    name: str
    device_name: str
    total_memory: int
    capability: tuple[int, int]
    sm_count: int
    context: int
    l2_cache_size: int
    memory_bus_width: int
    source: str

    @property
    def usable_memory(self) -> int:
        """Bytes that are left for allocations once the CUDA context is made."""
        return self.total_memory - self.context

    @property
    def limits(self) -> ArchLimits:
        """The limits of this card's compute capability."""
        return LIMITS[self.capability]


_ESTIMATED = "context: estimated from the SM count"

# fmt: off
_TABLE = (
    Card(
        name="V100-16GB", device_name="Tesla V100-SXM2-16GB",
        total_memory=16_928_342_016, capability=(7, 0), sm_count=80,
        context=328 * MIB, l2_cache_size=6 * MIB, memory_bus_width=4096,
        source="deviceQuery, CUDA 12.4 driver: thamada/gls V100_x8_deviceQuery.py "
        f"(16911433728 with a CUDA 11.0 driver); {_ESTIMATED}",
    ),
    Card(
        name="V100-32GB", device_name="Tesla V100-SXM2-32GB",
        total_memory=34_072_559_616, capability=(7, 0), sm_count=80,
        context=328 * MIB, l2_cache_size=6 * MIB, memory_bus_width=4096,
        source="deviceQuery log, CUDA 12.9 driver, in exercises that use "
        "felicepantaleo/gpu_training (34089926656 with a CUDA 13.0 driver elsewhere); "
        f"{_ESTIMATED}",
    ),
    Card(
        name="T4", device_name="Tesla T4",
        total_memory=15_642_329_088, capability=(7, 5), sm_count=40,
        context=129 * MIB, l2_cache_size=4 * MIB, memory_bus_width=256,
        source="deviceQuery logs with CUDA 12.4 and 12.5 drivers, and torch's total on a "
        "cloud T4 (older drivers: 15655829504 to 15843721216); context: cudaMemGetInfo's "
        "total less free on a T4 of 15655829504 bytes, an upper bound",
    ),
    Card(
        name="RTX 2080 Ti", device_name="NVIDIA GeForce RTX 2080 Ti",
        total_memory=11_554_717_696, capability=(7, 5), sm_count=68,
        context=144 * MIB, l2_cache_size=5632 * KIB, memory_bus_width=352,
        source="torch.cuda.mem_get_info, driver 470: pytorch/pytorch#76224; SMs, L2 and bus "
        f"from a deviceQuery log with the same total; {_ESTIMATED}",
    ),
    Card(
        name="RTX 3060", device_name="NVIDIA GeForce RTX 3060",
        total_memory=12_587_106_304, capability=(8, 6), sm_count=28,
        context=92 * MIB, l2_cache_size=2304 * KIB, memory_bus_width=192,
        source="deviceQuery log, CUDA 12.4 driver, 12 GB model (12629508096 with a CUDA 12.2 "
        "driver, 12622168064 where torch 2.6 ran: Stone-ResearchLife/xMem); "
        f"{_ESTIMATED}",
    ),
    Card(
        name="RTX 3090", device_name="NVIDIA GeForce RTX 3090",
        total_memory=25_327_697_920, capability=(8, 6), sm_count=82,
        context=256 * MIB, l2_cache_size=6 * MIB, memory_bus_width=384,
        source="deviceQuery, CUDA 12.6 driver: thamada/gls RTX3090_deviceQuery.py "
        "(25206325248 to 25447170048 elsewhere); context: torch 2.7.1, driver 610: "
        "invoke-ai/InvokeAI#9413",
    ),
    Card(
        name="RTX 4060", device_name="NVIDIA GeForce RTX 4060",
        total_memory=8_186_822_656, capability=(8, 9), sm_count=24,
        context=80 * MIB, l2_cache_size=24 * MIB, memory_bus_width=128,
        source="weak: Ultralytics shows 7807 MiB on the desktop card under Linux; bytes are "
        "those of the RTX 4060 Laptop GPU with driver 595, which come to the same "
        "7807 MiB (8318222336 on a desktop card where torch 2.6 ran: "
        "Stone-ResearchLife/xMem); L2 of the same chip (AD107) in thamada/gls "
        f"RTX2000Ada_deviceQuery.py; {_ESTIMATED}",
    ),
    Card(
        name="RTX 4090", device_name="NVIDIA GeForce RTX 4090",
        total_memory=25_250_627_584, capability=(8, 9), sm_count=128,
        context=392 * MIB, l2_cache_size=72 * MIB, memory_bus_width=384,
        source="deviceQuery log, CUDA 13.0 driver; 23.52 GiB with R580 in "
        "pytorch/pytorch#182941 (25386352640 with CUDA 12.4: thamada/gls "
        f"RTX4090_deviceQuery.py); {_ESTIMATED}",
    ),
    Card(
        name="RTX 5090", device_name="NVIDIA GeForce RTX 5090",
        total_memory=33_677_180_928, capability=(12, 0), sm_count=170,
        context=518 * MIB, l2_cache_size=96 * MIB, memory_bus_width=512,
        source="deviceQuery, CUDA 12.8 driver: aikitoria/open-gpu-kernel-modules#1 "
        f"(33660534784 with a CUDA 13.0 driver); {_ESTIMATED}",
    ),
    Card(
        name="A10G", device_name="NVIDIA A10G",
        total_memory=22_587 * MIB, capability=(8, 6), sm_count=80,
        context=248 * MIB, l2_cache_size=6 * MIB, memory_bus_width=384,
        source="torch 2.15 nightly (cu130) prints 22587 MB, which is MiB rounded down: true "
        "to a MiB; 22.06 GiB in out-of-memory messages; bus as on the A10; "
        f"{_ESTIMATED}",
    ),
    Card(
        name="A10", device_name="NVIDIA A10",
        total_memory=23_696_375_808, capability=(8, 6), sm_count=72,
        context=224 * MIB, l2_cache_size=6 * MIB, memory_bus_width=384,
        source="deviceQuery log, CUDA 12.8 driver (23595909120 with CUDA 12.4: thamada/gls "
        f"A10_deviceQuery.py); {_ESTIMATED}",
    ),
    Card(
        name="L4", device_name="NVIDIA L4",
        total_memory=23_570_219_008, capability=(8, 9), sm_count=58,
        context=182 * MIB, l2_cache_size=48 * MIB, memory_bus_width=192,
        source="deviceQuery, CUDA 12.4 driver: thamada/gls L4_deviceQuery.py (23583784960 in "
        "bottlerocket-os/bottlerocket-kernel-kit#139; 22.04 GiB with CUDA 13 in "
        f"out-of-memory messages); {_ESTIMATED}",
    ),
    Card(
        name="A40", device_name="NVIDIA A40",
        total_memory=47_608_692_736, capability=(8, 6), sm_count=84,
        context=260 * MIB, l2_cache_size=6 * MIB, memory_bus_width=384,
        source="deviceQuery, CUDA 12.4 driver: thamada/gls A40x10_deviceQuery.py; "
        f"{_ESTIMATED}",
    ),
    Card(
        name="A100-40GB", device_name="NVIDIA A100-SXM4-40GB",
        total_memory=42_406_903_808, capability=(8, 0), sm_count=108,
        context=440 * MIB, l2_cache_size=40 * MIB, memory_bus_width=5120,
        source="torch 2.10, driver 570.133.20, a project's environment record; 39.50 GiB in "
        "TianheWu/CoSeR#10 (42298834944 with a CUDA 12.2 driver, and SMs, L2, bus: "
        f"bottlerocket-os/bottlerocket#3873); {_ESTIMATED}",
    ),
    Card(
        name="A100-80GB", device_name="NVIDIA A100-SXM4-80GB",
        total_memory=85_094_825_984, capability=(8, 0), sm_count=108,
        context=440 * MIB, l2_cache_size=40 * MIB, memory_bus_width=5120,
        source="torch 2.7.1 on a cloud A100-SXM4-80GB, a project's environment record "
        "(85100068864, and SMs, L2, bus: thamada/gls A100SXMx4_deviceQuery.py; from "
        f"84987740160 on); {_ESTIMATED}",
    ),
    Card(
        name="A800-80GB", device_name="NVIDIA A800-SXM4-80GB",
        total_memory=85_094_825_984, capability=(8, 0), sm_count=108,
        context=440 * MIB, l2_cache_size=40 * MIB, memory_bus_width=5120,
        source="weak: a project's hardware check expects this total, the A100-80GB's own; "
        "79.33 GiB in hahnyuan/PB-LLM#3, with a driver of 2023; the rest as on the "
        f"A100-80GB, whose chip it has; {_ESTIMATED}",
    ),
    Card(
        name="RTX A6000", device_name="NVIDIA RTX A6000",
        total_memory=51_160_023_040, capability=(8, 6), sm_count=84,
        context=260 * MIB, l2_cache_size=6 * MIB, memory_bus_width=384,
        source="deviceQuery log, CUDA 12.7 driver, ECC off by its size (47834660864 with ECC: "
        f"thamada/gls RTX_A6000_x9_deviceQuery.py); {_ESTIMATED}",
    ),
    Card(
        name="RTX 6000 Ada", device_name="NVIDIA RTX 6000 Ada Generation",
        total_memory=50_865_307_648, capability=(8, 9), sm_count=142,
        context=426 * MIB, l2_cache_size=96 * MIB, memory_bus_width=384,
        source="total and context: torch 2.10 (cu130): unslothai/unsloth-zoo#1053; the rest: "
        "thamada/gls RTX6000Ada_x8_deviceQuery.py (51002867712 with a CUDA 12.4 "
        "driver)",
    ),
    Card(
        name="L40S", device_name="NVIDIA L40S",
        total_memory=47_803_596_800, capability=(8, 9), sm_count=142,
        context=426 * MIB, l2_cache_size=96 * MIB, memory_bus_width=384,
        source="deviceQuery, CUDA 12.4 driver: thamada/gls L40S_deviceQuery.py; torch prints "
        "45589 MB too (47576711168 in alvarobartt/cuda-device-query); context: the "
        "RTX 6000 Ada's, which has as many SMs of the same chip",
    ),
    Card(
        name="H100", device_name="NVIDIA H100 80GB HBM3",
        total_memory=85_028_896_768, capability=(9, 0), sm_count=132,
        context=534 * MIB, l2_cache_size=50 * MIB, memory_bus_width=5120,
        source="deviceQuery log, CUDA 12.8 driver, SXM model (85045477376: thamada/gls "
        "H100SXMx8_deviceQuery.py; 85017755648 with CUDA 13.0); context: "
        "meta-pytorch/torchcomms#777",
    ),
    Card(
        name="H100-PCIe", device_name="NVIDIA H100 PCIe",
        total_memory=85_045_477_376, capability=(9, 0), sm_count=114,
        context=464 * MIB, l2_cache_size=50 * MIB, memory_bus_width=5120,
        source=f"nvaccelinfo log, driver 565.57.01 (81008 MiB by an older torch); {_ESTIMATED}",
    ),
    Card(
        name="H200", device_name="NVIDIA H200",
        total_memory=150_110_011_392, capability=(9, 0), sm_count=132,
        context=534 * MIB, l2_cache_size=60 * MIB, memory_bus_width=6144,
        source="weak: the total in an out-of-memory report of 2026, and 139.80 GiB in "
        "torch's messages (150021734400 with CUDA 12.4, and SMs, L2, bus: thamada/gls "
        "H200_deviceQuery.py); context: the H100's, which has as many SMs",
    ),
    Card(
        name="B200", device_name="NVIDIA B200",
        total_memory=191_503_007_744, capability=(10, 0), sm_count=148,
        context=600 * MIB, l2_cache_size=129536 * KIB, memory_bus_width=7680,
        source="torch 2.7.1 and 2.13, records in a project's tests; 178.35 GiB, SMs, L2 of "
        f"126.5 MiB and bus: pytorch/ao#4002; {_ESTIMATED}; a fresh process shows 0.7 "
        "GiB in use in sgl-project/sglang#25225",
    ),
)
# fmt: on

_cards = {card.name: card for card in _TABLE}
CARDS: Mapping[str, Card] = MappingProxyType(_cards)
"""all cards by name: those of the table, and those of files that were read"""

# Other names in use for a card, beside the one that users write and the one that CUDA reports.
_ALIASES: Mapping[str, str] = {
    "H100-80GB": "H100",
    "H100-SXM": "H100",
    "H100-SXM5": "H100",
    "H100 80GB PCIe": "H100-PCIe",
    "A100-40GB-SXM": "A100-40GB",
    "A100-80GB-SXM": "A100-80GB",
}


def card_names() -> tuple[str, ...]:
    """The names of all cards, in the order of the table."""
    return tuple(card.name for card in _TABLE)


def _key(name: str) -> str:
    """The part of a name that tells cards apart: no case, separators, maker or series."""
    compact = re.sub(r"[^a-z0-9]", "", name.lower())
    compact = re.sub(r"nvidia|tesla|geforce|rtx|generation", "", compact)
    return re.sub(r"(16|32|40|80)gi?b?$", r"\1gb", compact)


# A card's own name wins over CUDA's name of another one, and that over an alias.
_BY_KEY: Mapping[str, Card] = {
    **{_key(alias): CARDS[name] for alias, name in _ALIASES.items()},
    **{_key(card.device_name): card for card in CARDS.values()},
    **{_key(card.name): card for card in CARDS.values()},
}


def _card_of_file(path: str) -> Card:
    """Read a card, and add it to :data:`CARDS`.

    Raises:
        SpecError: the file does not describe a card, or another card has its name.
    """
    from pytest_gpumem.devices.card_file import read_card_file  # few suites have such a file

    card = Card(**read_card_file(Path(path)))
    if card.name in card_names() or _cards.get(card.name, card) != card:
        raise SpecError(
            f"card {path!r}", f"another card has the name {card.name!r}", "give it another name"
        )
    _cards[card.name] = card
    return card


def find_card(name: str) -> Card:
    """The card of this name, however it is spelt: ``a100 80gb``, ``RTX3090``, ``nvidia h100``.

    The name may be the path of a file that describes a card, "cards/mine.toml".

    Raises:
        SpecError: no card has this name, several could be meant by it, or its file is none.
    """
    name = str.__str__(name)  # of a subclass too, whose own methods may raise
    if name.endswith(".toml"):
        return _card_of_file(name)
    if name in _cards:
        return _cards[name]
    key = _key(name)
    if key in _BY_KEY:
        return _BY_KEY[key]
    # "a100" is the beginning of two cards' keys: each is named, in the order of the table.
    with_prefix = {
        card.name for card_key, card in _BY_KEY.items() if key and card_key.startswith(key)
    }
    candidates = [card_name for card_name in CARDS if card_name in with_prefix]
    if len(candidates) > 1:
        remedy = f"write {', '.join(candidates[:-1])} or {candidates[-1]}"
        raise SpecError(f"card {name!r}", "this name fits several cards", remedy)
    candidates = candidates or [
        _BY_KEY[similar].name for similar in difflib.get_close_matches(key, _BY_KEY, n=1)
    ]
    names = ", ".join(card_names())
    remedy = f"write one of {names}"
    if candidates:
        remedy = f"did you mean {candidates[0]!r}? The cards are {names}"
    raise SpecError(f"card {name!r}", "no card has this name", remedy)
