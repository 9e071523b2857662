"""Which release brought the memory regressions of this folder? ``gpumem bisect`` is asked.

    python -m benchmarks.wild.run [NAME ...]

Each regression's tests run in environments of their own, on the virtual GPU. A regression that is
not named keeps its row in benchmarks/results/wild.txt. regressions.toml has the packages and tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, line, publish, read_toml
from pytest_gpumem.sizes import format_size

FOLDER = Path(__file__).parent


def bisect(facts: dict[str, Any]) -> dict[str, Any]:
    """Find the release of one regression; return its row."""
    tests = [str(FOLDER / test) for test in facts["tests"]]
    words = [facts["package"], facts["good"], facts["bad"], *tests]
    for requirement in facts.get("with", ()):
        words += ["--with", requirement]
    for package in facts.get("as_of", ()):
        words += ["--as-of", package]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        options = ["--device=virtual", f"--json={answer}"]
        command = [sys.executable, "-m", "pytest_gpumem", "bisect", *options, *words]
        done = subprocess.run(
            command,
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, **facts.get("environment", {})},
        )
        found = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else {}
    seconds = time.perf_counter() - started
    print(done.stdout, flush=True)
    row = {
        "reported": facts["reported"],
        "links": facts["links"],
        "asked": f"{facts['package']} {facts['good']} -> {facts['bad']}",
        "provenance": line(),
        "seconds": round(seconds),
    }
    if "release" not in facts:
        row["tried"] = True
    if not found.get("found") or found["skipped"]:
        return {**row, "found": False, "said": done.stdout.strip()}
    before, after = (
        "out of memory" if found[name] is None else format_size(found[name])
        for name in ("bytes_before", "bytes_found")
    )
    test = found["nodeid"].rpartition("::")[2]
    return {
        **row,
        "found": found["found"] == facts.get("release"),
        "package": found["package"],
        "release": found["found"],
        "peak": found["peak"],
        "before": before,
        "after": after,
        "cause": f"{test}: {found['cause']}" if found["cause"] else "",
    }


def main() -> None:
    """Run the named regressions, or all; publish the table of all rows."""
    kept = RESULTS / "wild.json"
    rows = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    regressions = read_toml(FOLDER / "regressions.toml")
    for name, facts in sorted(regressions.items()):
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        rows[name] = bisect(facts)
        kept.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    text = [__doc__.splitlines()[0], ""]
    for name, row in sorted(rows.items()):
        text.append(
            f"{name}: {row['asked']}; reported: {row['reported']} ({', '.join(row['links'])})"
        )
        if row["found"]:
            change = f"{row['before']} -> {row['after']} peak {row['peak']}"
            text += [f"  {row['package']} {row['release']}: {change}", f"  cause: {row['cause']}"]
        else:
            said = (row.get("release") or row.get("said") or "").splitlines()
            text.append("\n    ".join(["  not found:", *filter(None, said)]))
        text.append(f"  {row['seconds']} s; {row['provenance']}")
    publish("wild", "\n".join(text))


if __name__ == "__main__":
    main()
