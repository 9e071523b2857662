"""A folder of test files, and the sessions of pytest that run them."""

from __future__ import annotations

import json
import re
import sys
from contextlib import suppress
from types import SimpleNamespace

from helpers.sources import HELPER, WITHOUT
from helpers.warm import HANGS, warm_python
from pytest_gpumem.sizes import MIB


class Suite:
    def __init__(self, pytester):
        self.pytester = pytester
        self.path = pytester.path

    def write(self, name, text):
        """Write a file; add the usual imports to test files that have none."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = text.strip("\n")
        indent = re.match(r" *", text).group()
        text = re.sub(rf"^{indent}", "", text, flags=re.MULTILINE)
        if name.startswith("test_") and not re.search(r"import pytest$", text, re.MULTILINE):
            text = f"import pytest, torch\n{HELPER}\n{text}"
        path.write_text(text + "\n", encoding="utf-8")
        return path

    def run(self, *args, source=None):
        """Run a session in this process; ``source`` becomes test_it.py."""
        if source is not None:
            self.write("test_it.py", source)
        result = self.pytester.runpytest_inprocess(*WITHOUT, *args)
        if hasattr(result.reprec, "clear"):  # a session that a usage error ended has none
            result.reprec.clear()  # it records every hook call, whose arguments keep tensors alive
        return Session(self, result)

    def run_warm(self, *args, source=None):
        """Run a session in a process that has torch in memory: see helpers/warm.py."""
        return self.run_apart(*args, source=source, python=warm_python())

    def run_apart(self, *args, source=None, python=sys.executable):
        """Run a session in a new interpreter, or in ``python``."""
        if source is not None:
            self.write("test_it.py", source)
        command = (python, "-m", "pytest", *WITHOUT, *args)
        return Session(self, self.pytester.run(*command, timeout=HANGS))

    def python(self, code, *, python=sys.executable):
        """Run a program; return what it printed."""
        path = self.write("program.py", code)
        done = self.pytester.run(python, str(path), timeout=HANGS)
        return SimpleNamespace(out=done.stdout.str(), err=done.stderr.str(), ret=done.ret)

    def baselines(self, folder="baselines"):
        """Return the content of each baseline file by its path in the folder."""
        root = self.path / folder
        return {str(p.relative_to(root)): p.read_text() for p in sorted(root.rglob("*.json"))}

    def baselined(self, folder="baselines"):
        """Return the peaks in MiB of each test or part with a baseline, by nodeid."""
        found = {}
        for content in map(json.loads, self.baselines(folder).values()):
            for test, entry in content["tests"].items():
                for part, it in {"": entry, **entry.get("parts", {})}.items():
                    if "peak_allocated" in it:
                        name = f"{content['module']}::{test}" + (f" ({part})" if part else "")
                        pair = it["peak_allocated"][0] / MIB, it["peak_reserved"][0] / MIB
                        found[name] = pair
        return found


class Session:
    """The outcome and output of a session."""

    def __init__(self, suite, result):
        self.suite = suite
        self.ret = result.ret
        self.out = result.stdout.str()
        self.err = result.stderr.str()
        self.outcomes = {}
        with suppress(ValueError):  # a session without a last line
            self.outcomes = result.parseoutcomes()

    @property
    def flat(self):
        """The output with wrapped lines joined."""
        return " ".join(self.out.split())

    @property
    def table(self):
        """The rows of the summary's table by test, each as a dict of its columns."""
        lines = self.out.splitlines()
        heads = [i for i, line in enumerate(lines) if re.match(r"test +allocated", line)]
        if not heads:
            return {}
        rule = lines[heads[0] + 1]
        spans = [m.span() for m in re.finditer(r"-+", rule)]
        spans[-1] = (spans[-1][0], 200)
        titles = lines[heads[0]].split()
        rows, prefix, device, whole = {}, "", {}, ""
        for line in lines[heads[0] + 2 :]:
            if not line.strip():
                break
            if line.startswith(" " * 6):  # the cause of the row above
                continue
            head = re.fullmatch(r"([^ ]+[.]py)? ?(?:on ([^ ]+))?", line)
            if head:
                prefix = f"{head[1]}::" if head[1] else ""
                device = {"device": head[2]} if head[2] else {}
                continue
            cells = [line[a:b].strip() for a, b in spans]
            name = f"{prefix}{cells[0]}"
            if cells[0].startswith("("):
                name = f"{whole} {cells[0]}"
            else:
                whole = name
            rows[name] = dict(zip(titles[1:], cells[1:], strict=True)) | device
        return rows

    def figures(self):
        """Peak allocated and reserved in MiB, by test."""
        return {k: (float(v["allocated"]), float(v["reserved"])) for k, v in self.table.items()}

    def verdicts(self):
        return {name: row["verdict"] for name, row in self.table.items()}
