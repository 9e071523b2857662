"""Recorded runs on the virtual GPU, and models whose memory is easy to count."""

from contextlib import contextmanager

from helpers.paths import TESTS
from helpers.virtual_gpu import CARD_80GIB, virtual_card
from pytest_gpumem.explain.explanations import explanations
from pytest_gpumem.spec import MemorySpec
from pytest_gpumem.testrun.run import Run

ROOT = TESTS


@contextmanager
def recorded(devices=1):
    """Open a recorded run on a card with 80 GiB."""
    with virtual_card(CARD_80GIB, devices) as device:
        spec = MemorySpec(devices=devices)
        with Run.open(spec, device, ROOT, record=True) as run:
            run.start()
        try:
            yield run
        finally:
            run.close()
            device.open(CARD_80GIB, devices)


def explained(run, *parts, timelines=False):
    """Return the attributions of the test, and of parts; check that each adds up to its peak."""
    names = ["", *parts]
    measurement = run.measurement()
    found = explanations(run.recorded(names), ROOT, timelines=timelines)
    whole = found.attached("", measurement).attributions
    assert len(whole) == len(measurement.peaks)
    for attribution, peak in zip(whole, measurement.peaks, strict=True):
        adds_up(attribution, peak)
    if not parts:
        return whole
    tallies = [run.parts[part].tally for part in parts]
    others = [
        found.attached(part, run.meter.result(tally=tally)).attributions
        for part, tally in zip(parts, tallies, strict=True)
    ]
    for attributions, tally in zip(others, tallies, strict=True):
        for attribution, peak in zip(attributions, tally.peaks, strict=True):
            adds_up(attribution, peak)
    return [whole, *others]


def adds_up(attribution, peak):
    breakdown = attribution.breakdown
    assert attribution.notes == ()
    assert sum(breakdown.categories.values()) == peak.allocated
    assert sum(site.nbytes for site in breakdown.sites) == peak.allocated
    assert breakdown.cached <= peak.reserved
    assert all(value > 0 for value in breakdown.categories.values())


def categories(run):
    return explained(run)[0].breakdown.categories


def rounded(*sizes):
    """Return the bytes of blocks for tensors with these numbers of 4-byte elements."""
    return sum(-(-4 * size // 512) * 512 for size in sizes)


WIDTH = 1024
"""a weight takes 4 MiB, whose block has no remainder that PyTorch does not split off"""
PARAMETERS = rounded(WIDTH * WIDTH, WIDTH)
"""bytes of the weight and bias of one linear layer"""


def data(torch, rows=64, **options):
    return torch.zeros(rows, WIDTH, device="cuda", **options)


def linears(torch, number=3):
    return torch.nn.Sequential(
        *(torch.nn.Linear(WIDTH, WIDTH, device="cuda") for _ in range(number))
    )


def train(torch, run, model, optimizer, rows=64, steps=2):  # noqa: PLR0913, PLR0917
    """Run training steps with the parts "forward", "backward" and "optimizer"."""
    for _ in range(steps):
        with run.part("forward", {}):
            loss = model(data(torch, rows)).sum()
        with run.part("backward", {}):
            loss.backward()
        with run.part("optimizer", {}):
            optimizer.step()
        optimizer.zero_grad()


def of_part(run, part):
    """Return the categories at a part's peak."""
    return explained(run, part)[1][0].breakdown.categories
