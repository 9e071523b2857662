"""An output replaces earlier outputs of its kind and empty files, and no other file."""

from __future__ import annotations

import json
import os

import pytest
from helpers.sample_report import sample

from pytest_gpumem.cli.bisect import bisect
from pytest_gpumem.cli.outcome import write_json
from pytest_gpumem.cli.verify import verify
from pytest_gpumem.errors import SpecError
from pytest_gpumem.report.model import Report
from pytest_gpumem.session.output_files import require_replaceable
from pytest_gpumem.session.settings import OUTPUTS

OTHERS = {
    "a test": "def test_step():\n    assert True\n",
    "a baseline": '{\n "format": 1,\n "device": {"kind": "virtual"}\n}\n',
    "other JSON": '{"name": 1}',
    "a list": '[{"name": "a"}]',
    "a page": '<!DOCTYPE html>\n<html lang="en">\n<head><title>GPU memory</title></head>\n',
    "a heading": "# GPU memory\n",
    "bytes": "\x80\x04\0",
}


BEGINNINGS = {
    **{output.name: output.beginning for output in OUTPUTS},
    "bisect": bisect.BEGINNING,
    "verify": verify.BEGINNING,
}


def outputs(report):
    """Return the text of each kind of output."""
    created = {"created": "2026-11-22T10:00:00Z", "when": "", "json_name": ""}
    return {output.name: "".join(output.pieces(report, **created)) for output in OUTPUTS}


@pytest.mark.parametrize("report", [sample(), Report(())], ids=["results", "empty"])
def test_an_output_replaces_one_of_its_kind_and_no_other(tmp_path, report):
    texts = outputs(report)
    for kind in texts:
        for written, text in texts.items():
            path = tmp_path / f"{kind}-{written}"
            path.write_text(text, encoding="utf-8")
            if kind == written:
                require_replaceable(path, BEGINNINGS[kind], "--x")
            else:
                with pytest.raises(SpecError, match="not written by this option"):
                    require_replaceable(path, BEGINNINGS[kind], "--x")


@pytest.mark.parametrize("kind", BEGINNINGS)
def test_files_of_others_are_refused_by_name_and_empty_ones_are_not(tmp_path, kind):
    path = tmp_path / "it"
    require_replaceable(path, BEGINNINGS[kind], "--x")  # none is there
    path.touch()
    require_replaceable(path, BEGINNINGS[kind], "--x")
    for text in OTHERS.values():
        path.write_text(text)
        with pytest.raises(SpecError) as caught:
            require_replaceable(path, BEGINNINGS[kind], f"--x={path}")
        assert str(caught.value) == (
            f"--x={path}: this file exists, and was not written by this option; name another file, "
            "or move this one away"
        )


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SpecError, match="not a regular file"):
        require_replaceable(tmp_path / "pipe", BEGINNINGS["json"], "--x")


def test_answers_of_subcommands_replace_their_own(tmp_path):
    path = tmp_path / "it.json"
    answers = {
        "bisect": {"package": "lib", "good": "1.0", "bad": "2.0"},
        "verify": {"format": 1, "gpumem": "0.2.0", "card": "T4"},
    }
    for kind, answer in answers.items():
        write_json(path, answer)
        require_replaceable(path, BEGINNINGS[kind], "--x")
        other = next(it for it in answers if it != kind)
        with pytest.raises(SpecError):
            require_replaceable(path, BEGINNINGS[other], "--x")
    assert json.loads(path.read_text()) == answers["verify"]
