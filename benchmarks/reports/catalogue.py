"""Regressions of real life, planted into one training program: pure data.

Each is an edit of ``BASE``: a text that stands in it once, and its replacement. ``truth`` is what a
report's first lines have to name: the line of the planted program with this text, or the keeper.
"""

from __future__ import annotations

from typing import NamedTuple

BASE = """\
import contextlib, copy, functools
import pytest, torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCAB, WIDTH, HEADS, BATCH, LENGTH = 8192, 512, 8, 8, 512
LOG, CACHE = [], {}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attend(self.norm(x))
        h = self.up(x)
        h = F.gelu(h)
        return x + self.down(h)

    def attend(self, x):
        parts = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.embed.requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def features(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    def forward(self, tokens):
        return self.head(self.features(tokens))


def batches(number):
    for _ in range(number):
        frames = torch.zeros(BATCH, 3, 512, 512, device="cuda")
        yield frames, torch.zeros(BATCH, LENGTH, dtype=torch.long, device="cuda")


def loss_of(logits, tokens):
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def train(model, optimizer, steps=3):
    for frames, tokens in batches(steps):
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(tokens)
            loss = loss_of(logits, tokens)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        del logits, loss, frames


def validate(model):
    losses = []
    for _, tokens in batches(4):
        with torch.no_grad():
            losses.append(loss_of(model(tokens), tokens))
    return torch.stack(losses).mean()


@pytest.mark.gpu_memory
def test_train():
    LOG.clear(), CACHE.clear()
    model = Model().cuda()
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, foreach=False)
    train(model, optimizer)
    validate(model)
"""


class Planted(NamedTuple):
    """A regression."""

    old: str
    """text of the base that is replaced; it stands there once"""
    new: str
    line: str = ""
    """text of the line that is the cause"""
    keeper: str = ""
    """or the name that keeps the memory, as a regular expression"""


