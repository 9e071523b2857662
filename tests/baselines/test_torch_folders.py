"""Folders of baselines by torch's version: this one's, then the nearest."""

from __future__ import annotations

import pytest

from pytest_gpumem.baselines import paths
from pytest_gpumem.baselines.paths import (
    baseline_folders,
    folder_of_torch,
    minor_version,
)


@pytest.mark.parametrize(
    ("own", "nearest"),
    [
        ("2.15.0+cu132", ["2.14", "2.17", "2.9", "3.0", "1.13"]),
        ("2.16.0a0+git", ["2.17", "2.14", "2.9", "3.0", "1.13"]),
        ("2.14.1", ["2.17", "2.9", "3.0", "1.13"]),
    ],
)
def test_the_nearest_version_comes_first(tmp_path, monkeypatch, own, nearest):
    monkeypatch.setattr(paths, "version", lambda _name: own)
    for name in ("1.13", "2.9", "2.14", "2.17", "3.0", "nightly"):
        (tmp_path / f"baselines/torch-{name}").mkdir(parents=True)
    (tmp_path / "baselines/torch-2.12").write_text("no folder")
    first, *others, common = baseline_folders(tmp_path, "baselines/torch-{torch}")
    major, minor = minor_version(own)
    assert first == tmp_path / f"baselines/torch-{major}.{minor}"
    assert [path.name.removeprefix("torch-") for path in others] == nearest
    absolute = str(tmp_path / "baselines/torch-{torch}")
    assert baseline_folders(tmp_path / "elsewhere", absolute) == [first, *others, common]
    assert common == tmp_path / "baselines"  # where the baselines were before


def test_commands_read_the_folder_of_the_installed_torch(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "version", lambda _name: "2.15.0+cu132")
    monkeypatch.chdir(tmp_path)
    template = "baselines/torch-{torch}"
    assert folder_of_torch("baselines") == "baselines"
    assert folder_of_torch(template) == "baselines/torch-2.15"
    (tmp_path / "baselines").mkdir()
    assert folder_of_torch("baselines") == folder_of_torch(template) == "baselines"
    for version in ("2.9", "2.14"):
        (tmp_path / f"baselines/torch-{version}").mkdir()
    nearest = "baselines/torch-2.14"
    assert folder_of_torch("baselines") == folder_of_torch(template) == nearest
    (tmp_path / "baselines/torch-2.15").mkdir()
    assert folder_of_torch("baselines") == folder_of_torch(template) == "baselines/torch-2.15"
    assert folder_of_torch("baselines/torch-2.9") == "baselines/torch-2.9"


def test_a_plain_folder_is_the_only_one(tmp_path):
    assert baseline_folders(tmp_path, "baselines") == [tmp_path / "baselines"]
    assert [minor_version(text) for text in ("2.15", "2", "x", "2.15.0")] == [
        (2, 15),
        None,
        None,
        (2, 15),
    ]
