"""Which benchmarks there are: what they answer, what they write, how long they take.

python -m benchmarks [WORD ...]
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from pathlib import Path


def rows() -> list[list[str]]:
    """Return the rows of README.md's table: question, command, files, time."""
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.count("|") == 5][2:]
    return [[cell.strip().replace("`", "") for cell in line.split("|")[1:-1]] for line in lines]


def main() -> None:
    """Print the benchmarks whose row contains all words of the command line."""
    words = [word.lower() for word in sys.argv[1:]]
    width = min(shutil.get_terminal_size().columns, 120)
    for question, command, files, time in rows():
        row = f"{question} {command} {files}".lower()
        if all(word in row for word in words):
            print(*textwrap.wrap(question, width), sep="\n")
            print(f"    python -m benchmarks.{command}\n    writes {files}; takes {time}")


if __name__ == "__main__":
    main()
