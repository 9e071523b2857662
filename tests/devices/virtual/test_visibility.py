"""The virtual GPU is seen where it was opened; to everything else the machine has no GPU."""

import ctypes
import importlib.util
import inspect
import sys
from types import SimpleNamespace

import pytest
from helpers.left_out import need_libraries, need_triton
from helpers.virtual_gpu import CARD_80GIB, child, run_python, virtual_card

from pytest_gpumem.devices.torch_import import IMPORTS, ImportHooks
from pytest_gpumem.devices.virtual.visibility import HIDDEN

NO_DEVICE = 100


def test_nobody_sees_a_device_before_it_is_opened_and_after_it_is_closed(torch):
    early = torch.cuda.is_available, torch.cuda.device_count
    assert [ask() for ask in early] == [False, 0]
    with virtual_card(CARD_80GIB, count=2):
        assert [ask() for ask in early] == [True, 2]
        assert torch.accelerator.is_available()
    assert [ask() for ask in early] == [False, 0]
    assert not torch.accelerator.is_available()
    assert torch.accelerator.device_count() == 0


def test_the_count_that_pytorch_keeps_is_forgotten(torch):
    """torch.cuda.device_count() keeps its first answer once CUDA is initialised."""
    for count in (1, 3, 2):
        with virtual_card(CARD_80GIB, count=count):
            torch.cuda.init()
            assert torch.cuda.device_count() == count
            assert torch.cuda.device_count() == count
    assert torch.cuda.device_count() == 0


def test_what_the_compiler_found_without_a_gpu_or_on_another_card_is_forgotten(torch):
    """It keeps its answers: after a test that compiled for the CPU none compiled for the GPU."""
    need_triton()
    from torch.utils import _triton

    assert not _triton.has_triton()
    with virtual_card("H100"):
        assert _triton.has_triton()
        new = _triton.has_triton_tma_device()
    with virtual_card("T4"):
        assert not _triton.has_triton_tma_device()
    assert not _triton.has_triton()
    assert new


def test_nvml_based_checks_see_no_device_either(torch, monkeypatch):
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    assert not torch.cuda.is_available()
    with virtual_card(CARD_80GIB):
        assert torch.cuda.is_available()


def test_a_tensor_on_a_hidden_device_is_refused_with_the_reason(torch):
    with virtual_card(CARD_80GIB):
        torch.zeros(1, device="cuda")
    with pytest.raises(RuntimeError, match="only in tests marked gpu_memory"):
        torch.zeros(1, device="cuda")


def test_cuda_is_not_initialised_while_no_gpu_is_shown():
    """PyTorch's first try looks for NVML; its allocator ended the process where there was none."""
    text = child(
        """
        import os
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        from pytest_gpumem.devices.cards import CARDS
        from pytest_gpumem.devices.virtual.device import VirtualDevice

        device = VirtualDevice.load(CARDS["T4"])
        import torch

        for initialise in (torch.cuda.init, lambda: torch.zeros(1, device="cuda")):
            try:
                initialise()
            except RuntimeError as error:
                print(torch.cuda.is_initialized(), error)
        torch._C._cuda_hasPrimaryContext(0)
        device.open(CARDS["T4"], 1)
        print(torch.zeros(1, device="cuda").device, torch.cuda.memory_reserved() >> 20)
        device.close()
        """,
        card=None,
        warm=True,
    )
    refused = f"False {HIDDEN}"
    assert text.splitlines() == [refused, refused, "cuda:0 2"]


def test_a_device_beyond_those_that_were_asked_for_is_refused(torch):
    """As on a machine that has no more of them."""
    with virtual_card(CARD_80GIB, count=1), pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda:1")


def test_other_frameworks_find_no_device_outside(torch):
    """JAX, CuPy and Numba open the driver by its name."""
    with virtual_card(CARD_80GIB):
        driver = ctypes.CDLL("libcuda.so.1")
        assert driver.cuInit(0) == 0
        count = ctypes.c_int()
        assert driver.cuDeviceGetCount(ctypes.byref(count)) == 0
        assert count.value == 1
    assert driver.cuInit(0) == NO_DEVICE
    assert ctypes.CDLL("libcuda.so.1").cuInit(0) == NO_DEVICE


def test_torch_keeps_its_loader_its_spec_and_its_source(torch):
    assert "torch" not in IMPORTS._calls
    assert [type(finder) for finder in sys.meta_path].count(ImportHooks) == 1
    for loader in (torch.__loader__, torch.__spec__.loader):
        assert type(loader).__name__ == "SourceFileLoader"
    assert "def " in inspect.getsource(torch)
    assert importlib.util.find_spec("torch") is torch.__spec__


