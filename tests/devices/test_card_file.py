"""Cards of files: what ``gpumem cards --here`` prints is read back as the same card."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from helpers.paths import ROOT

from pytest_gpumem.cli.card_table import described
from pytest_gpumem.devices import cards
from pytest_gpumem.devices.cards import CARDS, MAX_FILE, card_file_text, card_names, find_card
from pytest_gpumem.errors import DeviceError, SpecError

MINE = """
device_name = "NVIDIA Mine"
total_memory = 12_000_000_000
capability = [8, 9]
sm_count = 60
"""


@pytest.fixture(autouse=True)
def only_the_table():
    """Forget the cards that a test reads."""
    before = set(cards._cards)
    yield
    for name in set(cards._cards) - before:
        del cards._cards[name]


def card_file(folder, text, name="mine.toml"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_file_is_a_card_under_its_name_with_an_estimated_context(tmp_path):
    card = find_card(card_file(tmp_path, MINE))
    assert (card.name, card.device_name) == ("mine", "NVIDIA Mine")
    assert (card.total_memory, card.capability, card.sm_count) == (12_000_000_000, (8, 9), 60)
    assert card.context == 2048 * 1536 * 60 + 8 * 2**20
    assert find_card("mine") is card
    assert find_card(card_file(tmp_path, MINE)) == card
    assert "mine" not in card_names()


@pytest.mark.parametrize("name", CARDS)
def test_every_card_of_the_table_comes_back_from_its_own_description(tmp_path, name):
    card = CARDS[name]
    properties = SimpleNamespace(
        name=card.device_name,
        total_memory=card.total_memory,
        major=card.capability[0],
        minor=card.capability[1],
        multi_processor_count=card.sm_count,
        L2_cache_size=card.l2_cache_size,
        memory_bus_width=card.memory_bus_width,
    )
    back = find_card(card_file(tmp_path, card_file_text(described(properties, "2.15.0"))))
    for field in ("device_name", "total_memory", "capability", "sm_count", "l2_cache_size"):
        assert getattr(back, field) == getattr(card, field)
    assert back.memory_bus_width == card.memory_bus_width
    # By the rule in cards' docstring; the T4 and a few others were measured.
    assert abs(back.context - card.context) <= max(0.05 * card.context, 48 * 2**20)


def test_the_command_describes_the_gpu_that_torch_sees(tmp_path):
    """The virtual GPU stands in for a real one, as in tests/gpu."""
    (tmp_path / "sitecustomize.py").write_text("import fake_gpu", encoding="utf-8")
    paths = [str(tmp_path), str(ROOT / "tests/gpu"), str(ROOT)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest_gpumem", "cards", "--here"],
        env={**os.environ, "GPUMEM_FAKE_GPU": "L4", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    back, card = find_card(card_file(tmp_path, done.stdout)), CARDS["L4"]
    for field in ("device_name", "total_memory", "capability", "sm_count", "l2_cache_size"):
        assert getattr(back, field) == getattr(card, field)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("sm_count = 60", ""), "missing required field `sm_count`"),
        (("sm_count = 60", "sm_count = -1"), "sm_count"),
        (("sm_count = 60", "sm_count = 60.5"), "sm_count"),
        (("sm_count = 60", "sm_count = true"), "sm_count"),
        (("sm_count = 60", "sm_count = 60\nclock = 3"), "unknown field `clock`"),
        (("[8, 9]", "[6, 1]"), "does not support capability = [6, 1]"),
        (("[8, 9]", "8.9"), "capability"),
        (("12_000_000_000", "1000"), "context leaves nothing of total_memory"),
        (("12_000_000_000", "99999999999999999999"), "total_memory"),
        (("12_000_000_000", ""), "does not describe a card"),
        (('"NVIDIA Mine"', '"NVIDIA Mine"\nname = "../x"'), "name"),
        (('"NVIDIA Mine"', '"NVIDIA Mine"\nname = "T4"'), "another card has the name 'T4'"),
    ],
)
def test_a_file_that_describes_no_card_is_refused_by_name(tmp_path, change, problem):
    path = card_file(tmp_path, MINE.replace(*change))
    with pytest.raises(SpecError) as error:
        find_card(path)
    assert path in str(error.value)
    assert problem in str(error.value)


def test_files_that_cannot_be_read_are_refused_by_name(tmp_path):
    with pytest.raises(SpecError, match=r"no\.toml': cannot be read \(No such file"):
        find_card(str(tmp_path / "no.toml"))
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(SpecError, match=r"folder\.toml': cannot be read \(Is a directory"):
        find_card(str(tmp_path / "folder.toml"))
    with pytest.raises(SpecError, match=r"big\.toml': the file is too large"):
        find_card(card_file(tmp_path, "#" * (MAX_FILE + 1), "big.toml"))
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="does not describe a card"):
        find_card(str(tmp_path / "bytes.toml"))
    with pytest.raises(SpecError, match="does not describe a card .*matching regex"):
        find_card(card_file(tmp_path, MINE, "my card.toml"))


def test_two_files_of_one_name_are_told_apart(tmp_path):
    find_card(card_file(tmp_path, MINE))
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(SpecError, match="another card has the name 'mine'"):
        find_card(card_file(other, MINE.replace("60", "61")))


def test_a_gpu_that_the_virtual_one_cannot_be_is_named():
    properties = SimpleNamespace(name="NVIDIA Old", major=6, minor=1)
    with pytest.raises(DeviceError, match=r"NVIDIA Old: .* compute capability 6\.1"):
        described(properties, "2.15.0")


def test_a_marked_test_runs_on_the_card_of_a_file(suite):
    suite.write("mine.toml", MINE)
    session = suite.run(
        "--gpumem-update-baselines",
        source="""
        @pytest.mark.gpu_memory(card="mine.toml", max_gib=8)
        def test_card():
            properties = torch.cuda.get_device_properties(0)
            assert (properties.name, properties.multi_processor_count) == ("NVIDIA Mine", 60)
            torch.empty(1 << 20, device="cuda")
        """,
    )
    assert session.outcomes["passed"] == 1
    assert list(suite.baselines()) == ["virtual-mine/test_it.json"]
