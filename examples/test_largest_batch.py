"""What is the largest batch on a T4, and on an L4? And what does one sample more cost?

A test that names several cards is run on each, and the report ends with a matrix: which test fits
on which card, and how much is left.
"""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

WORDS, WIDTH, HEADS, LAYERS = 32000, 768, 12, 6


class Model(nn.Module):
    """A transformer that scores 32,000 words at each token: 92 million parameters."""

    def __init__(self):
        super().__init__()
        with torch.device("cuda"):
            self.words = nn.Embedding(WORDS, WIDTH)
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True, dropout=0)
                for _ in range(LAYERS)
            )
            self.scores = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens):
        """Return the loss."""
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return cross_entropy(self.scores(x).flatten(0, 1), tokens.flatten())


def train(batch_size, length=256):
    """Take two steps in 16 bits where that is safe: the first one makes Adam's state."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        tokens = torch.zeros(batch_size, length, dtype=torch.long, device="cuda")
        with torch.autocast("cuda", torch.float16):
            loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.gpu_memory(card=["T4", "L4", "A100-40GB"], batch_size=64)
def test_batch_64_fits(gpu_memory):
    """With a quarter of a T4 to spare, and three times over on the A100."""
    train(gpu_memory.batch_size)


# What is searched for has no baseline: a leaner model has a larger batch, and fills the card as
# before. What is expected of it stands in the test.


@pytest.mark.gpu_memory(card=["T4", "L4"], baseline=False)
def test_largest_batch(gpu_memory):
    """The answer is exact: it was seen to fit, and one sample more was seen not to."""
    found = gpu_memory.largest(train)
    assert found.value >= 64
    assert found.value + 1 in {probe.value for probe in found.probes if not probe.fits}

    with gpu_memory.measure("largest", batch_size=found.value):  # the search counts for nothing
        train(found.value)


@pytest.mark.gpu_memory(card=["T4", "L4"], batch_size=8, baseline=False)
def test_longest_sequence(gpu_memory):
    """Any whole number can be searched for, here the tokens of a sequence."""

    def step(length):
        train(gpu_memory.batch_size, length)

    found = gpu_memory.largest(step, start=128, multiple=128)
    assert found.value >= 2048
    assert found.value % 128 == 0
    with gpu_memory.measure("longest"):
        step(found.value)


@pytest.mark.gpu_memory(card="T4", batch_sizes=[8, 12, 16], max_mib_per_sample=150, max_fixed_gib=2)
def test_a_sample_more(gpu_memory):
    """Run with each size: memory = fixed + slope * batch size, and both are held to a limit.

    They are in the baseline as well. A sample that costs more is found with a batch of 16, on a
    small card, before a batch of 64 does not fit on a large one.
    """
    train(gpu_memory.batch_size)