def test_the_hook_works_however_torch_comes_to_be_imported():
    """By a name imported from it early, and by whoever asked for its spec before."""
    text = child(
        """
        import importlib.util
        from pytest_gpumem.devices.cards import CARDS
        from pytest_gpumem.devices.virtual.device import VirtualDevice
        import sys

        device = VirtualDevice.load(CARDS["T4"])
        assert "torch" not in sys.modules
        importlib.util.find_spec("torch")
        from torch.cuda import device_count, is_available
        import inspect, torch

        print(is_available(), device_count(), inspect.getsourcefile(torch) is not None)
        device.open(CARDS["T4"], 2)
        print(is_available(), device_count(), torch.cuda.get_device_name())
        device.close()
        print(is_available(), device_count())
        print(type(torch.__spec__.loader).__name__)
        """,
        card=None,
    )
    assert text.splitlines() == [
        "False 0 True",
        "True 2 Tesla T4",
        "False 0",
        "SourceFileLoader",
    ]


def test_a_skipif_at_collection_does_not_blind_pytorch():
    """PyTorch counts its devices once in a process: the answer must not be "none"."""
    text = child(
        """
        from pytest_gpumem.devices.cards import CARDS
        from pytest_gpumem.devices.virtual.device import VirtualDevice

        device = VirtualDevice.load(CARDS["T4"])
        import torch

        assert not torch.cuda.is_available()
        torch.cuda.manual_seed_all(1)  # kept until CUDA is initialised
        try:
            torch.zeros(1, device="cuda")
        except (RuntimeError, AssertionError):
            print("refused")
        device.open(CARDS["T4"], 1)
        print(torch.zeros(1, device="cuda").device)
        """,
        card=None,
        warm=True,
    )
    assert text.splitlines() == ["refused", "cuda:0"]


def test_a_child_process_of_a_step_can_have_devices_of_its_own(torch):
    """It inherits the step's one device, and asks for three of another card."""
    with virtual_card(CARD_80GIB, count=1):
        text = child(
            """
            import torch

            print(torch.cuda.device_count(), torch.cuda.get_device_name(2))
            """,
            card="T4",
            devices=3,
        )
    assert text == "3 Tesla T4\n"


def test_torch_imported_before_is_an_error_that_says_how_to_go_on():
    need_libraries()  # to import torch
    done = run_python("import torch, pytest_gpumem; pytest_gpumem.use_virtual_gpu('T4')")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "torch was imported before the virtual GPU could be loaded" in last
    assert "use_virtual_gpu() before importing torch" in last


def test_the_hook_leaves_other_modules_and_a_missing_one_alone(monkeypatch):
    called = []
    monkeypatch.setattr(sys, "meta_path", [])
    hook = ImportHooks()
    hook.call_after("torch_apart", called.append)
    assert hook.find_spec("json", None) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert hook.find_spec("torch_apart", None) is None
    assert sys.meta_path == [hook]
    assert called == []


def test_the_hook_calls_once_after_the_import(monkeypatch):
    """And the loader is the module's own again."""
    steps = []
    own = SimpleNamespace(
        create_module=lambda spec: None, exec_module=lambda module: steps.append("executed")
    )
    spec = SimpleNamespace(loader=own)
    monkeypatch.setattr(sys, "meta_path", [])
    hook = ImportHooks()
    hook.call_after("torch_apart", lambda module: steps.append("called"))
    hook.call_after("torch_apart", lambda module: steps.append("the second as well"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    found = hook.find_spec("torch_apart", None)
    module = SimpleNamespace(__spec__=found, __loader__=found.loader)
    found.loader.exec_module(module)
    assert steps == ["executed", "called", "the second as well"]
    assert module.__loader__ is own
    assert module.__spec__.loader is own


def test_who_loads_it_before_the_plugin_gets_the_plugins_own(suite):
    """Looking for torch, the library is loaded by the plugin's guard meanwhile: there is one."""
    suite.write(
        "conftest.py",
        """
        from pytest_gpumem.devices.cards import find_card
        from pytest_gpumem.devices.virtual.device import VirtualDevice

        def pytest_configure(config):
            VirtualDevice.load(find_card("H100"))
        """,
    )
    source = """
        import pytest

        @pytest.mark.gpu_memory
        def test_it():
            import torch

            assert torch.cuda.is_available()
    """
    assert suite.run_apart(source=source).outcomes == {"passed": 1}
