"""A newer vLLM that takes more memory: the failure of its baseline, and what a start costs.

    python -m benchmarks.reports.server_releases OLD_PYTHON NEW_PYTHON

Both interpreters have a vLLM and pytest-gpumem. The older writes the baseline of an engine that
starts eagerly with Llama-3.1-8B's configuration on a virtual L4; the newer is compared with it.
Then the newer starts its HTTP server with vLLM's defaults twice, with an empty cache of compiled
code and with a warm one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import DATA, OFFLINE, line, publish

MODEL = DATA / "servers/Llama-3.1-8B-Instruct"
SERVE = Path(__file__).parents[1] / "published/serve.py"
ENGINE = (str(SERVE), "--model", str(MODEL), "--load-format", "dummy", "--skip-tokenizer-init")
LENGTH = ("--max-model-len", "8192")


def run(python: str, folder: str, *words: str) -> tuple[int, str, float]:
    """Run ``gpumem run`` on an L4; return its status, what it printed at its end, and seconds."""
    began = time.monotonic()
    caches = {
        "VLLM_CACHE_ROOT": f"{folder}/cache",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache/inductor",
        "TRITON_CACHE_DIR": f"{folder}/cache/triton",
    }
    ended = subprocess.run(
        [python, "-m", "pytest_gpumem", "run", "--card", "L4", "--until-started", *words],
        cwd=folder,
        env={**os.environ, **OFFLINE, **caches},
        capture_output=True,
        text=True,
        check=False,
    )
    printed = ended.stderr.rpartition("gpumem: virtual GPU")
    return ended.returncode, "".join(printed[1:]).rstrip(), time.monotonic() - began


def main() -> None:
    """Print both parts, and write them to benchmarks/results."""
    old, new = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        judged = ("--baseline=kept", "--name=llama")
        _, before, _ = run(old, folder, *judged, "--update", *ENGINE, *LENGTH, "--enforce-eager")
        status, after, _ = run(new, folder, *judged, *ENGINE, *LENGTH, "--enforce-eager")
        serve = (str(Path(new).with_name("vllm")), "serve", str(MODEL), *ENGINE[3:], *LENGTH)
        starts = [run(new, folder, *serve) for _ in range(2)]
    text = ["A newer vLLM, compared with the baseline of an older one", line(), "", before, ""]
    text += [f"the newer one (exit status {status}):", after, ""]
    for title, (ended, printed, seconds) in zip(("first", "second"), starts, strict=True):
        table = printed[printed.find("vLLM ") :].partition("\n/")[0]  # without Python's warnings
        text += [f"vllm serve, {title} start: {seconds:.0f} s, exit status {ended}", table, ""]
    publish("server_releases", "\n".join(text))


if __name__ == "__main__":
    main()