CATALOGUE = {
    "losses of a validation with their graphs": Planted(
        "        with torch.no_grad():\n            losses",
        "        with contextlib.nullcontext():\n            losses",
        keeper=r"\blosses\b",
        line="losses.append(",
    ),
    "a logging list of outputs": Planted(
        "        del logits, loss, frames",
        "        LOG.append(logits)\n        del logits, loss, frames",
        line="LOG.append(",
        keeper=r"\bLOG\b",
    ),
    "the best output so far": Planted(
        "        del logits, loss, frames",
        "        CACHE['best'] = logits.detach()\n        del logits, loss, frames",
        line="CACHE['best']",
        keeper=r"\bCACHE\b",
    ),
    "a forward hook that captures": Planted(
        "    train(model, optimizer)\n",
        "    model.head.register_forward_hook(lambda module, args, out: LOG.append(out))\n"
        "    train(model, optimizer)\n",
        line="register_forward_hook",
        keeper=r"\bLOG\b",
    ),
    "an attribute with the last features": Planted(
        "        return self.head(self.features(tokens))",
        "        self.last = self.features(tokens)\n        return self.head(self.last)",
        line="self.last = ",
        keeper=r"\blast\b",
    ),
    "a closure over a batch": Planted(
        "        optimizer.zero_grad()\n",
        "        LOG.append(lambda batch=frames: batch.mean())\n        optimizer.zero_grad()\n",
        line="LOG.append(lambda",
        keeper=r"\bLOG\b",
    ),
    "a stored exception": Planted(
        "        optimizer.zero_grad()\n",
        "        try:\n            checked = logits.float()\n            int('x')\n"
        "        except ValueError as error:\n            LOG.append(error)\n"
        "        optimizer.zero_grad()\n",
        line="LOG.append(error)",
        keeper=r"\bLOG\b|\bchecked\b",
    ),
    "a cached table": Planted(
        "        optimizer.zero_grad()\n",
        "        CACHE[len(CACHE)] = torch.zeros(LENGTH, LENGTH, HEADS, device='cuda')\n"
        "        optimizer.zero_grad()\n",
        line="CACHE[len(CACHE)]",
        keeper=r"\bCACHE\b",
    ),
    "a graph that backward keeps": Planted(
        "        loss.backward()\n",
        "        loss.backward(retain_graph=True)\n        LOG.append(loss)\n",
        line="retain_graph=True",
        keeper=r"\bLOG\b|retain_graph",
    ),
    "gradients that are kept at zero": Planted(
        "        optimizer.zero_grad()\n",
        "        optimizer.zero_grad(set_to_none=False)\n",
        line="set_to_none=False",
        keeper=r"zero_grad",
    ),
    "an average of the weights": Planted(
        "    train(model, optimizer)\n",
        "    average = copy.deepcopy(model)\n    train(model, optimizer)\n",
        line="copy.deepcopy(model)",
        keeper=r"\baverage\b",
    ),
    "copies of weights for a log": Planted(
        "        optimizer.zero_grad()\n",
        "        norms = [p.detach().clone() for p in model.parameters()]\n"
        "        optimizer.zero_grad()\n",
        line="norms = [",
        keeper=r"\bnorms\b",
    ),
    "gradient buckets": Planted(
        "    train(model, optimizer)\n",
        "    buckets = [torch.zeros_like(p) for p in weights]\n    train(model, optimizer)\n",
        line="buckets = [",
        keeper=r"\bbuckets\b",
    ),
    "a second optimizer": Planted(
        "        optimizer.step()\n",
        "        optimizer.step()\n"
        "        moved = [p for p in model.parameters() if p.grad is not None]\n"
        "        CACHE.setdefault('second', torch.optim.Adam(moved, foreach=False)).step()\n",
        line="CACHE.setdefault('second'",
        keeper=r"\bCACHE\b",
    ),
    "another kind of optimizer state": Planted(
        "torch.optim.AdamW(weights, foreach=False)",
        "torch.optim.AdamW(weights, foreach=False, amsgrad=True)",
        line="optimizer.step()",
        keeper="amsgrad",
    ),
    "weights that are frozen no longer": Planted(
        "        self.embed.requires_grad_(False)\n",
        "        self.embed.requires_grad_(True)\n",
        line="optimizer.step()",
        keeper=r"\bembed\b",
    ),
    "a wider layer": Planted(
        "        self.up = nn.Linear(WIDTH, 4 * WIDTH)\n"
        "        self.down = nn.Linear(4 * WIDTH, WIDTH)\n",
        "        self.up = nn.Linear(WIDTH, 8 * WIDTH)\n"
        "        self.down = nn.Linear(8 * WIDTH, WIDTH)\n",
        line="nn.Linear(WIDTH, 8 * WIDTH)",
        keeper=r"model = Model\(\).cuda\(\)|h = self.up\(x\)|optimizer.step\(\)",
    ),
    "a larger intermediate": Planted(
        "        return self.head(self.features(tokens))",
        "        logits = self.head(self.features(tokens))\n"
        "        return torch.cat([logits, logits], -1)[..., :VOCAB]",
        line="torch.cat(",
    ),
    "a lost checkpoint": Planted(
        "checkpoint(block, x, use_reentrant=False)",
        "block(x)",
        line="x = block(x)",
        keeper=r"h = F.gelu|h = self.up|self.down|self.qkv|scaled_dot",
    ),
    "a lost autocast": Planted(
        '        with torch.autocast("cuda", torch.bfloat16):\n            logits',
        "        with contextlib.nullcontext():\n            logits",
        line="with contextlib",
        keeper=r"autocast|self\.head\(",
    ),
    "an upcast of the logits": Planted(
        "    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())",
        "    logits = logits.double()\n"
        "    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())",
        line="logits.double()",
        keeper=r"F.cross_entropy\(logits",
    ),
    "a contiguous copy": Planted(
        "        return self.head(self.features(tokens))",
        "        logits = self.head(self.features(tokens))\n"
        "        return logits.transpose(1, 2).contiguous().transpose(1, 2)",
        line=".contiguous()",
    ),
    "an unfused cross entropy": Planted(
        "    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())",
        "    chances = logits.flatten(0, 1).float().exp()\n"
        "    chances = chances / chances.sum(-1, keepdim=True)\n"
        "    return -chances.log().gather(1, tokens.flatten()[:, None]).mean()",
        line="chances",
    ),
    "a mask in every block": Planted(
        "        self.up = nn.Linear(WIDTH, 4 * WIDTH)\n",
        "        self.up = nn.Linear(WIDTH, 4 * WIDTH)\n"
        "        mask = torch.ones(BATCH, HEADS, LENGTH, LENGTH).tril()\n"
        "        self.register_buffer('mask', mask)\n",
        line="self.register_buffer('mask'",
        keeper=r"\bmask\b|buffers",
    ),
    "batches that are fetched before": Planted(
        "def batches(number):\n    for _ in range(number):\n",
        "def batches(number):\n    yield from list(fetched(number))\n\n\n"
        "def fetched(number):\n    for _ in range(number):\n",
        line="frames = torch.zeros(",
        keeper="list\\(fetched",
    ),
    "a batch of another data type": Planted(
        "512, 512, device=",
        "512, 512, dtype=torch.float64, device=",
        line="frames = torch.zeros(",
    ),
    "a second forward for a metric": Planted(
        "            loss = loss_of(logits, tokens)\n",
        "            loss = loss_of(logits, tokens)\n            again = model(tokens)\n",
        line="again = model(tokens)",
        keeper=r"\bagain\b",
    ),
    "a convolution that takes a workspace": Planted(
        "        optimizer.zero_grad()\n",
        "        kernel = torch.zeros(64, 3, 7, 7, device='cuda')\n"
        "        stem = F.conv2d(frames, kernel, stride=2, padding=3).amax()\n"
        "        optimizer.zero_grad()\n",
        line="stem = F.conv2d(",
    ),
    "fragmentation alone": Planted(
        "    train(model, optimizer)\n",
        "    rooms = [torch.zeros(9 << 18, device='cuda') for _ in range(40)]\n"
        "    del rooms[::2]\n    rooms = [room[:1].clone() for room in rooms]\n"
        "    train(model, optimizer)\n",
        line="rooms",
        keeper="fragment",
    ),
}
"""by what happened"""


