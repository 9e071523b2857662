"""One process, several cards: PyTorch sees each as if it had started on it."""

import os
from dataclasses import replace
from itertools import pairwise

import pytest
from helpers.virtual_gpu import CARD_80GIB, GIB, MIB, child, virtual_card, virtual_device

from pytest_gpumem.devices.cards import CARDS
from pytest_gpumem.devices.memory_cap import set_cap
from pytest_gpumem.devices.virtual import native
from pytest_gpumem.devices.virtual.device import VirtualDevice
from pytest_gpumem.errors import DeviceError

# getChosenWorkspaceSize in ATen/cuda/CublasHandlePool.cpp: 4096 * 1024 * 2 + 16 * 1024 * 8,
# on capability 9.0 (newer versions: 10.0 as well) 4096 * 8 * 1024
WORKSPACE, LARGE_WORKSPACE = 8_519_680, 33_554_432


def workspace():
    """What a matrix product takes beside its result."""
    import torch

    a = torch.randn(64, 64, device="cuda")
    torch._C._cuda_clearCublasWorkspaces()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    b = a @ a
    taken = torch.cuda.max_memory_allocated() - held - b.nbytes
    torch._C._cuda_clearCublasWorkspaces()
    return taken


@pytest.mark.parametrize("name", CARDS)
def test_the_device_is_the_card_that_was_asked_for(name):
    import torch

    card = CARDS[name]
    with virtual_card(card):
        found = torch.cuda.get_device_properties(0)
        assert (found.name, found.total_memory) == (card.device_name, card.total_memory)
        assert (found.major, found.minor) == card.capability == torch.cuda.get_device_capability()
        assert found.multi_processor_count == card.sm_count
        assert found.L2_cache_size == card.l2_cache_size
        assert found.max_threads_per_multi_processor == card.limits.max_threads_per_sm
        assert torch.cuda.mem_get_info() == (card.usable_memory, card.total_memory)
        assert card.info.total_memory == found.total_memory


@pytest.mark.parametrize("name", CARDS)
def test_cublas_takes_the_workspace_that_pytorch_gives_it_on_that_card(name):
    with virtual_card(name):
        major = CARDS[name].capability[0]
        if major == 9:
            assert workspace() == LARGE_WORKSPACE
        elif major == 10:
            assert workspace() in {WORKSPACE, LARGE_WORKSPACE}
        else:
            assert workspace() == WORKSPACE


def test_the_workspace_follows_the_card_there_and_back():
    for name, size in [("T4", WORKSPACE), ("H100", LARGE_WORKSPACE), ("T4", WORKSPACE)]:
        with virtual_card(name):
            assert workspace() == size


