"""PyTorch's caching allocator on the virtual GPU: the figures that PyTorch documents, exactly."""

import itertools
import random
from dataclasses import replace

import pytest
from helpers.virtual_gpu import CARD_80GIB, GIB, MIB, tensor, virtual_card

from pytest_gpumem.devices.memory_cap import set_cap

# Facts of c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize, kSmallSize, kSmallBuffer, kLargeBuffer,
# kMinLargeAlloc, kRoundLarge.
BLOCK, SMALL, SMALL_SEGMENT = 512, 1 * MIB, 2 * MIB
LARGE_SEGMENT, FROM_ITS_OWN, ROUND = 20 * MIB, 10 * MIB, 2 * MIB


@pytest.fixture
def device():
    with virtual_card(CARD_80GIB) as device:
        yield device


def held(index=0):
    """Return (allocated, reserved)."""
    import torch

    return torch.cuda.memory_allocated(index), torch.cuda.memory_reserved(index)


@pytest.mark.parametrize(
    ("size", "allocated"), [(1, 512), (512, 512), (513, 1024), (3 * MIB + 1, 3 * MIB + 512)]
)
def test_sizes_are_rounded_up_to_512_bytes(device, size, allocated):
    one = tensor(size)
    assert held()[0] == allocated
    del one
    assert held()[0] == 0


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, SMALL_SEGMENT),
        (SMALL, SMALL_SEGMENT),
        (SMALL + 1, LARGE_SEGMENT),
        (FROM_ITS_OWN - 512, LARGE_SEGMENT),
        (FROM_ITS_OWN, FROM_ITS_OWN),
        (FROM_ITS_OWN + 1, FROM_ITS_OWN + ROUND),
        (33 * MIB, 34 * MIB),
    ],
)
def test_a_request_takes_a_segment_of_the_documented_size(device, size, segment):
    one = tensor(size)
    assert held()[1] == segment
    assert device.library.account(0).charged == segment
    del one


