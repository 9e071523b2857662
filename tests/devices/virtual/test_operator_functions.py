"""Functions that Python calls around each operator, without ctypes."""

from __future__ import annotations

from helpers.virtual_gpu import opened


def test_an_operators_ranges_are_unknown_once_it_has_ended():
    import torch

    from pytest_gpumem.devices.virtual.values.interception import KEY, NUMBER

    key = torch._C._dispatch_key_parse(KEY)
    is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    with opened() as device:
        library = device.library
        functions = library.operator_functions(NUMBER)
        block = torch.empty(64, dtype=torch.uint8, device="cuda")
        address = block.data_ptr()

        def known():
            return [at for at in range(0, 64, 16) if library.is_known(address + at, 16)]

        assert library.open_for_writing(address, 64)
        assert functions.begins() is None
        assert is_excluded(key)
        assert functions.ended() is False
        assert not is_excluded(key)
        assert known() == [0, 16, 32, 48]
        functions.begins()
        functions.ended(address, 16, address + 32, 1)
        assert known() == [16, 48]
        functions.forget_ranges(address + 48, 16)
        assert known() == [16]
        assert not is_excluded(key)
