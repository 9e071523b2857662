"""Folders of baselines by torch's version: this one's, then the nearest."""

from __future__ import annotations

import pytest

from pytest_gpumem.baselines import torch_folders
from pytest_gpumem.baselines.torch_folders import baseline_folders, minor_version


@pytest.mark.parametrize(
    ("own", "nearest"),
    [
        ("2.15.0+cu132", ["2.14", "2.17", "2.9", "3.0", "1.13"]),
        ("2.16.0a0+git", ["2.17", "2.14", "2.9", "3.0", "1.13"]),
        ("2.14.1", ["2.17", "2.9", "3.0", "1.13"]),
    ],
)
def test_the_nearest_version_comes_first(tmp_path, monkeypatch, own, nearest):
    monkeypatch.setattr(torch_folders, "version", lambda _name: own)
    for name in ("1.13", "2.9", "2.14", "2.17", "3.0", "nightly"):
        (tmp_path / f"baselines/torch-{name}").mkdir(parents=True)
    (tmp_path / "baselines/torch-2.12").write_text("no folder")
    first, *others = baseline_folders(tmp_path, "baselines/torch-{torch}")
    major, minor = minor_version(own)
    assert first == tmp_path / f"baselines/torch-{major}.{minor}"
    assert [path.name.removeprefix("torch-") for path in others] == nearest
    absolute = str(tmp_path / "baselines/torch-{torch}")
    assert baseline_folders(tmp_path / "elsewhere", absolute) == [first, *others]


def test_a_plain_folder_is_the_only_one(tmp_path):
    assert baseline_folders(tmp_path, "baselines") == [tmp_path / "baselines"]
    assert [minor_version(text) for text in ("2.15", "2", "x", "2.15.0")] == [
        (2, 15),
        None,
        None,
        (2, 15),
    ]
