"""``gpumem completion``: the script knows every subcommand, and the shell reads it."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from pytest_gpumem.cli import main


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_the_script_names_every_subcommand(shell, capsys):
    pytest.importorskip("shtab", reason="pip install 'pytest-gpumem[completion]'")
    assert main.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert [name for name in main.COMMANDS if name not in script] == []
    assert "gpumem" in script


def test_bash_completes_a_subcommand_and_its_options(capsys):
    pytest.importorskip("shtab", reason="pip install 'pytest-gpumem[completion]'")
    bash = shutil.which("bash")
    main.main(["completion", "bash"])
    script = capsys.readouterr().out
    ask = """
COMP_WORDS=({words}); COMP_CWORD={last}; COMPREPLY=()
_shtab_gpumem; printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    for words, last, answer in (("gpumem hist", 1, "history"), ("gpumem fit --ca", 2, "--card")):
        typed = script + ask.format(words=words, last=last)
        done = subprocess.run([bash, "-c", typed], capture_output=True, text=True, check=False)
        assert answer in done.stdout.split(), done.stderr


def test_without_shtab_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main.main(["completion", "bash"]) == 2
    assert "pip install 'pytest-gpumem[completion]'" in capsys.readouterr().err
