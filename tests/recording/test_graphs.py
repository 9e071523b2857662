"""The tensors that an autograd graph keeps, those in hooks' own objects too."""

import pytest

from pytest_gpumem.recording.graphs import HOOKS, graph_tensors


@pytest.fixture(autouse=True)
def readable_hooks(torch):
    HOOKS.install()


class Hostile:
    """An object that answers nothing, as a user's may be."""

    __hash__ = None

    def __getattribute__(self, name):
        raise RuntimeError(name)


class Packer:
    """Hooks that keep a tensor in a list beside something hostile."""

    __hash__ = None

    def __eq__(self, other):
        raise RuntimeError

    def pack(self, saved):
        self.packed = saved.detach().clone()
        return [Hostile(), {"saved": self.packed}]

    def unpack(self, packed):
        pytest.fail("nothing is unpacked")


def addresses(tensor):
    return {saved.data_ptr() for saved in graph_tensors(tensor, set())}


def test_what_hooks_keep_in_a_tensors_place_is_the_graphs_whatever_else_they_keep(torch):
    packer, leaf = Packer(), torch.randn(8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(packer.pack, packer.unpack):
        result = leaf.exp()
    assert packer.packed.data_ptr() in addresses(result.sum())


def test_a_checkpoints_inputs_are_the_graphs_and_nothing_is_computed_again(torch):
    from torch.utils.checkpoint import checkpoint

    calls = []

    def block(x):
        calls.append(x)
        return x.exp()

    middle = torch.randn(8, requires_grad=True) * 1
    result = checkpoint(block, middle, use_reentrant=False)
    place = middle.data_ptr()
    calls.pop()
    del middle
    assert place in addresses(result.sum())
    assert calls == []
