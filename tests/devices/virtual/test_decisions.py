"""Whether code decides by a value that it reads, or shows it."""

import linecache
import sys

import pytest

from pytest_gpumem.devices.virtual.decisions import decides, is_test_of_while


def item(size=4):
    """Stand for PyTorch's code that reads a value."""
    VERDICTS.append(decides(sys._getframe(1), size))
    return 1.0


VERDICTS: list[bool] = []

DECIDES = [
    "if item(): pass",
    "while item() < 0: pass",
    "assert item()",
    "x = item() > 2",
    "print(1 if item() else 2)",
    "loss = item()\nif loss > 3: pass",
    "y = 'abc'[: int(item())]",
    "n = item(8)",
    "rows = nonzero()",
    "def chosen(): return nonzero()\nrows = chosen()",
    "n = [0] * int(item(8))",
    "def helper(): return item()\nif helper(): pass",
    "chosen(item())",
]
SHOWS = [
    "item()",
    "print(item())",
    "losses.append(item())",
    "total += item()",
    "print(f'{item():.3f}')",
    "loss = item()\nprint(loss)",
    "losses.append(item(8))",
    "def helper(): return item()\nprint(helper())",
]


@pytest.mark.parametrize(
    ("code", "verdict"), [(code, True) for code in DECIDES] + [(code, False) for code in SHOWS]
)
def test_the_statement_that_reads_tells(code, verdict, capsys, tmp_path):
    name = str(tmp_path / "program.py")
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    VERDICTS.clear()
    names = {"item": item, "nonzero": item, "chosen": abs, "losses": [], "total": 0.0}
    exec(compile(code, name, "exec"), names)
    assert [verdict] == VERDICTS
    capsys.readouterr()


def test_the_test_of_a_while_is_told_from_its_body(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("while not (\n    item()\n):\n    if item(): pass\nif item(): pass\n")
    lines = [line for line in range(1, 6) if is_test_of_while(str(program), line)]
    assert lines == [1, 2, 3]
