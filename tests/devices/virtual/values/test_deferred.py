"""Large tensors made of known values: computed once something reads them."""

import ctypes

import pytest
from helpers.virtual_gpu import values_of, virtual_card

from pytest_gpumem.devices.virtual import native
from pytest_gpumem.devices.virtual.library import CAPACITIES

SIZE = 1024
"""rows and columns of masks: a mebibyte, more than is computed at once"""


@pytest.fixture
def mode():
    from pytest_gpumem.devices.virtual.values.mode import ValueMode

    with virtual_card() as device, ValueMode(device.library) as mode:
        yield mode


def causal(padding=None, device="cuda"):
    """Return a mask of four dimensions, made as transformers makes it."""
    import torch

    rows = torch.arange(SIZE, device=device)
    mask = (rows[None, :] <= rows[:, None])[None, None]
    if padding is not None:
        mask = mask & padding[:, None, None, :]
    return mask


def test_a_large_mask_costs_nothing_until_it_is_read(mode):
    import torch

    backed = values_of(mode._library).backed
    padding = torch.ones(2, SIZE, dtype=torch.bool, device="cuda")
    mask = causal(padding)
    padding.zero_()  # the mask was made before
    torch.ones(2, SIZE, device="cuda")
    assert values_of(mode._library).backed - backed < 64 << 10
    assert mask.sum().item() == SIZE * (SIZE + 1)
    assert values_of(mode._library).backed - backed > 2 * SIZE * SIZE
    assert not mask.all()
    assert not mode.decisions.counts[1]
    assert not mode.host.unknown.failures


@pytest.mark.usefixtures("mode")
def test_what_is_read_of_large_masks_is_the_cpus():
    import torch

    padding = torch.arange(2 * SIZE).reshape(2, SIZE) % 7 > 1

    def answers(device):
        mask = causal(padding.to(device), device)
        scores = torch.zeros(2, 1, SIZE, SIZE, device=device).masked_fill(~mask, -1e9)
        chosen = torch.empty(2, 1, SIZE, SIZE, device=device)[mask].shape
        host = (torch.ones(1, 1, SIZE, SIZE, dtype=torch.bool).tril().to(device)) ^ mask
        rows = torch.full((SIZE, SIZE), 3, device=device)
        rows[5:, 7] = 2
        ones = torch.ones_like(scores)
        return [
            mask.any().item(),
            mask[1, 0, 9, :20].tolist(),
            mask[:, :, 3:600].sum(-1).flatten().tolist(),
            (scores == 0).sum().item(),
            chosen,
            host.cpu().sum().item(),
            len(mask.nonzero()),
            (rows == 3).all().item(),
            rows.sum().item(),
            ones.all().item(),
            torch.where(mask, 1.0, 0.0).eq(1).sum().item(),
            mask.to(torch.float32).mean().item() > 0.3,
            mask.cpu().sum().item(),
        ]

    assert answers("cuda") == answers("cpu")


def test_large_token_ids_and_edges_of_the_host_are_known(mode):
    """100,000 ids were unknown, and ``torch.unique`` of them had no element."""
    import torch

    ids = torch.arange(100_000) % 999
    edges = torch.stack([ids, ids.flip(0)]).int()
    on_device, copied = ids.to("cuda"), torch.empty(2, 100_000, dtype=torch.int32, device="cuda")
    copied.copy_(edges)
    expected = edges[:, edges[0] != edges[1]].shape
    ids.zero_(), edges.zero_()  # the copies were made before
    assert torch.unique(on_device, return_counts=True)[1].shape == (999,)
    assert copied[:, copied[0] != copied[1]].shape == expected
    assert on_device.max().item() == 998
    assert not mode.decisions.counts[1]
    images = torch.ones(32 << 20, dtype=torch.uint8).to("cuda")
    assert not mode.values.is_known(images)
    assert not mode.deferred.covers(images)


@pytest.mark.usefixtures("mode")
def test_masks_that_are_changed_in_place_are_the_cpus():
    import torch

    def answers(device):
        mask = causal(device=device).clone()
        mask.logical_not_()
        counts = [mask.sum().item()]
        mask[:, :, :800].logical_and_(torch.arange(SIZE, device=device) > 900)
        mask[:, :, 10, 3:7] = True
        mask[:, :, :, 50:] = True
        counts.append(mask.sum().item())
        for row in range(0, 600, 6):  # of texts that are packed
            mask[..., row : row + 4, row : row + 4] = False
        counts.append(mask.sum().item())
        mask[..., 3] ^= True
        other = torch.zeros(SIZE, SIZE, dtype=torch.bool, device=device)
        other.copy_(mask[0, 0])
        mask.fill_(False)
        return [*counts, mask.any().item(), other.sum().item()]

    assert answers("cuda") == answers("cpu")


def test_what_was_written_since_is_unknown(mode):
    import torch

    ones = torch.ones(3 * SIZE, 3 * SIZE, device="cuda")
    assert mode.deferred.covers(ones)
    ones.add_(torch.randn(3 * SIZE, 3 * SIZE, device="cuda"))
    assert not mode.deferred.covers(ones)
    mask = torch.ones(SIZE, SIZE, dtype=torch.bool, device="cuda")
    address = mask.data_ptr()
    del mask
    again = torch.empty(SIZE, SIZE, dtype=torch.bool, device="cuda")
    assert again.data_ptr() == address
    assert not mode.deferred.covers(again)
    mask = causal()
    torch.cuda._sleep(1)  # a kernel that writes nothing
    assert mode.deferred.covers(mask)
    ctypes.CDLL(str(native.LIBRARY)).cudaGraphLaunch(None, None)  # kernels of no operator
    assert not mode.deferred.covers(mask)
    mask = causal()
    mask.random_()
    assert not mode.deferred.covers(mask)
    assert not mode.deferred.covers(causal(torch.rand(9, SIZE, SIZE, device="cuda")[0, :1] > 0.5))


def test_so_many_are_noted_at_most(mode):
    import torch

    from pytest_gpumem.devices.virtual.values import deferred

    masks = [torch.ones(SIZE, SIZE, dtype=torch.bool, device="cuda") for _ in range(150)]
    assert [mode.deferred.covers(mask) for mask in masks] == [False] * 86 + [True] * 64
    assert len(mode.deferred.recipes) < 2 * CAPACITIES.deferred + 1
    assert mode.deferred.covers(~masks[-1])
    on_host = torch.ones(deferred.MAX_KEPT // 2, dtype=torch.bool)
    on_device = [on_host.cuda() for _ in range(3)]
    assert [mode.deferred.covers(mask) for mask in on_device] == [True, True, False]
    mask = torch.ones(deferred.MAX_WORK // 8, dtype=torch.bool, device="cuda")
    for is_covered in [True] * 8 + [False]:
        assert mode.deferred.covers(mask) == is_covered
        mask = ~mask
    mask = masks[-1]
    for _ in range(deferred.MAX_STEPS):
        mask = ~mask
    assert not mode.deferred.covers(mask)
