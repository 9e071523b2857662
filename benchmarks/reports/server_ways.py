"""Start a server in the ways in which people start one, and in ways that cannot work.

    python -m benchmarks.reports.server_ways VLLM_PYTHON SGLANG_PYTHON

The interpreters have vLLM or SGLang, and pytest-gpumem. Each start is of Llama-3.1-8B's
configuration, on virtual L4s unless the row says otherwise. The first ones are whole lives of a
server: /health is asked until it answers, tokens are requested over HTTP, and SIGINT ends it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import DATA, OFFLINE, line, publish

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "meta-llama/Llama-3.1-8B-Instruct"
MODEL = DATA / "servers/Llama-3.1-8B-Instruct"
DUMMY = ("--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "8192")
EAGER = (*DUMMY, "--enforce-eager")
SGLANG = ("--load-format", "dummy", "--skip-tokenizer-init", "--context-length", "8192")
WITHOUT_NVCC = ("--attention-backend", "triton")
"""FlashInfer's attention, SGLang's default on an L4, has to be compiled by nvcc"""
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
Body = dict[str, Any]
LONGEST = 600
"""seconds until a server that does not answer is given up"""


class Starter:
    """Starts servers of one interpreter, in a folder of their own."""

    def __init__(self, python: str, folder: Path, name: str) -> None:
        self._python, self._folder = python, folder
        self._server = Path(python).with_name(name)
        self._log = folder / f"{name}.log"

    def begin(self, options: tuple[str, ...], *words: str) -> subprocess.Popen[str]:
        """Begin ``gpumem run OPTIONS SERVER serve WORDS``."""
        run = (self._python, "-m", "pytest_gpumem", "run", *options)
        log = self._log.open("w", encoding="utf-8")  # a pipe that nobody reads would fill up
        return subprocess.Popen(
            [*run, str(self._server), "serve", *words],
            cwd=self._folder,
            env={
                **os.environ,
                **OFFLINE,
                "VLLM_CACHE_ROOT": f"{self._folder}/cache",
                "HF_HOME": f"{self._folder}/hub",
            },
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end(self, server: subprocess.Popen[str]) -> str:
        """Wait until a server has ended; return what it printed."""
        server.wait(timeout=LONGEST)
        return self._log.read_text(encoding="utf-8", errors="replace")

    def ended(self, options: tuple[str, ...], *words: str) -> str:
        """Start a server, wait until it has ended; return the status, its error and the result."""
        server = self.begin(options, *words)
        lines = self.end(server).splitlines()
        errors = [i for i, each in enumerate(lines) if "Error: " in each]
        # The line after an error of pydantic has the reason.
        error = lines[errors[-1] : errors[-1] + 2] if server.returncode and errors else []
        return "\n".join([f"exit status {server.returncode}", *error, result("\n".join(lines))])

    def model(self, name: str, **changes: object) -> str:
        """Write a folder with the changed configuration; return its name."""
        config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
        (self._folder / name).mkdir()
        text = json.dumps({**config, **changes})
        (self._folder / name / "config.json").write_text(text, encoding="utf-8")
        return f"./{name}"

    def keep_in_hub(self) -> None:
        """Put the configuration where Hugging Face's library caches a downloaded file."""
        kept = self._folder / "hub/hub" / f"models--{NAME.replace('/', '--')}"
        (kept / "snapshots/0").mkdir(parents=True)
        (kept / "refs").mkdir()
        (kept / "refs/main").write_text("0", encoding="utf-8")
        shutil.copy(MODEL / "config.json", kept / "snapshots/0")


def ask(port: int, path: str, body: Body | None = None) -> tuple[int, bytes]:
    """Send a request; return the status, 0 for a server that does not listen, and the answer."""
    connection = HTTPConnection("127.0.0.1", port, timeout=LONGEST)
    try:
        connection.request(
            "POST" if body else "GET",
            path,
            json.dumps(body) if body else None,
            {"Content-Type": "application/json"},
        )
        answer = connection.getresponse()
        return answer.status, answer.read()
    except OSError:
        return 0, b""
    finally:
        connection.close()


def free_port() -> int:
    """Return a port that no program listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def result(printed: str) -> str:
    """Return what gpumem run printed at a program's end."""
    return "gpumem: virtual GPU" + printed.rpartition("gpumem: virtual GPU")[2].rstrip()


