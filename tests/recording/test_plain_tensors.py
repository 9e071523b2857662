"""Tensors' places in memory."""

from pytest_gpumem.recording.plain_tensors import place_of


def test_a_compilers_tensor_is_not_asked_for_memory(monkeypatch):
    """Older versions of torch warn of that, and name this package's line."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        tensor = torch.empty(3)
    asked = []
    monkeypatch.setattr(torch.Tensor, "untyped_storage", asked.append, raising=False)
    assert place_of(tensor) == (-1, 0)
    assert not asked