@pytest.mark.parametrize("name", CARDS)
def test_caps_are_exact_on_every_card(name):
    """Whatever total PyTorch's memory fraction is a fraction of: it asked once, on the first."""
    import torch

    card = CARDS[name]
    with virtual_card(card):
        for limit in (3 * GIB, card.usable_memory // 2 + 12345, card.usable_memory):
            whole = limit // (2 * MIB) * (2 * MIB)
            set_cap(0, limit)
            try:
                block = torch.cuda.caching_allocator_alloc(whole, 0)
                assert torch.cuda.memory_reserved() == whole
                with pytest.raises(torch.OutOfMemoryError):
                    torch.cuda.caching_allocator_alloc(1, 0)
                torch.cuda.caching_allocator_delete(block)
                with pytest.raises(torch.OutOfMemoryError):
                    torch.cuda.caching_allocator_alloc(whole + 1, 0)
            finally:
                set_cap(0, None)
            torch.cuda.empty_cache()


def test_without_a_cap_the_cards_memory_is_the_limit():
    import torch

    for name in ("T4", "H100"):
        with virtual_card(name):
            most = CARDS[name].usable_memory // (2 * MIB) * (2 * MIB)
            with pytest.raises(torch.OutOfMemoryError):
                torch.cuda.caching_allocator_alloc(most + 1, 0)
            block = torch.cuda.caching_allocator_alloc(most, 0)
            torch.cuda.caching_allocator_delete(block)


def test_room_beyond_the_card_is_for_one_session_alone():
    import torch

    with virtual_card("T4") as device:
        device.make_room([8 * GIB])
        block = torch.cuda.caching_allocator_alloc(20 * GIB, 0)
        torch.cuda.caching_allocator_delete(block)
        torch.cuda.empty_cache()
    with virtual_card("T4"), pytest.raises(torch.OutOfMemoryError):
        torch.cuda.caching_allocator_alloc(20 * GIB, 0)


def test_seventeen_devices_are_too_many():
    with pytest.raises(DeviceError, match="devices=17"):
        virtual_device().open(None, 17)


def test_sixteen_devices_each_have_their_memory():
    import torch

    with virtual_card(CARD_80GIB, count=16) as device:
        blocks = [torch.empty(MIB, device=f"cuda:{index}") for index in range(16)]
        assert [device.library.account(index).charged for index in range(16)] == [20 * MIB] * 16
        assert len({torch.cuda.get_device_properties(index).uuid for index in range(16)}) == 16
        del blocks


def test_kernels_that_depend_on_the_sm_count_see_the_cards():
    """A reduction's scratch grows with the card; the figures of two cards differ as it does."""
    import torch

    def peak(sms):
        with virtual_card(replace(CARD_80GIB, name=f"{sms} SMs", sm_count=sms)):
            x = torch.empty(1 << 24, device="cuda")
            torch.cuda.reset_peak_memory_stats()
            x.sum()
            return torch.cuda.max_memory_allocated() - x.nbytes

    found = [peak(sms) for sms in (16, 64, 132)]
    assert all(small < large for small, large in pairwise(found)), found


def test_the_first_card_of_a_process_leaves_nothing_behind():
    """A T4's step is the same, whether an H100 came before it or not."""
    code = """
    from pytest_gpumem.devices.cards import CARDS
    from pytest_gpumem.devices.virtual.device import VirtualDevice
    import sys

    device = VirtualDevice.load(CARDS[sys.argv[1]])
    import torch

    for name in sys.argv[1:]:
        device.open(CARDS[name], 1)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)).cuda()
        model(torch.randn(64, 512, device="cuda")).sum().backward()
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        del model
        torch._C._cuda_clearCublasWorkspaces()
        device.close()
    print(*peaks)
    """
    alone = child(code, card=None, args=["T4"], warm=True)
    assert child(code, card=None, args=["H100", "T4"], warm=True) == alone


@pytest.mark.parametrize("symbol", ["_PROPERTIES", "_ARCHITECTURES"])
def test_a_card_that_cannot_be_had_leaves_the_last_one(monkeypatch, symbol):
    with virtual_card("T4"):
        pass
    missing = () if symbol == "_PROPERTIES" else "missing"
    monkeypatch.setattr(f"pytest_gpumem.devices.virtual.card_change.{symbol}", missing)
    with pytest.raises(DeviceError, match="keeps the properties of T4"):
        virtual_device().open(CARDS["L4"], 1)
    with virtual_card("T4"):
        import torch

        assert torch.cuda.mem_get_info()[1] == CARDS["T4"].total_memory


def test_a_library_that_lacks_a_function_is_refused_by_name(monkeypatch, tmp_path):
    """A source tree was updated, and not built again."""
    library = tmp_path / "libolder.so"
    name, other = b"\0gpumem_fill_zeros\0", b"\0gpumem_fill_zerox\0"
    content = native.LIBRARY.read_bytes()
    assert name in content
    library.write_bytes(content.replace(name, other))
    monkeypatch.setattr("ctypes.RTLD_GLOBAL", os.RTLD_LOCAL | os.RTLD_DEEPBIND)
    monkeypatch.setattr(VirtualDevice, "_loaded", None)
    monkeypatch.setattr("pytest_gpumem.devices.virtual.device.torch_is_imported", lambda: False)
    problem = r"undefined symbol: gpumem_fill_zeros; .*build_ext --inplace"
    with pytest.raises(DeviceError, match=problem):
        VirtualDevice.load(CARDS["T4"], library)
