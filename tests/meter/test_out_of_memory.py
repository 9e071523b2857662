"""Out-of-memory errors: told by their class, with the allocator's own figures."""

from pathlib import Path

import pytest
from helpers.virtual_gpu import CARD_80GIB, GIB, MIB, sizes_of, tensor, virtual_card
from hypothesis import example, given
from hypothesis import strategies as st

from pytest_gpumem.devices.memory_cap import set_cap
from pytest_gpumem.meter.out_of_memory import (
    OutOfMemoryWatch,
    Refusal,
    find_out_of_memory,
    is_out_of_memory,
    site_of,
)
from pytest_gpumem.sizes import format_size, parse_size

HERE = Path(__file__)


@pytest.fixture
def device():
    """Two devices, of which each may reserve 100 MiB."""
    with virtual_card(CARD_80GIB, count=2) as device:
        for index in (0, 1):
            set_cap(index, 100 * MIB)
        yield device
        for index in (0, 1):
            set_cap(index, None)


def refused(size, index=0):
    """Return the error of a request that does not fit."""
    import torch

    with pytest.raises(torch.OutOfMemoryError) as caught:
        tensor(size, index)
    return caught.value


def test_the_watch_has_what_was_asked_for_and_what_was_held(device):
    watch = OutOfMemoryWatch()
    watch.start()
    held = tensor(30 * MIB + 5), tensor(3 * MIB)
    refusal = watch.last(refused(70 * MIB + 7))
    assert refusal.device == 0
    assert 70 * MIB + 7 <= refusal.requested <= 72 * MIB  # rounded up, as PyTorch says it
    assert sizes_of(refusal.held) == (33 * MIB + 512, 52 * MIB)
    del held


def test_the_watch_counts_errors_that_the_step_caught_and_forgets_at_a_start(device):
    watch = OutOfMemoryWatch()
    watch.start()
    for _ in range(3):
        refused(200 * MIB)
    assert watch.count == 3
    watch.start()
    assert watch.count == 0
    refused(200 * MIB)
    assert watch.count == 1  # one observer, however often it was started


def test_the_watch_tells_which_device_ran_out(device):
    watch = OutOfMemoryWatch()
    watch.start()
    kept = tensor(10 * MIB, 1)
    refusal = watch.last(refused(200 * MIB, 1))
    assert (refusal.device, sizes_of(refusal.held)) == (1, (10 * MIB, 10 * MIB))
    del kept


def test_an_error_that_the_watch_did_not_see_is_read_from_its_message():
    watch = OutOfMemoryWatch()
    text = "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 3 has a total capacity of 14 GiB"
    refusal = watch.last(RuntimeError(text))
    assert (refusal.device, refusal.requested, refusal.held) == (3, 3 * GIB // 2, None)


@pytest.mark.parametrize("text", ["", "Tried to allocate many things", "GPU x"])
def test_a_message_without_figures_gives_none(text):
    refusal = OutOfMemoryWatch().last(RuntimeError(text))
    assert (refusal.device, refusal.requested, refusal.held) == (0, None, None)


MESSAGES = st.lists(
    st.sampled_from(
        [
            *("Tried to allocate ", "GPU ", " MiB", " GiB", " bytes", ".", "-", " ", "1", "2.50"),
            *("\u0663", "9" * 5000, "1e400", "nan", "inf", "\n", "\x00", "\ud800"),
        ]
    )
    | st.text(max_size=5)
).map("".join)


@given(MESSAGES)
@example("Tried to allocate " + "9" * 5000 + " GiB. GPU " + "9" * 5000)
@example("Tried to allocate 1.2.3 GiB. GPU \u0663")
def test_any_message_is_read_or_passed_over(text):
    """It is PyTorch's, or of somebody who raises the error themselves."""
    refusal = OutOfMemoryWatch().last(RuntimeError(text))
    assert refusal.held is None
    assert refusal.requested is None or refusal.requested >= 0
    assert 0 <= refusal.device < 1000


@given(st.integers(0, 1 << 50), st.integers(0, 15))
def test_a_message_as_pytorch_writes_it_is_read_to_its_rounding(size, index):
    shown = format_size(size)
    text = f"CUDA out of memory. Tried to allocate {shown}. GPU {index} has a total capacity of ..."
    refusal = OutOfMemoryWatch().last(RuntimeError(text))
    assert refusal == Refusal(index, parse_size(shown), None)


def test_the_class_decides_and_never_the_message(device):
    import torch

    assert is_out_of_memory(refused(200 * MIB))
    assert is_out_of_memory(torch.cuda.OutOfMemoryError("by its older name"))
    assert not is_out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert not is_out_of_memory(MemoryError())
    assert not is_out_of_memory(None)


def raised(make):
    try:
        make()
    except BaseException as error:  # noqa: BLE001 - the program's own; shown as Python shows it
        return error
    raise AssertionError


def test_it_is_found_behind_what_was_raised_from_it(device):
    import torch

    def from_it():
        try:
            tensor(200 * MIB)
        except RuntimeError as error:
            raise ValueError from error

    def in_its_course():
        try:
            from_it()
        finally:
            raise KeyError

    def instead_of_it():
        try:
            tensor(200 * MIB)
        except RuntimeError:
            raise ValueError from None

    assert isinstance(find_out_of_memory(raised(from_it)), torch.OutOfMemoryError)
    assert isinstance(find_out_of_memory(raised(in_its_course)), torch.OutOfMemoryError)
    assert find_out_of_memory(raised(instead_of_it)) is None
    assert find_out_of_memory(None) is None


def test_a_ring_of_causes_has_an_end(device):
    one, other = ValueError(), KeyError()
    one.__cause__, other.__cause__ = other, one
    assert find_out_of_memory(one) is None


def test_the_site_is_the_users_deepest_line(device):
    import torch

    def step():
        return torch.nn.Linear(50_000, 50_000, device="cuda")  # the line; torch's own are deeper

    error = raised(step)
    line = step.__code__.co_firstlineno + 1
    site = site_of(error.__traceback__, HERE.parent)
    assert site == ("test_out_of_memory.py", line, "step")
    assert str(site) == f"test_out_of_memory.py:{line} in step"
    elsewhere = str(site_of(error.__traceback__, Path("/elsewhere")))
    assert elsewhere.endswith(f"test_out_of_memory.py:{line} in step")
    assert str(HERE.parent) not in elsewhere  # as baselines and pages have it


def test_where_no_line_is_the_users_there_is_no_site():
    assert str(site_of(None, HERE.parent)) == ""
    error = raised(lambda: exec("raise KeyError"))
    alone = error.__traceback__.tb_next.tb_next  # the frame of "<string>", which is no file
    assert alone.tb_frame.f_code.co_filename == "<string>"
    assert str(site_of(alone, HERE.parent)) == ""
