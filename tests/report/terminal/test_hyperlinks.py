"""Links of source lines in terminals that have them."""

from __future__ import annotations

import pytest

from pytest_gpumem.report.terminal.hyperlinks import has_links, with_links


@pytest.mark.parametrize(
    ("environ", "interactive", "expected"),
    [
        ({"TERM_PROGRAM": "iTerm.app"}, True, True),
        ({"TERM_PROGRAM": "iTerm.app"}, False, False),
        ({"TERM_PROGRAM": "Apple_Terminal"}, True, False),
        ({"VTE_VERSION": "7600"}, True, True),
        ({"VTE_VERSION": "4600"}, True, False),
        ({"TERM": "xterm-kitty"}, True, True),
        ({"WT_SESSION": "x", "CI": "true"}, True, False),
        ({"WT_SESSION": "x", "TERM": "dumb"}, True, False),
        ({"TERM": "xterm-256color"}, True, False),
        ({"FORCE_HYPERLINK": "1"}, False, True),
        ({"FORCE_HYPERLINK": "0", "TERM_PROGRAM": "WezTerm"}, True, False),
    ],
)
def test_the_environment_tells_whether_a_terminal_has_links(environ, interactive, expected):
    assert has_links(environ, interactive=interactive) is expected


def test_a_source_line_is_a_link_where_its_file_is_there(tmp_path):
    (tmp_path / "src").mkdir()
    path = tmp_path / "src/a b.py"
    path.write_text("")
    (tmp_path / "src/model.py").write_text("")
    linked = with_links(
        "grew at src/model.py:12 (f), gone.py:3", str(tmp_path), "vscode://file{path}:{line}"
    )
    address = f"vscode://file{tmp_path}/src/model.py:12"
    assert linked == f"grew at \x1b]8;;{address}\x1b\\src/model.py:12\x1b]8;;\x1b\\ (f), gone.py:3"
    assert with_links("no place", str(tmp_path), "") == "no place"


def test_without_an_editor_the_link_is_the_files(tmp_path):
    (tmp_path / "model.py").write_text("")
    linked = with_links("model.py:12", str(tmp_path), "")
    assert linked.startswith("\x1b]8;;file://")
    assert f"{tmp_path}/model.py\x1b" in linked


GROWS = """
    @pytest.mark.gpu_memory(max_allocated_gib=0.1)
    def test_too_much():
        mib(300)
"""


def test_a_failure_has_links_where_the_terminal_has(suite, monkeypatch):
    monkeypatch.setenv("FORCE_HYPERLINK", "1")
    assert "\x1b]8;;file://" in suite.run(source=GROWS).out
    monkeypatch.setenv("FORCE_HYPERLINK", "0")
    assert "\x1b]8;" not in suite.run().out