# -- twelve others: a model in a file of its own, and the test that trains it --

MODEL = """\
import torch
from torch import nn


class Mixer(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.GroupNorm(8, width)
        self.expand = nn.Conv2d(width, hidden, 1)
        self.act = nn.ReLU(inplace=True)
        self.reduce = nn.Conv2d(hidden, width, 1)

    def forward(self, x):
        h = self.norm(x)
        h = self.act(self.expand(h))
        return x + self.reduce(h)


class Net(nn.Module):
    def __init__(self, width=64, depth=4, classes=1000):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.ModuleList(Mixer(width, 4 * width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def features(self, images):
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, images):
        return self.head(self.features(images).mean((2, 3)))


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
"""

PROGRAM = """\
import pytest, torch
from MODULE import Net, make_optimizer

BATCH, SIZE = 32, 128


def images(number):
    for _ in range(number):
        yield torch.zeros(BATCH, 3, SIZE, SIZE, device="cuda")


@torch.no_grad()
def evaluate(model):
    scores = []
    for batch in images(3):
        scores.append(model.features(batch).mean())
    return torch.stack(scores).mean()


@pytest.mark.gpu_memory
def test_train():
    model = Net().cuda()
    optimizer = make_optimizer(model)
    for batch in images(2):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
    evaluate(model)
"""

OTHERS = {
    "a wider hidden layer, in another file": ("4 * width", "8 * width"),
    "more blocks": ("depth=4", "depth=6"),
    "a gate": (
        "        h = self.norm(x)\n",
        "        h = self.norm(x)\n        h = h * h.sigmoid()\n",
    ),
    "another optimizer": (
        "torch.optim.SGD(model.parameters(), lr=0.1",
        "torch.optim.Adam(model.parameters(), lr=0.1",
    ),
    "a finer stem": ("width, 4, stride=4", "width, 2, stride=2"),
    "a larger batch": ("BATCH, SIZE = 32, 128", "BATCH, SIZE = 48, 128"),
    "larger images": ("BATCH, SIZE = 32, 128", "BATCH, SIZE = 32, 160"),
    "many more classes": ("classes=1000", "classes=200_000"),
    "a loss that is not let go of": (
        "        del loss\n",
        "        model.losses = [*getattr(model, 'losses', []), loss]\n        del loss\n",
    ),
    "a dropout": (
        "        h = self.act(self.expand(h))\n",
        "        h = self.act(self.expand(h))\n        h = nn.functional.dropout(h)\n",
    ),
    "gradients of an evaluation": ("@torch.no_grad()\n", ""),
    "features for a loss of each block": (
        "            x = block(x)\n        return x\n",
        "            block.seen = x = block(x)\n        return x\n",
    ),
}
"""twelve other edits of one of the two files: a text that stands there once, and its new form"""

BESIDES = (
    (
        "class Block(nn.Module):\n",
        '# One of four.\nclass Block(nn.Module):\n    """A block."""\n\n',
    ),
    (".transpose(1, 2).flatten(2)", ".transpose(1, 2).flatten(start_dim=2)"),
    ("def loss_of(", "def width_of(model):\n    return model.head.in_features\n\n\ndef loss_of("),
    ("class Net(nn.Module):\n", '# For small images.\nclass Net(nn.Module):\n    """A net."""\n\n'),
    ("        return x + self.reduce(h)\n", "        return self.reduce(h) + x\n"),
    (
        "def make_optimizer(",
        "def count(model):\n    return len(model.blocks)\n\n\ndef make_optimizer(",
    ),
    ("def images(", "# Batches of zeros.\ndef images("),
)
"""edits that change no memory, which are made together with each of them"""