def life(
    starter: Starter, options: tuple[str, ...], words: tuple[str, ...], path: str, body: Body
) -> str:
    """Start a server, send a request of 2,000 tokens, stop it; return what happened."""
    port, began = free_port(), time.monotonic()
    server = starter.begin(options, *words, "--port", str(port))
    status = 0
    while status != 200 and server.poll() is None and time.monotonic() - began < LONGEST:
        time.sleep(1)
        status, _ = ask(port, "/health")
    healthy = time.monotonic() - began
    answered, answer = ask(port, path, body)
    usage = re.findall(rb'"(?:completion_tokens|prompt_tokens)": ?\d+', answer)
    server.send_signal(signal.SIGINT)
    printed = starter.end(server)
    return (
        f"/health: {status} after {healthy:.0f} s; a request: {answered}, "
        f"{b', '.join(usage).decode()}; SIGINT: exit status {server.returncode}\n{result(printed)}"
    )


def killed(starter: Starter) -> str:
    """Kill the engine's process while the server runs; return what is printed."""
    port = free_port()
    server = starter.begin(("--card", "L4"), str(MODEL), *EAGER, "--port", str(port))
    while ask(port, "/health")[0] != 200 and server.poll() is None:
        time.sleep(1)
    engine = subprocess.run(
        ["pgrep", "-f", "VLLM::EngineCore"], capture_output=True, text=True, check=True
    ).stdout.split()[0]
    os.kill(int(engine), signal.SIGKILL)
    printed = starter.end(server)
    return f"exit status {server.returncode}\n{result(printed)}"


def main() -> None:
    """Print every start, and write them to benchmarks/results."""
    vllm_python, sglang_python = sys.argv[1:]
    l4, until = ("--card", "L4"), ("--card", "L4", "--until-started")
    prompt = list(range(2000))
    vllm_body = {"model": str(MODEL), "prompt": prompt, "max_tokens": 8, "detokenize": False}
    sglang_body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 8}}
    completions, generate = ("/v1/completions", vllm_body), ("/generate", sglang_body)
    default, path = (str(MODEL), *DUMMY), ("--model-path", str(MODEL))
    with tempfile.TemporaryDirectory() as folder:
        vllm = Starter(vllm_python, Path(folder), "vllm")
        sglang = Starter(sglang_python, Path(folder), "sglang")
        vllm.keep_in_hub()
        awq = vllm.model("awq", quantization_config=AWQ)
        gptq = vllm.model("gptq", quantization_config=GPTQ)
        unknown = vllm.model("unknown", architectures=["NobodysModel"], model_type="nobodys")
        two = (*default, "--tensor-parallel-size=2")
        rows: tuple[tuple[str, Callable[[], str]], ...] = (
            ("vLLM's defaults", lambda: life(vllm, l4, default, *completions)),
            ("tensor parallel", lambda: life(vllm, (*l4, "--devices", "2"), two, *completions)),
            (
                "SGLang's defaults on an H100",
                lambda: life(sglang, ("--card=H100",), (*path, *SGLANG), *generate),
            ),
            (
                "SGLang, whose share of the memory is too small",
                lambda: sglang.ended(until, *path, *SGLANG, *WITHOUT_NVCC),
            ),
            ("a name whose configuration is cached", lambda: vllm.ended(until, NAME, *EAGER)),
            ("AWQ", lambda: vllm.ended(until, awq, *EAGER)),
            ("GPTQ", lambda: vllm.ended(until, gptq, *EAGER)),
            ("an unknown architecture", lambda: vllm.ended(until, unknown, *EAGER)),
            (
                "a length beyond the model's",
                lambda: vllm.ended(until, str(MODEL), *EAGER, "--max-model-len", "200000"),
            ),
            (
                "a card too small for the weights",
                lambda: vllm.ended(("--card=T4", "--until-started"), str(MODEL), *EAGER),
            ),
            ("an engine that is killed", lambda: killed(vllm)),
        )
        text = ["Ways to start a server", line(), ""]
        for title, row in rows:
            text += [f"{title}: {row()}", ""]
            print(text[-2], flush=True)
    publish("server_ways", "\n".join(text).rstrip())


if __name__ == "__main__":
    main()
