"""Does batch 32 fit on a T4? A ResNet and a transformer, and what makes them need less.

card="T4" gives a test the memory of a T4 less what CUDA itself takes, 14.4 GiB, on whatever GPU it
runs.
"""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torchvision.models import resnet50


class ResNet(nn.Module):
    """ResNet-50 for images: 26 million parameters, and activations that outweigh them by far."""

    def __init__(self):
        super().__init__()
        with torch.device("cuda"):  # made where it is used
            self.net = resnet50()

    def forward(self, images, classes):
        """Return the loss."""
        return cross_entropy(self.net(images), classes)

    def checkpointed(self):
        """Have every block computed again in the backward pass, and return the model."""
        for stage in (self.net.layer1, self.net.layer2, self.net.layer3, self.net.layer4):
            for i, block in enumerate(stage):
                stage[i] = Checkpointed(block)
        return self

    @staticmethod
    def batch_of(size):
        """Return as many images and their classes."""
        images = torch.rand(size, 3, 224, 224, device="cuda")
        return images, torch.randint(1000, (size,), device="cuda")


class Checkpointed(nn.Module):
    """Keeps a block's input only; what else the backward pass needs is computed once more."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        """Return the block's output."""
        return checkpoint(self.block, x, use_reentrant=False)


class GPT2(nn.Module):
    """GPT-2 small: 124 million parameters, and a score for each of 50,257 words at each token."""

    def __init__(self):
        super().__init__()
        transformers = pytest.importorskip("transformers")
        with torch.device("cuda"):
            self.net = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False))

    def forward(self, tokens, labels):
        """Return the loss."""
        return self.net(tokens, labels=labels).loss

    def checkpointed(self):
        """Have every block computed again in the backward pass, and return the model."""
        self.net.gradient_checkpointing_enable({"use_reentrant": False})
        return self

    @staticmethod
    def batch_of(size, tokens=192):
        """Return as many sentences, which are their own labels."""
        sentences = torch.randint(50257, (size, tokens), device="cuda")
        return sentences, sentences


def train(model, batch, *, half=False, micro_batches=1):
    """Take two steps: the first one makes Adam's state, the second one has it from its start.

    Args:
        model: takes inputs and targets, returns the loss.
        batch: inputs and targets.
        half: whether to compute in 16 bits where that is safe; parameters stay in 32.
        micro_batches: how many to cut the batch into; their gradients add up to those of the batch.
    """
    inputs, targets = batch
    optimizer = torch.optim.Adam(model.parameters())
    # The loss is scaled up so that small gradients do not vanish in 16 bits. GradScaler's own first
    # scale is so large that the first steps may be skipped, and Adam's state with them.
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0, enabled=half)
    for _ in range(2):
        for some in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
            with torch.autocast("cuda", torch.float16, enabled=half):
                loss = model(*some) / micro_batches
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


# What most tests of a project look like: a marker and a training step.


@pytest.mark.gpu_memory(card="T4", batch_size=32)
def test_resnet50_fits():
    """Batch 32 takes a fifth of the card."""
    train(ResNet(), ResNet.batch_of(32))


@pytest.mark.gpu_memory(card="T4", batch_size=32)
def test_gpt2_fits():
    """192 tokens a sentence take three quarters of it."""
    train(GPT2(), GPT2.batch_of(32))


@pytest.mark.gpu_memory(card="T4", batch_size=32)
@pytest.mark.xfail(raises=torch.OutOfMemoryError, strict=True, reason="too large for a T4")
def test_gpt2_with_longer_sentences_does_not_fit():
    """256 tokens are too many, by little: the table says what it would need."""
    train(GPT2(), GPT2.batch_of(32, tokens=256))


@pytest.mark.gpu_memory(card="T4", batch_size=32)
def test_gpt2_with_longer_sentences_fits_in_micro_batches():
    """Two micro-batches of 16 train as one batch of 32 does, and fit."""
    train(GPT2(), GPT2.batch_of(32, tokens=256), micro_batches=2)


# What lowers the peak, and by how much. Each strategy is a part of its test, and has a row in the
# table and a baseline of its own.


def peak(gpu_memory, name, model, batch, **how):
    """Train in a part of the test, and return its peak allocated memory in bytes."""
    torch.cuda.empty_cache()  # or the part would begin with what the one before it had reserved
    with gpu_memory.measure(name) as part:
        train(model, batch, **how)
    return part.peak_allocated


@pytest.mark.gpu_memory(card="T4", batch_size=32)
@pytest.mark.parametrize("make", [ResNet, GPT2])
def test_strategies(gpu_memory, make):
    """Autocast, gradient accumulation and activation checkpointing, beside the plain step."""
    batch = make.batch_of(gpu_memory.batch_size)
    plain = peak(gpu_memory, "plain", make(), batch)

    # Activations take half the bytes; parameters, gradients and Adam as many as before, and so does
    # the loss: for GPT-2 its scores of 50,257 words are turned back into 32 bits.
    assert peak(gpu_memory, "autocast", make(), batch, half=True) < 0.9 * plain

    # The activations are those of 8 samples instead of 32.
    assert peak(gpu_memory, "accumulation", make(), batch, micro_batches=4) < 0.6 * plain

    # Of most blocks there is the input, and all of it of the one that is being computed again.
    assert peak(gpu_memory, "checkpointing", make().checkpointed(), batch) < 0.75 * plain


class ResNetOnTwoDevices(nn.Module):
    """ResNet-50 with its first blocks, which have the largest activations, on a GPU of their own.

    This is model parallelism at its simplest: while one GPU computes, the other one waits.
    """

    def __init__(self, first, second):
        super().__init__()
        net = resnet50()
        lower = (net.conv1, net.bn1, net.relu, net.maxpool, net.layer1)
        upper = (net.layer2, net.layer3, net.layer4, net.avgpool, nn.Flatten(), net.fc)
        self.lower = nn.Sequential(*lower).to(first)
        self.upper = nn.Sequential(*upper).to(second)
        self.second = second

    def forward(self, images, classes):
        """Return the loss, on the second device."""
        between = self.lower(images).to(self.second)
        return cross_entropy(self.upper(between), classes.to(self.second))


@pytest.mark.gpu_memory(card="T4", batch_size=32, devices=2)
def test_two_devices(gpu_memory):
    """What one device held is spread over two. The figures here are those of the fuller one."""
    batch = ResNet.batch_of(gpu_memory.batch_size)
    one = peak(gpu_memory, "one device", ResNet(), batch)
    two = peak(gpu_memory, "two devices", ResNetOnTwoDevices(*gpu_memory.devices), batch)
    assert two < 0.75 * one
