"""Two thousand mutations of each kind of input: read, or refused with an error of this package."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.paths import ROOT
from helpers.sample_report import sample, with_updates

from pytest_gpumem.baselines.file_format import decode
from pytest_gpumem.errors import GpuMemError
from pytest_gpumem.report.json_report import dumps, loads
from pytest_gpumem.session.settings import OPTIONS, read_settings

NUMBER = 2_000
PIECES = (
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b"null",
    b"-1",
    b"1e400",
    b"\x00",
    b"\xef\xbb\xbf",
    b"<<<<<<<\n",
)
WORDS = (
    "x",
    "0",
    "-1",
    "T4",
    "1e9999",
    "5%",
    "64MiB",
    "session:4",
    "virtual:L4",
    "../..",
    "{torch}",
)


def mutated(content, chance):
    """The content with one to four pieces replaced, taken away or put in."""
    content = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(content) + 1)
        length = chance.choice((0, 0, 1, 1, chance.randint(1, 40)))
        some = bytes(chance.randrange(256) for _ in range(chance.randint(0, 6)))
        content[at : at + length] = chance.choice((some, chance.choice(PIECES)))
    return bytes(content)


@pytest.fixture
def chance():
    return random.Random(24)


def test_a_baseline_file(chance):
    path = ROOT / "baselines/torch-2.15/virtual-T4/examples/test_fits_on_t4.json"
    content = path.read_bytes()
    module = json.loads(content)["module"]
    assert decode(path, content, "virtual-T4", module).tests
    for _ in range(NUMBER):
        with suppress(GpuMemError):
            decode(path, mutated(content, chance), "virtual-T4", module)


def test_a_json_report(chance):
    report = replace(sample(), updates=with_updates())
    content = dumps(report, created="2026-11-21T15:06:07Z").encode()
    for _ in range(NUMBER):
        with suppress(GpuMemError):
            loads(mutated(content, chance), "report.json")


def test_settings(chance, tmp_path):
    options = [option for option in OPTIONS if not isinstance(option.default, bool)]
    for _ in range(NUMBER):
        changed = chance.choice(options)
        word = mutated(chance.choice(WORDS).encode(), chance).decode("utf-8", "surrogateescape")

        def get(option, changed=changed, word=word):
            return (word if option is changed else option.default), option.flag

        with suppress(GpuMemError):
            read_settings(get, Path(tmp_path))