def test_small_requests_share_a_segment(device):
    ones = [tensor(MIB // 2) for _ in range(4)]
    assert held() == (2 * MIB, SMALL_SEGMENT)
    ones.append(tensor(1))
    assert held() == (2 * MIB + 512, 2 * SMALL_SEGMENT)


def test_what_is_freed_stays_reserved_until_the_cache_is_emptied(device):
    import torch

    one = tensor(30 * MIB)
    del one
    assert held() == (0, 30 * MIB)
    one = tensor(30 * MIB)
    assert held() == (30 * MIB, 30 * MIB)
    del one
    torch.cuda.empty_cache()
    assert held() == (0, 0)
    assert device.library.account(0).charged == 0


def test_the_snapshot_shows_the_segments_as_they_are(device):
    import torch

    one, two = tensor(3 * MIB), tensor(700)
    found = {(s["total_size"], s["allocated_size"]) for s in torch.cuda.memory_snapshot()}
    assert found == {(LARGE_SEGMENT, 3 * MIB), (SMALL_SEGMENT, 1024)}
    assert one.data_ptr() in {s["address"] for s in torch.cuda.memory_snapshot()}
    del two


def test_memory_runs_out_at_the_cards_capacity_exactly(device):
    """To the byte: what is left when it fails is less than what was asked for."""
    import torch

    card = replace(CARD_80GIB, name="1 GiB", total_memory=GIB, context=100 * MIB)
    device.open(card, 1)
    assert torch.cuda.mem_get_info() == (924 * MIB, GIB)
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 92[56]\.00 MiB"):
        tensor(925 * MIB)  # newer versions say what the segment would have been
    one = tensor(924 * MIB)
    assert torch.cuda.mem_get_info() == (0, GIB)
    with pytest.raises(torch.OutOfMemoryError):
        tensor(1)
    assert held() == (924 * MIB, 924 * MIB)
    del one
    two = tensor(1)  # it fits once the cache, which has 924 MiB, was given back
    assert held()[0] == 512
    del two


@pytest.mark.parametrize("limit", [20 * MIB, 20 * MIB + 1, 123 * MIB + 512, 8 * GIB - 1])
def test_a_cap_is_exact(device, limit):
    import torch

    set_cap(0, limit)
    try:
        most = limit // ROUND * ROUND
        one = tensor(most)
        assert held()[1] == most
        with pytest.raises(torch.OutOfMemoryError):
            tensor(1)
        del one
        with pytest.raises(torch.OutOfMemoryError):
            tensor(most + 1)
    finally:
        set_cap(0, None)


def test_two_devices_hold_memory_of_their_own():
    import torch

    with virtual_card(CARD_80GIB, count=2) as device:
        one, two = tensor(30 * MIB, 0), tensor(1, 1)
        assert (held(0), held(1)) == ((30 * MIB, 30 * MIB), (512, SMALL_SEGMENT))
        there = one.to("cuda:1")
        assert there.device.index == 1
        assert held(1)[0] == 30 * MIB + 512
        assert device.library.account(1).charged == 32 * MIB
        assert torch.cuda.device_count() == 2
        del one, two, there


def test_a_block_is_not_reused_on_another_stream(device):
    import torch

    side = torch.cuda.Stream()
    one = tensor(30 * MIB)
    del one
    with torch.cuda.stream(side):
        two = tensor(30 * MIB)
    assert held() == (30 * MIB, 60 * MIB)
    del two


def test_record_stream_keeps_a_block_until_its_event_is_seen(device):
    """All work is done at once here: the next allocation takes the block back."""
    import torch

    side = torch.cuda.Stream()
    one = tensor(30 * MIB)
    one.record_stream(side)
    address = one.data_ptr()
    del one
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == 0
    assert torch.cuda.memory_stats()["active_bytes.all.current"] == 30 * MIB
    two = tensor(30 * MIB)
    assert (two.data_ptr(), held()) == (address, (30 * MIB, 30 * MIB))


def test_pinned_memory_and_copies_that_do_not_block(device):
    import torch

    here = torch.arange(1000.0).pin_memory()
    assert here.is_pinned()
    assert not torch.arange(4.0).is_pinned()
    there = here.to("cuda", non_blocking=True)
    assert held()[0] == 4096
    back = torch.empty(1000, pin_memory=True)
    back.copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(back, here)  # nothing ran in between
    (there * 2).sum()
    assert there.cpu().abs().sum() == 0


class Allocator:
    """What PyTorch's allocator does, said in Python: best fit, split, merge, per pool and stream.

    After c10/cuda/CUDACachingAllocator.cpp; a segment's blocks are [offset, size, is_free].
    Of blocks that fit alike, older versions take the lowest address, newer ones that of the oldest
    segment.
    """

    def __init__(self, limit, *, oldest_first):
        self.limit = limit
        self.segments = []
        self._first = "birth" if oldest_first else "number"
        self._births = 0
        self.peaks = [0, 0]

    @property
    def allocated(self):
        return sum(b[1] for s in self.segments for b in s["blocks"] if not b[2])

    @property
    def reserved(self):
        return sum(s["size"] for s in self.segments)

    def malloc(self, size, stream):
        size = max(BLOCK, -(-size // BLOCK) * BLOCK)
        small = size <= SMALL
        found = self._best(size, small, stream) or self._new(size, small, stream)
        if found is None:
            self.empty_cache()
            found = self._new(size, small, stream)
        if found is None:
            return None
        segment, block = found
        rest = block[1] - size
        if rest >= (BLOCK if small else SMALL + 1):
            at = segment["blocks"].index(block)
            segment["blocks"].insert(at + 1, [block[0] + size, rest, True])
            block[1] = size
        block[2] = False
        self.peaks = [
            max(a, b) for a, b in zip(self.peaks, (self.allocated, self.reserved), strict=False)
        ]
        return segment, block

    def _best(self, size, small, stream):
        fits = [
            (b[1], s[self._first], b[0], s, b)
            for s in self.segments
            if (s["small"], s["stream"]) == (small, stream)
            for b in s["blocks"]
            if b[2] and b[1] >= size
        ]
        best = min(fits, key=lambda it: it[:3], default=None)
        return best and best[3:]

    def _new(self, size, small, stream):
        if small:
            room = SMALL_SEGMENT
        elif size < FROM_ITS_OWN:
            room = LARGE_SEGMENT
        else:
            room = -(-size // ROUND) * ROUND
        if self.reserved + room > self.limit:
            return None
        # The virtual GPU's order: single pages in the lowest gap of a region of 2**19 of them,
        # larger segments in the highest gap that has room for them, from the gap's top.
        span, top = room // ROUND, 0
        taken = {segment["number"] for segment in self.segments}
        for other in sorted(self.segments, key=lambda s: -s["number"]):
            if top - (other["number"] + other["span"]) >= span:
                break
            top = other["number"]
        at = top - span
        if span == 1:
            at = next(page for page in itertools.count(-(2**19)) if page not in taken)
        self._births += 1
        block = [0, room, True]
        segment = {"size": room, "small": small, "stream": stream, "number": at, "span": span}
        self.segments.append(segment | {"birth": self._births, "blocks": [block]})
        return self.segments[-1], block

    def free(self, handle):
        segment, block = handle
        block[2] = True
        blocks = segment["blocks"]
        at = blocks.index(block)
        if at + 1 < len(blocks) and blocks[at + 1][2]:
            block[1] += blocks.pop(at + 1)[1]
        if at and blocks[at - 1][2]:
            blocks[at - 1][1] += blocks.pop(at)[1]

    def empty_cache(self):
        self.segments = [s for s in self.segments if len(s["blocks"]) > 1 or not s["blocks"][0][2]]


def takes_the_oldest_segment_first():
    """Whether of two blocks that fit alike this torch takes that of the older segment."""
    import torch

    take, give = torch.cuda.caching_allocator_alloc, torch.cuda.caching_allocator_delete
    first, second = ([take(6 * MIB, 0) for _ in range(3)] for _ in range(2))  # 20 MiB each
    assert second[0] < first[0]
    older = first.pop()
    give(older)
    give(second.pop())
    taken = take(6 * MIB, 0)
    for block in [*first, *second, taken]:
        give(block)
    torch.cuda.empty_cache()
    return taken == older


@pytest.mark.parametrize("seed", range(4))
def test_random_sequences_agree_with_a_model_of_the_allocator(device, seed):
    """Allocations, frees, two streams, emptied caches and a cap: the figures at each step."""
    import torch

    chance = random.Random(seed)
    limit = 400 * MIB
    model, live = Allocator(limit, oldest_first=takes_the_oldest_segment_first()), []
    set_cap(0, limit)
    streams = [torch.cuda.current_stream().cuda_stream, torch.cuda.Stream().cuda_stream]
    torch.cuda.reset_peak_memory_stats()
    seen = dict.fromkeys(["emptied", "freed", "given", "refused"], 0)
    try:
        for step in range(500):
            act = chance.random()
            if act < 0.02:
                seen["emptied"] += 1
                torch.cuda.empty_cache()
                model.empty_cache()
            elif live and act < 0.47:
                seen["freed"] += 1
                block, handle = live.pop(chance.randrange(len(live)))
                torch.cuda.caching_allocator_delete(block)
                model.free(handle)
            else:
                size, which = int(chance.lognormvariate(14, 2.5)) + 1, chance.choice([0, 0, 0, 1])
                handle = model.malloc(size, which)
                try:
                    block = torch.cuda.caching_allocator_alloc(size, 0, streams[which])
                except torch.OutOfMemoryError:
                    block = None
                assert (block is None) == (handle is None), f"step {step}: {size} bytes"
                seen["given" if handle else "refused"] += 1
                live += [(block, handle)] if handle else []
            assert held() == (model.allocated, model.reserved), f"step {step}"
            assert device.library.account(0).charged == model.reserved
        peaks = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
        assert peaks == model.peaks
        assert all(count > 3 for count in seen.values()), seen
    finally:
        for block, _ in live:
            torch.cuda.caching_allocator_delete(block)
        set_cap(0, None)
