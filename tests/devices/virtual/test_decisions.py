"""Whether code decides by a value that it reads, or shows it."""

import linecache
import math
import sys

import pytest

from pytest_gpumem.devices.virtual.decisions import decides, is_test_of_while


def item(size=4):
    """Stand for PyTorch's code that reads a value."""
    VERDICTS.append(decides(sys._getframe(1), size))
    return 1.0


def sized():
    """Stand for an operator that is known to read a size."""
    VERDICTS.append(decides(sys._getframe(1), 4, sized=True))
    return 1.0


class Tensor:
    """Stands for a tensor of the device."""

    def __init__(self, size=4):
        self.size = size

    def to(self, *_):
        return self

    def _read(self, *_):
        VERDICTS.append(decides(sys._getframe(1), self.size))
        return 1.0

    item = cpu = nonzero = tolist = equal = __getitem__ = __float__ = _read

    def __setitem__(self, index, value):
        VERDICTS.append(decides(sys._getframe(1), self.size))


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
    "rows = m.to('cuda').nonzero()",
    "rows = (\n    m\n    .to('cuda')\n    .nonzero()\n)",
    "losses.append(m.nonzero())",
    "losses.append(m[m])",
    "total += m.to('cuda')[m]",
    "m[m.to('cuda')] = 1",
    "print(m[m])",
    "print(m.nonzero())",
    "x = m.nonzero(*losses).bit_count() if 0 else m.nonzero(*losses)",
    "chosen(m.item())",
    "x = m.item() == 1",
    "x = [1 for each in (m, m) if each.item()]",
    "for i in range(int(m.item())): pass",
    "x = 'abc'[int(m.item())]",
    "n = m.item()\nchosen(n)",
    "n = m.item()\nk = n * 2\nchosen(max(k, 3))",
    "n = m.item()\nchosen(size=int(n))",
    "m.longest = m.item()\nchosen(m.longest)",
    "sizes = {}\nsizes['longest'] = m.item()\nchosen(sizes['longest'])",
    "losses.append(long.item())\nchosen(max(losses))",
    "total += long.item()\nchosen(int(total))",
    "def longest():\n    n = m.item()\n    return n\nchosen(longest())",
    "def longest():\n    n = m.item()\n    return n\nn = longest()\nchosen(n)",
    "losses.append(sized())",
    "total += sized()",
    "sized()",
    "def lengths():\n    n = []\n    n.append(long.item())\n    return n\nchosen(max(lengths()))",
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
    "x = m.to('cpu').item()",
    "x = (m == m) + m.item()",
    "total += max(m is m, long.item())",
    "x = [each.item() for each in (m, m)]\nprint(x)",
    "loss = float(m)\nlosses.append(round(loss, 3))",
    "loss = m.item()\nlosses.append({'loss': loss})\nprint(f'{chosen(1)} {loss}')",
    "m.loss = m.item()\nprint(m.loss)",
    "x = abs(m.item()) * 2",
    "print('%.3f' % m.item(), math.exp(m.item()))",
    "print('%.3f' % float(m))",
    "print(m.equal(m))",
    "def __repr__(): return sized()\nprint(__repr__())",
    "total += long.item()\nprint(total / 3)",
    "losses.append(m.item())\nprint(sum(losses) / len(losses))\nassert losses",
    "def mean():\n    s = 0\n    s += m.item()\n    return s / 2\nx = mean()\nprint(x)\nassert x",
    "loss = m.item()\nlog_metrics(loss)",
    "m.clamp = max\nx = m.clamp(m.item(), 0)",
]


@pytest.mark.parametrize(
    ("code", "verdict"), [(code, True) for code in DECIDES] + [(code, False) for code in SHOWS]
)
def test_the_statement_that_reads_tells(code, verdict, capsys, tmp_path):
    name = str(tmp_path / "program.py")
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    VERDICTS.clear()
    names = {
        "item": item,
        "sized": sized,
        "nonzero": item,
        "chosen": lambda *_, **__: 1,
        "losses": [],
        "total": 0.0,
    }
    names |= {"m": Tensor(), "long": Tensor(8), "math": math, "log_metrics": abs}
    exec(compile(code, name, "exec"), names)
    assert VERDICTS
    assert {*VERDICTS} == {verdict}
    capsys.readouterr()


def test_the_test_of_a_while_is_told_from_its_body(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("while not (\n    item()\n):\n    if item(): pass\nif item(): pass\n")
    lines = [line for line in range(1, 6) if is_test_of_while(str(program), line)]
    assert lines == [1, 2, 3]
