"""Checks of what only a real GPU can show, independent of the other tests.

    python -m pytest -p no:gpumem -c /dev/null -o addopts= -q tests/gpu/checks/real_gpu_checks.py

``benchmarks/real_gpu.sh`` runs them; pytest collects this file only where it is named. Each check
is a test with an assertion; its figures are a line of $OUT/checks.jsonl. Programs and sessions run in processes of their own, *jobs*, several
at a time; what is timed runs alone, at the end. ``assumptions.csv`` has the assumption that a check
tests; docs/how-to/on-a-real-gpu.md says what to send.

Variables of the environment:

    CHECK_SITE       folders before PYTHONPATH: unpacked wheels
    CHECK_JOBS       how many jobs run at a time (6)
    CHECK_ONLY       names of jobs, with commas (all)
    CHECK_DEADLINE   seconds after which jobs are ended
    GPUMEM_FAKE_GPU  a card: a dry run, with the virtual GPU in the place of a real one
"""

# ruff: noqa: E501 - the programs of the jobs, and the checks' figures, stand in long lines
from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
FAKE = os.environ.get("GPUMEM_FAKE_GPU", "")
MIB, GIB = 1 << 20, 1 << 30
SLOW = 400 if FAKE else 110
"""seconds that a job may take"""
SCRATCH = Path(tempfile.mkdtemp(prefix="check-"))
BEGAN = time.monotonic()
DEADLINE = float(os.environ.get("CHECK_DEADLINE") or 1e9)
"""seconds after which no job runs: what ended until then is judged"""
LOCK = threading.Lock()
PATHS = os.pathsep.join(
    filter(
        None,
        [
            os.environ.get("CHECK_SITE"),
            str(HERE),
            str(HERE.parent),
            str(ROOT),
            os.environ.get("PYTHONPATH"),
        ],
    )
)
real_only = pytest.mark.skipif(
    bool(FAKE), reason="needs a real GPU: kernels, times or addresses matter"
)
shown_false = pytest.mark.xfail(reason="docs/explanation/trust.md says so, and what to do")


# -- jobs --


class Done:
    """A process that has ended: its status, its output, the records of its conftest file."""

    def __init__(self, name, rc, out, seconds, folder):
        self.name, self.rc, self.out, self.seconds, self.folder = name, rc, out, seconds, folder
        path = folder / "records"
        lines = path.read_text().splitlines() if path.exists() else []
        self.records = [json.loads(line) for line in lines]
        self.lines = [json.loads(line[3:]) for line in out.splitlines() if line.startswith("GM {")]

    def judged(self, test, part=""):
        found = [
            r
            for r in self.records
            if r["kind"] == "judged" and r["test"] == test and r["part"] == part
        ]
        assert found, f"{self.name}: no verdict on {test}: status {self.rc}\n{self.out[-1500:]}"
        return found[-1]

    def verdicts(self):
        return {r["test"]: r for r in self.records if r["kind"] == "judged" and not r["part"]}

    def outcomes(self):
        outcomes = {}
        for r in self.records:
            if r["kind"] == "report" and (r["when"] == "call" or r["outcome"] != "passed"):
                outcomes.setdefault(r["test"], []).append(f"{r['when']} {r['outcome']}")
        return outcomes

    def text(self, test):
        return "\n".join(
            r["text"] for r in self.records if r["kind"] == "report" and r["test"] == test
        )

    def tail(self):
        return f"{self.name}: status {self.rc}, {self.seconds:.1f} s\n{self.out[-2500:]}"


def run(name, *words, files=None, timeout=SLOW, env=None, folder=None):
    folder = folder or SCRATCH / name
    folder.mkdir(exist_ok=True)
    for file, text in (files or {}).items():
        (folder / file).write_text(text, encoding="utf-8")
    records = folder / "records"
    records.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": PATHS,
        "CHECK_RECORDS": str(records),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "COLUMNS": "200",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4"),
        **(env or {}),
    }
    environment.pop("CI", None)
    if "CHECK_NAMES" not in (env or {}):
        environment.pop("CHECK_NAMES", None)
    started = time.monotonic()
    timeout = max(1, min(timeout, DEADLINE - (started - BEGAN)))
    process = subprocess.Popen(
        words,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=timeout)
        rc = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # this job's own group
        out, _ = process.communicate()
        rc = "timeout"
    done = Done(name, rc, out, time.monotonic() - started, folder)
    told = os.environ.get("OUT")
    if told:  # at once: the whole may be ended by its limit
        text = records.read_text(encoding="utf-8") if records.exists() else ""
        with LOCK, Path(told, "checks-output.txt").open("a", encoding="utf-8") as file:
            file.write(f"==== {done.tail()}\n---- records of {name}\n{text[-60000:]}\n")
        with LOCK, Path(told, "checks-jobs.txt").open("a", encoding="utf-8") as file:
            file.write(
                f"{name:24} status {rc} {done.seconds:6.1f} s, ended at {time.monotonic() - BEGAN:6.1f} s\n"
            )
    return done


def script(name, code, *words, more=None, **options):
    head = "import os\nif os.environ.get('GPUMEM_FAKE_GPU'):\n    import fake_gpu\n"
    files = {"program.py": head + code, **(more or {})}
    return run(name, sys.executable, "program.py", *words, files=files, **options)


def session(name, source, *words, files=None, **options):
    plugins = (
        [] if entry_points(group="pytest11", name="gpumem") else ["-p", "pytest_gpumem.plugin"]
    )
    if FAKE:
        plugins = ["-p", "fake_gpu", *plugins]
    files = {
        "test_it.py": source,
        "conftest.py": (HERE / "inner_conftest.py").read_text(encoding="utf-8"),
        "pytest.ini": "[pytest]\n",
        **(files or {}),
    }
    return run(
        name,
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "--tb=short",
        *plugins,
        "--gpumem-device=cuda",
        *words,
        files=files,
        **options,
    )


STEPS_MARKED = """
import os, pytest, torch, check_steps
NAMES = [n for n in os.environ.get("CHECK_NAMES", "").split(",") if n] or list(check_steps.STEPS)

@pytest.mark.gpu_memory(baseline=bool(os.environ.get("CHECK_BASELINE")))
@pytest.mark.parametrize("name", NAMES)
def test_step(name):
    with open("runs", "a") as file:
        file.write(name + "\\n")
    torch.manual_seed(0)
    kept = check_steps.STEPS[name]()
"""
FEW = "mm_float32,mlp_adamw,conv2d_float32,attention_flash,mlp_checkpointed,fragmentation,pinned_copies,lstm"
EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}

FACTS = r"""
import ctypes, json, os, time
import torch
try:
    import pynvml
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    def used(): return pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2).used
    nvml = True
except Exception as error:
    nvml = False
    used = None
facts = {"nvml": nvml, "nvml_before": used() if used else None}
if nvml:
    try:
        facts["nvml_driver"] = str(pynvml.nvmlSystemGetDriverVersion())
        facts["persistence"] = pynvml.nvmlDeviceGetPersistenceMode(handle)
        facts["compute_mode"] = pynvml.nvmlDeviceGetComputeMode(handle)
    except Exception as error:
        facts["nvml_error"] = repr(error)
if not used:
    def used():
        free, total = torch.cuda.mem_get_info()
        return total - free
began = time.perf_counter()
torch.cuda.init()
x = torch.zeros(1, device="cuda"); torch.cuda.synchronize()
facts["init_s"] = round(time.perf_counter() - began, 2)
def beside():
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return [total - free - torch.cuda.memory_reserved(), used() - torch.cuda.memory_reserved()]
facts["context"] = beside()
a = torch.randn(1024, 1024, device="cuda"); (a @ a).sum(); (a.half() @ a.half()).sum()
facts["after_matmul"] = beside()
torch.nn.functional.conv2d(torch.randn(8, 3, 64, 64, device="cuda"), torch.randn(8, 3, 3, 3, device="cuda"))
facts["after_conv"] = beside()
q = torch.randn(1, 4, 128, 64, device="cuda", dtype=torch.half)
torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
torch.optim.AdamW([torch.nn.Parameter(a)]).zero_grad()
facts["after_attention"] = beside()
p = torch.cuda.get_device_properties(0)
facts |= {
    "name": p.name, "total": p.total_memory, "capability": [p.major, p.minor], "sms": p.multi_processor_count,
    "l2": getattr(p, "L2_cache_size", 0), "bus": getattr(p, "memory_bus_width", 0), "uuid": str(p.uuid),
    "mem_get_info": list(torch.cuda.mem_get_info()), "torch": torch.__version__,
    "cudnn": torch.backends.cudnn.version(), "count": torch.cuda.device_count(),
}
from pytest_gpumem.devices import driver
from pytest_gpumem.devices.cuda import CudaDevice
from pytest_gpumem.devices.memory_use import watch_gpus
device = CudaDevice()
facts["info"] = repr(device.open(None, 1)); facts["driver"] = driver.version()
watch = watch_gpus(range(1))
facts["watch"] = type(watch).__name__
times = []
for _ in range(50):
    t = time.perf_counter(); watch.used(0); times.append(time.perf_counter() - t)
facts["read_us"] = round(sorted(times)[25] * 1e6, 1)
watch.start([torch.cuda.memory_reserved()])
big = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
time.sleep(0.1)
(use,) = watch.result([torch.cuda.memory_reserved()])
facts["use"] = [use.peak, use.besides, use.outside, use.others, use.processes]
facts["reserved"] = torch.cuda.memory_reserved()
watch.stop()
# the clock of the allocator's history beside Python's
torch.cuda.memory._record_memory_history(max_entries=10000)
offsets = []
kept = []
for _ in range(200):
    before = time.time_ns(); kept.append(torch.empty(3 << 20, dtype=torch.uint8, device="cuda")); after = time.time_ns()
    offsets.append((before, after)); time.sleep(0.002)
events = [e for e in torch.cuda.memory._snapshot()["device_traces"][0] if e["action"] == "alloc"]
torch.cuda.memory._record_memory_history(None)
apart = [max(b / 1000 - e["time_us"], e["time_us"] - a / 1000, 0) for (b, a), e in zip(offsets, events[-200:])]
facts["clock_apart_us"] = [round(max(apart), 1), round(sum(apart) / len(apart), 2), len(apart)]
facts["host_stats"] = sorted(torch.cuda.host_memory_stats())[:40]
facts["thread_names"] = [open(f"/proc/self/task/{t}/comm").read().strip() for t in os.listdir("/proc/self/task")]
try:
    open("/proc/self/clear_refs", "w").write("5"); facts["clear_refs"] = True
except OSError as error:
    facts["clear_refs"] = repr(error)
facts["gcc"] = os.popen("gcc --version | head -1").read().strip()
print("GM " + json.dumps(facts))
"""

LIMITS = """
import pytest, torch
from pytest_gpumem.devices.cards import CARDS
USABLE = CARDS["T4"].usable_memory
MIB = 1 << 20
def empty(n): return torch.empty(n, dtype=torch.uint8, device="cuda")

@pytest.mark.gpu_memory(max_gib=1, batch_size=3, baseline=False)
def test_max_gib(): parts = [empty(512 * MIB) for _ in range(3)]

@pytest.mark.gpu_memory(max_gib=1, baseline=False)
def test_max_gib_exactly(): parts = [empty(512 * MIB) for _ in range(2)]

@pytest.mark.gpu_memory(card="T4", baseline=False)
@pytest.mark.parametrize("more", [-64, 64])
def test_t4(more): empty(USABLE // MIB * MIB + more * MIB)

@pytest.mark.gpu_memory(card="T4", baseline=False)
def test_fraction_of_a_card():
    torch.cuda.set_per_process_memory_fraction(0.25)
    assert abs(torch.cuda.get_per_process_memory_fraction() - 0.25) < 1e-6
    empty(2 << 30)
    with pytest.raises(torch.OutOfMemoryError):
        empty(8 << 30)

def test_the_fraction_is_back():
    assert torch.cuda.get_per_process_memory_fraction() == 1.0
    x = empty(20 << 30)

@pytest.mark.gpu_memory(baseline=False)
def test_the_gpu_itself(): empty(torch.cuda.get_device_properties(0).total_memory)

@pytest.mark.gpu_memory(baseline=False)
def test_after_that(): a = empty(64 * MIB); b = empty(32 * MIB)

@pytest.mark.gpu_memory(max_gib=0.125, baseline=False)
def test_no_room_for_a_workspace():
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.half)
    kept = empty(64 * MIB)
    a @ a

@pytest.mark.gpu_memory(max_gib=2, baseline=False)
def test_in_backward():
    x = torch.randn(64, 1 << 20, device="cuda", requires_grad=True)  # 256 MiB
    y = x
    for _ in range(5): y = y.sin()
    y.sum().backward()

@pytest.mark.gpu_memory(max_gib=1, baseline=False)
def test_caught():
    try: empty(2 << 30)
    except torch.OutOfMemoryError: pass
    kept = empty(100 * MIB)

@pytest.mark.gpu_memory(baseline=False)
def test_last(): a = empty(64 * MIB); b = empty(32 * MIB)
"""

LEAKS = """
import gc, pytest, torch
MIB = 1 << 20
def empty(n): return torch.empty(n * MIB, dtype=torch.uint8, device="cuda")
KEPT, OTHERS = [], []

@pytest.mark.gpu_memory(baseline=False)
def test_alone(): a = empty(64); b = empty(32)

@pytest.mark.gpu_memory(baseline=False)
def test_leaves(): KEPT.append(empty(300)); OTHERS.append(empty(5))

@pytest.mark.gpu_memory(baseline=False)
def test_beside(): a = empty(64); b = empty(32); c = empty(3)

@pytest.mark.gpu_memory(baseline=False)
def test_frees_it(): KEPT.clear(); a = empty(64); b = empty(32)

@pytest.mark.gpu_memory(baseline=False, max_leak_mib=1)
def test_leak_is_found(): KEPT.append(empty(40))

@pytest.mark.gpu_memory(baseline=False, max_leak_mib=1)
def test_no_leak():
    model = torch.nn.Linear(1000, 1000, device="cuda")
    model(torch.randn(10, 1000, device="cuda")).sum().backward()

@pytest.mark.gpu_memory(baseline=False)
def test_fails():
    held = empty(500)
    raise ValueError("planted")

@pytest.mark.gpu_memory(baseline=False)
def test_after_the_failure(): a = empty(64); b = empty(32)

@pytest.fixture(scope="module")
def wide():
    passing = empty(700)
    del passing
    return empty(200)

@pytest.mark.gpu_memory(baseline=False)
@pytest.mark.parametrize("n", range(2))
def test_wide(wide, n): a = empty(64)

@pytest.mark.gpu_memory(baseline=False, steady=True)
def test_steady():
    model = torch.nn.Linear(1000, 1000, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(8):
        model(torch.randn(10, 1000, device="cuda")).sum().backward()
        optimizer.step(); optimizer.zero_grad()

@pytest.mark.gpu_memory(baseline=False, steady=True)
def test_not_steady():
    model, kept = torch.nn.Linear(1000, 1000, device="cuda"), []
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(8):
        kept.append(model(torch.randn(4096, 1000, device="cuda")).sum())
        kept[-1].backward(); kept.append(empty(2))
        optimizer.step(); optimizer.zero_grad()
"""

VALUES = """
import types, pytest, torch

@pytest.mark.gpu_memory(baseline=False)
def test_values(gpu_memory):
    assert gpu_memory.computes
    torch.manual_seed(1)
    a = torch.randn(300, 300)
    assert torch.allclose((a.cuda().double() @ a.cuda().double()).cpu(), a.double() @ a.double(), atol=1e-8)
    q, k, v = (torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.half) for _ in range(3))
    from torch.nn.attention import SDPBackend, sdpa_kernel
    outs = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(backend):
            outs.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).float())
    assert all((o - outs[2]).abs().max() < 0.02 for o in outs)
    x = torch.randn(10_000, device="cuda")
    assert x.nonzero().numel() == 10_000 and (x > 0).sum().item() == int((x.cpu() > 0).sum())

@pytest.mark.gpu_memory(baseline=False)
def test_nothing_is_intercepted():
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._len_torch_function_stack() == 0
    assert type(torch.Tensor.item).__name__ == "method_descriptor"
    assert type(torch.Tensor.tolist).__name__ == "method_descriptor"
    assert "pytest_gpumem" not in torch.cuda.device_count.__module__
    import os
    assert "LD_PRELOAD" not in os.environ or "gpumem" not in os.environ["LD_PRELOAD"]
    assert "libgpumem" not in open("/proc/self/maps").read()
"""

GRAPHS = """
import os, pytest, torch
MIB = 1 << 20

def captured(stream=None):
    x = torch.randn(64, 16384, device="cuda", dtype=torch.half)
    w = torch.randn(64, 16384, device="cuda", dtype=torch.half)
    side = stream or torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3): torch.nn.functional.linear(x, w)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = torch.nn.functional.linear(x, w)
    return graph, x, w, y

def check(graph, x, w, y):
    for _ in range(3):
        x.normal_(); w.normal_()
        graph.replay(); torch.cuda.synchronize()
        if not os.environ.get("GPUMEM_FAKE_GPU"):
            assert (y.float() - x.float() @ w.float().T).abs().max() < 2

def test_replay():
    check(*captured())

def test_whole_step():
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), capturable=True)
    x = torch.randn(256, 1024, device="cuda")
    def one():
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimizer.step()
    side = torch.cuda.Stream(); side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3): one()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): one()
    for _ in range(3): graph.replay()
    torch.cuda.synchronize()
    assert all(p.isfinite().all() for p in model.parameters()) or os.environ.get("GPUMEM_FAKE_GPU")

def test_graphed_callables():
    model = torch.nn.Linear(1024, 1024).cuda()
    x = torch.randn(256, 1024, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(model, (x,))
    for _ in range(3): graphed(x).sum().backward()
    torch.cuda.synchronize()
"""
GRAPHS_MARKED = GRAPHS + "\npytestmark = pytest.mark.gpu_memory(baseline=False)\n"
GRAPHS_BARE = (
    GRAPHS
    + """
import gc, json
for name in ("test_replay", "test_whole_step", "test_graphed_callables"):
    gc.collect(); torch.cuda.synchronize(); torch._C._cuda_clearCublasWorkspaces(); torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held, kept = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    globals()[name]()
    print("GM " + json.dumps({"name": name, "peaks": [torch.cuda.max_memory_allocated() - held, torch.cuda.max_memory_reserved() - kept]}))
"""
)
GRAPH_FIXTURE = (
    GRAPHS
    + """
STREAM = None

@pytest.fixture(scope="module")
def served():
    # Warmed up on the stream of the capture: the graph has the address of cuBLAS's workspace there.
    global STREAM
    STREAM = torch.cuda.Stream()
    return captured(STREAM)

del test_replay, test_whole_step, test_graphed_callables

MARKED = bool(os.environ.get("CHECK_MARKED"))
mark = pytest.mark.gpu_memory(baseline=False) if MARKED else (lambda function: function)

@mark
@pytest.mark.parametrize("n", range(3))
def test_served(served, n):
    taken = [torch.full((40 * MIB,), 7, dtype=torch.uint8, device="cuda") for _ in range(4)]
    check(*served)
    torch.cuda.synchronize()
    if not os.environ.get("GPUMEM_FAKE_GPU"):
        assert all(bool((t == 7).all()) for t in taken), "the graph wrote into another tensor"
"""
)

XDIST = """
import json, os, pytest, time, torch
@pytest.mark.gpu_memory(baseline=False)
@pytest.mark.parametrize("n", range(6))
def test_turn(n):
    began = time.monotonic()
    a = torch.empty(64 << 20, dtype=torch.uint8, device="cuda"); b = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
    m = torch.randn(2048, 2048, device="cuda"); c = m @ m
    time.sleep(0.2)
    with open("spans", "a") as file:
        file.write(json.dumps([began, time.monotonic(), os.environ.get("PYTEST_XDIST_WORKER")]) + "\\n")
"""

CHILDREN = """
import pytest, subprocess, sys, torch, os
CHILD = ("import fake_gpu;" if os.environ.get("GPUMEM_FAKE_GPU") else "") + "import torch; x = torch.empty(300 << 20, dtype=torch.uint8, device='cuda'); torch.cuda.synchronize()"

@pytest.mark.gpu_memory(baseline=False)
def test_child():
    a = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    subprocess.run([sys.executable, "-c", CHILD], check=True)

class Data(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): return torch.full((1 << 18,), float(i))

@pytest.mark.gpu_memory(baseline=False)
def test_loader():
    torch.zeros(1, device="cuda")
    loader = torch.utils.data.DataLoader(Data(), batch_size=8, num_workers=2, pin_memory=True)
    total = 0.0
    for batch in loader:
        total += batch.to("cuda", non_blocking=True).mean().item()
    assert os.environ.get("GPUMEM_FAKE_GPU") or abs(total / 8 - 31.5) < 1e-3
"""

PROGRAM = """
import torch
m = torch.nn.Linear(4096, 4096, device="cuda")
o = torch.optim.AdamW(m.parameters())
for _ in range(2):
    m(torch.randn(64, 4096, device="cuda")).sum().backward(); o.step(); o.zero_grad()
import json
print("GM " + json.dumps({"peaks": [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]}), flush=True)
"""

MEASURE = """
import json, torch, pytest_gpumem
held = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
with pytest_gpumem.measure() as m:
    x = torch.empty(50 << 20, dtype=torch.uint8, device="cuda")
    del x
print("GM " + json.dumps({"peaks": [m.peak_allocated, m.peak_reserved]}))
"""

ASSERTS = """
import pytest, torch

@pytest.mark.gpu_memory(baseline=False)
def test_before(): torch.empty(64 << 20, dtype=torch.uint8, device="cuda")

@pytest.mark.gpu_memory(baseline=False)
def test_asserts_on_the_device():
    x = torch.zeros(10, device="cuda")
    y = x[torch.tensor([5, 100], device="cuda")]
    torch.cuda.synchronize()

@pytest.mark.gpu_memory(baseline=False)
def test_after(): torch.empty(64 << 20, dtype=torch.uint8, device="cuda")

def test_unmarked(): assert True
"""

COMPILED = """
import json, os, pytest, torch
MIB = 1 << 20

def mlp(mode=None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 2048)).cuda()
    compiled = torch.compile(model, mode=mode)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        compiled(torch.randn(512, 2048, device="cuda")).square().mean().backward()
        optimizer.step(); optimizer.zero_grad()
    torch.cuda.synchronize()

def test_compiled(): mlp()

def test_softmax_reduction():
    @torch.compile
    def f(x): return torch.softmax(x * 2 + 1, -1).sum(0)
    for _ in range(2): f(torch.randn(4096, 4096, device="cuda"))
    torch.cuda.synchronize()

def test_cuda_graph_trees():
    @torch.compile(mode="reduce-overhead")
    def f(x): return (x @ x).relu().sum()
    x = torch.randn(1024, 1024, device="cuda")
    for _ in range(4): r = f(x); torch.cuda.synchronize()
    assert os.environ.get("GPUMEM_FAKE_GPU") or torch.allclose(r, (x @ x).relu().sum(), rtol=1e-3)

def test_triton_autotuned():
    import triton, check_kernel
    x = torch.randn(1 << 22, device="cuda"); out = torch.empty_like(x)
    check_kernel.double[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel())
    torch.cuda.synchronize()
    assert os.environ.get("GPUMEM_FAKE_GPU") or torch.equal(out, 2 * x)
"""
KERNEL = """
import triton, triton.language as tl

@triton.autotune([triton.Config({"BLOCK": 256}), triton.Config({"BLOCK": 1024})], key=["n"])
@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)
"""
COMPILED_MARKED = COMPILED + "\npytestmark = pytest.mark.gpu_memory(baseline=False)\n"
COMPILED_BARE = (
    COMPILED
    + """
import gc
for name in ("test_compiled", "test_softmax_reduction", "test_cuda_graph_trees", "test_triton_autotuned"):
    for tried in ("cold", "warm"):
        gc.collect(); torch.cuda.synchronize(); torch._C._cuda_clearCublasWorkspaces(); torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held, kept = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        error = ""
        try: globals()[name]()
        except Exception as problem: error = repr(problem)[:200]
        print("GM " + json.dumps({"name": name, "tried": tried, "error": error, "peaks": [torch.cuda.max_memory_allocated() - held, torch.cuda.max_memory_reserved() - kept]}), flush=True)
"""
)

DISTRIBUTED = """
import os, pytest, torch
from torch import nn

@pytest.mark.gpu_memory(world_size=64, rank=0, baseline=False)
def test_fsdp_rank_of_64(gpu_memory):
    from torch.distributed.fsdp import fully_shard
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4)))
    for layer in model: fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(32, 2048, device="cuda")).sum().backward(); optimizer.step(); optimizer.zero_grad()

@pytest.mark.gpu_memory(baseline=False)
def test_nccl_alone(tmp_path):
    import torch.distributed as dist
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, device_id=torch.device("cuda:0"))
    try:
        x = torch.ones(1 << 22, device="cuda"); dist.all_reduce(x); torch.cuda.synchronize()
        assert os.environ.get("GPUMEM_FAKE_GPU") or x.sum().item() == 1 << 22
        model = nn.parallel.DistributedDataParallel(nn.Linear(1024, 1024).cuda(), device_ids=[0])
        for _ in range(2): model(torch.randn(8, 1024, device="cuda")).sum().backward()
        torch.cuda.synchronize()
    finally:
        dist.destroy_process_group()

@pytest.mark.gpu_memory(world_size=2, rank=0, baseline=False)
def test_ddp_rank_of_2():
    model = nn.parallel.DistributedDataParallel(nn.Linear(1024, 1024).cuda())
    for _ in range(2): model(torch.randn(8, 1024, device="cuda")).sum().backward()
"""

OUTSIDE = """
import ctypes, os, pytest, torch
def malloc(n):
    if os.environ.get("GPUMEM_FAKE_GPU"):
        from pytest_gpumem.devices.virtual import native
        lib = ctypes.CDLL(str(native.LIBRARY))
    else:
        name = "libcudart.so.13" if torch.version.cuda.startswith("13") else "libcudart.so.12"
        lib = ctypes.CDLL(name)
    p = ctypes.c_void_p()
    assert lib.cudaMalloc(ctypes.byref(p), ctypes.c_size_t(n)) == 0

@pytest.mark.gpu_memory(baseline=False)
def test_outside():
    a = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    malloc(512 << 20)

@pytest.mark.gpu_memory(baseline=False)
def test_no_memory_of_the_device(): assert torch.ones(3).sum() == 3

@pytest.mark.gpu_memory(max_gib=1, baseline=False)
def test_a_limit_and_no_memory(): assert torch.ones(3).sum() == 3
"""

STREAMS = """
import pytest, torch
@pytest.mark.gpu_memory(baseline=False)
@pytest.mark.parametrize("n", range(5))
def test_unsynchronised(n):
    side = torch.cuda.Stream()
    for _ in range(6):
        x = torch.randn(4096, 4096, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3): y = x @ x
        x.record_stream(side)
        del x, y
"""

ORDER = """
import pytest, torch
pytestmark = pytest.mark.gpu_memory(baseline=False)

@pytest.mark.parametrize("n", range(3))
def test_benchmark(n):
    torch.backends.cudnn.benchmark = True
    conv = torch.nn.Conv2d(64, 64, 3, padding=1).cuda()
    conv(torch.randn(32, 64, 96, 96, device="cuda")).sum().backward()
    torch.backends.cudnn.benchmark = False

@pytest.mark.parametrize("n", range(2))
def test_lstm_dropout(n):
    model = torch.nn.LSTM(64, 128, 2, dropout=0.5).cuda()
    model(torch.randn(10, 8, 64, device="cuda"))[0].sum().backward()

@pytest.mark.parametrize("n", range(2))
def test_others(n):
    torch.fft.rfft2(torch.randn(8, 500, 510, device="cuda"))
    a = torch.randn(300, 300, device="cuda")
    torch.linalg.eigh(a @ a.T); torch.linalg.solve(a, a); torch.linalg.svd(a); torch.linalg.inv(a)
    torch.multinomial(torch.rand(1000, device="cuda"), 10)
    a.relu().to_sparse_csr() @ a
    torch.nn.functional.ctc_loss(torch.randn(50, 4, 20, device="cuda").log_softmax(2), torch.randint(1, 20, (4, 10), device="cuda"), torch.full((4,), 50), torch.full((4,), 10))
"""

TIMING = """
import json, os, pytest, statistics, time, torch, check_steps
REPEATS = 2 if os.environ.get("GPUMEM_FAKE_GPU") else 12

def resnet():
    import torchvision
    model = torchvision.models.resnet50(weights=None).cuda()
    x, y = check_steps.normal(32, 3, 224, 224), torch.randint(1000, (32,), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    def step(): check_steps.train(model, (x,), lambda out: torch.nn.functional.cross_entropy(out, y), optimizer, steps=1)
    return step

def small():
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(50))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = check_steps.normal(8, 64)
    def step(): check_steps.train(model, (x,), check_steps.mse, optimizer, steps=1)
    return step

def times(make):
    step = make()
    for _ in range(3): step()
    torch.cuda.synchronize()
    found = []
    for _ in range(REPEATS):
        began = time.perf_counter(); step(); torch.cuda.synchronize()
        found.append(1000 * (time.perf_counter() - began))
    return round(statistics.median(found), 3)

def tell(kind, name, began):
    print("\\nGM " + json.dumps({"kind": kind, "step": name, "ms": times({"resnet50": resnet, "small": small}[name])}), flush=True)

@pytest.mark.parametrize("name", ["resnet50", "small", "resnet50", "small"])
def test_plain(name): tell("plain", name, 0)

@pytest.mark.gpu_memory(baseline=False)
@pytest.mark.parametrize("name", ["resnet50", "small"])
def test_marked(name): tell(os.environ["CHECK_KIND"], name, 0)

@pytest.mark.gpu_memory(baseline=False)
@pytest.mark.parametrize("n", range(10))
def test_empty(n): torch.empty(1 << 20, device="cuda")
"""

BASELINES = ("--gpumem-missing-baseline=fail",)


# Written out as a table: name, function, alone (nothing else runs meanwhile).
def jobs():
    bare = [sys.executable, str(HERE / "bare_steps.py")]
    few = {"CHECK_NAMES": FEW}
    recorded = {**few, "CHECK_BASELINE": "1"}
    both = SCRATCH / "recorded"
    cache_dir = {
        "TORCHINDUCTOR_CACHE_DIR": str(SCRATCH / "inductor"),
        "TRITON_CACHE_DIR": str(SCRATCH / "triton"),
    }
    bare_cache = {
        "TORCHINDUCTOR_CACHE_DIR": str(SCRATCH / "inductor-b"),
        "TRITON_CACHE_DIR": str(SCRATCH / "triton-b"),
    }

    def record_and_compare():
        first = session(
            "recorded",
            STEPS_MARKED,
            "--gpumem-update-baselines",
            "--gpumem-attribution=on",
            env=recorded,
        )
        shutil.copy(both / "records", both / "records-first") if (
            both / "records"
        ).exists() else None
        second = session(
            "compared",
            STEPS_MARKED,
            *BASELINES,
            f"--gpumem-baseline-dir={both / 'baselines'}",
            env=recorded,
        )
        return first, second

    def compiled():
        first = session(
            "compiled", COMPILED_MARKED, files={"check_kernel.py": KERNEL}, env=cache_dir
        )
        second = session(
            "compiled-warm", COMPILED_MARKED, files={"check_kernel.py": KERNEL}, env=cache_dir
        )
        return first, second

    def run_program():
        (SCRATCH / "run").mkdir(exist_ok=True)
        alone = script("run-bare", PROGRAM)
        words = [sys.executable, "-m", "pytest_gpumem", "run", "prog.py"]
        prog = (
            "import os\nif os.environ.get('GPUMEM_FAKE_GPU'): import fake_gpu\n" if FAKE else ""
        ) + PROGRAM
        return alone, run("run", *words, files={"prog.py": prog})

    return {
        "marked": lambda: session("marked", STEPS_MARKED),
        "bare": lambda: run("bare", *bare, ""),
        "compiled": compiled,
        "compiled-bare": lambda: script(
            "compiled-bare", COMPILED_BARE, more={"check_kernel.py": KERNEL}, env=bare_cache
        ),
        "recorded": record_and_compare,
        "limits": lambda: session("limits", LIMITS, "--gpumem-snapshots=snaps"),
        "leaks": lambda: session("leaks", LEAKS),
        "expandable": lambda: session("expandable", STEPS_MARKED, env=EXPANDABLE),
        "expandable-bare": lambda: run("expandable-bare", *bare, "", env=EXPANDABLE),
        "xdist": lambda: session("xdist", XDIST, "-n", "2"),
        "graphs": lambda: session("graphs", GRAPHS_MARKED),
        "graphs-mem-info": lambda: session(
            "graphs-mem-info", GRAPHS_MARKED, env={"CHECK_NO_NVML": "1"}
        ),
        "graphs-bare": lambda: script("graphs-bare", GRAPHS_BARE),
        "graph-fixture": lambda: session("graph-fixture", GRAPH_FIXTURE, env={"CHECK_MARKED": "1"}),
        "graph-fixture-bare": lambda: session("graph-fixture-bare", GRAPH_FIXTURE),
        "distributed": lambda: session("distributed", DISTRIBUTED),
        "children": lambda: session("children", CHILDREN),
        "run": run_program,
        "measure": lambda: script("measure", MEASURE),
        "streams": lambda: session("streams", STREAMS),
        "order": lambda: session("order", ORDER),
        "values": lambda: session("values", VALUES),
        "asserts": lambda: session("asserts", ASSERTS, timeout=60),
    }


REAL_ONLY = {"values", "asserts"}
ONLY = set(filter(None, os.environ.get("CHECK_ONLY", "").split(",")))


def is_asked(name):
    """Whether a job, or a session that runs alone at the end, is to run."""
    return not ONLY or name in ONLY


_futures = {}


@pytest.fixture(scope="session", autouse=True)
def started():
    """Facts first, alone; then all jobs, some at a time."""
    _futures["facts"] = facts = ThreadPoolExecutor(1).submit(lambda: script("facts", FACTS))
    if not facts.result().lines:
        pytest.exit(f"torch cannot use the GPU: {facts.result().tail()}", returncode=3)
    pool = ThreadPoolExecutor(int(os.environ.get("CHECK_JOBS") or (1 if FAKE else 6)))
    for name, job in jobs().items():
        if (FAKE and name in REAL_ONLY) or not is_asked(name):
            continue
        _futures[name] = pool.submit(job)
    yield
    pool.shutdown(cancel_futures=True)
    shutil.rmtree(SCRATCH, ignore_errors=True)


def job(name):
    if name not in _futures:
        pytest.skip(f"the job {name} does not run here")
    return _futures[name].result()


@pytest.fixture
def emit(request):
    """Keep the check's figures, whether it passes or not."""
    figures = {}

    def add(**more):
        figures.update(more)

    yield add
    report = {"check": request.node.name, **figures}
    line = json.dumps(report, default=str)
    out = os.environ.get("OUT")
    if out:
        with Path(out, "checks.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")


@cache
def facts():
    done = job("facts")
    assert done.lines, done.tail()
    return done.lines[-1]


def by_name(done):
    assert done.lines, done.tail()
    return {line["name"]: line for line in done.lines}


def in_test(verdicts, name):
    return verdicts.get(f"test_step[{name}]")


RACES = {"gradients_of_inputs": 0.02, "double_backward": 0.02}
"""steps whose bare figure may be larger by this share: a thread of autograd's holds a gradient for longer"""


def apart(bare, marked, figure):
    """Return the steps whose figures differ: [bare, marked]."""
    rows = {}
    for name, line in by_name(bare).items():
        verdict = in_test(marked.verdicts(), name)
        found = verdict["peaks"][0][figure] if verdict else None
        if found is not None and 0 <= line["peaks"][figure] - found <= RACES.get(name, 0) * found:
            continue
        if found != line["peaks"][figure]:
            rows[name] = [
                line["peaks"][figure],
                found,
                line["error"],
                (marked.text(f"test_step[{name}]") or "")[-300:],
            ]
    return rows


# -- 1. the machine --


def test_01_total_memory_is_one_figure(emit):
    f = facts()
    emit(
        total=f["total"],
        mem_get_info=f["mem_get_info"],
        torch=f["torch"],
        cudnn=f["cudnn"],
        nvml=f["nvml"],
        init_s=f["init_s"],
        persistence=f.get("persistence"),
        gcc=f["gcc"],
    )
    assert f["mem_get_info"][1] == f["total"]  # memory_cap.py, cuda.py


def test_02_the_driver_is_named(emit):
    f = facts()
    emit(driver=f["driver"], nvml_driver=f.get("nvml_driver"))
    if FAKE:
        pytest.skip("the stand-in has no kernel module")
    assert f["driver"] not in {"", "unknown"}
    assert f.get("nvml_driver") in {None, f["driver"]}


def test_03_the_card_is_in_the_table(emit):
    sys.path[:0] = PATHS.split(os.pathsep)
    from pytest_gpumem.devices.cards import CARDS

    f = facts()
    cards = [c for c in CARDS.values() if c.device_name == f["name"] and c.sm_count == f["sms"]]
    card = cards[0] if cards else None
    emit(
        name=f["name"],
        sms=f["sms"],
        total=f["total"],
        l2=f["l2"],
        bus=f["bus"],
        capability=f["capability"],
        card=card
        and [card.name, card.total_memory, card.context, card.l2_cache_size, card.memory_bus_width],
    )
    assert card is not None
    assert abs(card.total_memory - f["total"]) <= 0.01 * f["total"]
    assert (card.l2_cache_size, list(card.capability)) == (f["l2"], f["capability"])


def test_04_the_context_is_as_the_table_says(emit):
    from pytest_gpumem.devices.cards import CARDS

    f = facts()
    cards = [c for c in CARDS.values() if c.device_name == f["name"]]
    emit(
        **{
            k: f[k]
            for k in ("nvml_before", "context", "after_matmul", "after_conv", "after_attention")
        },
        table=[c.context for c in cards],
    )
    assert f["after_attention"][0] < GIB  # MAX_CONTEXT of memory_use.py
    assert not cards or abs(f["context"][0] - cards[0].context) <= 0.15 * cards[0].context


def test_05_nvml_is_read_and_agrees(emit):
    f = facts()
    emit(watch=f["watch"], read_us=f["read_us"], use=f["use"], reserved=f["reserved"])
    assert f["watch"] == ("NvmlWatch" if f["nvml"] else "MemInfoWatch")
    peak, besides, outside, _others, processes = f["use"]
    assert processes == 0
    assert abs(peak - besides - f["reserved"]) < 64 * MIB
    assert outside < 64 * MIB


def test_06_the_historys_clock_is_pythons(emit):
    f = facts()
    emit(clock_apart_us=f["clock_apart_us"])
    assert f["clock_apart_us"][2] == 200
    assert f["clock_apart_us"][0] < 1000  # a span of a part is as short as that


def test_07_pinned_statistics_and_clear_refs(emit):
    f = facts()
    emit(clear_refs=f["clear_refs"], host_stats=f["host_stats"])
    assert f["clear_refs"] is True  # max_host_gib
    assert "active_bytes.current" in f["host_stats"] or any(
        k.startswith("active_bytes") for k in f["host_stats"]
    )


# -- 2. figures --


def test_08_peaks_allocated_are_a_bare_scripts(emit):
    rows = apart(job("bare"), job("marked"), 0)
    emit(
        steps=len(by_name(job("bare"))),
        apart=rows,
        seconds=[job("bare").seconds, job("marked").seconds],
    )
    assert rows == {}


def test_09_peaks_reserved_are_a_bare_scripts(emit):
    rows = apart(job("bare"), job("marked"), 1)
    emit(apart=rows)
    assert rows == {}


def test_10_peaks_pinned_are_a_bare_scripts(emit):
    rows = apart(job("bare"), job("marked"), 2)
    emit(apart=rows, pinned=by_name(job("bare"))["pinned_copies"]["peaks"][2])
    # a few bytes, as of .item(), are left out on purpose (MIN_PINNED of meter/peaks.py)
    assert {name: row for name, row in rows.items() if row[0] >= MIB or row[1]} == {}
    assert by_name(job("bare"))["pinned_copies"]["peaks"][2] > 48 * MIB


def test_11_a_step_that_passes_runs_once(emit):
    runs = (job("marked").folder / "runs").read_text().split()
    twice = sorted({name for name in runs if runs.count(name) > 1})
    emit(
        runs=len(runs),
        twice=twice,
        outcomes=sorted({o for os_ in job("marked").outcomes().values() for o in os_}),
    )
    assert twice == []
    failing = {n for n, line in by_name(job("bare")).items() if line["error"]}
    failed = {
        n.partition("[")[2][:-1]
        for n, o in job("marked").outcomes().items()
        if o != ["call passed"]
    }
    assert failed == failing, job("marked").tail()


def test_12_the_first_test_has_cublas_workspace_as_later_ones(emit):
    verdicts = job("marked").verdicts()
    one, two = (
        in_test(verdicts, "mm_float32")["peaks"][0],
        in_test(verdicts, "mm_bfloat16")["peaks"][0],
    )
    workspace = one[0] - 3 * 64 * MIB
    emit(mm_float32=one, mm_bfloat16=two, workspace=workspace)
    assert workspace >= 0
    turns = {tuple(r["peaks"][0]) for r in job("xdist").verdicts().values()}
    assert len(turns) == 1


def test_13_recording_changes_no_figure(emit):
    first, _ = job("recorded")
    plain, with_history = job("marked").verdicts(), first.verdicts()
    rows = {
        n: [in_test(plain, n)["peaks"], in_test(with_history, n)["peaks"]]
        for n in FEW.split(",")
        if in_test(with_history, n)["peaks"] != in_test(plain, n)["peaks"]
    }
    emit(apart=rows, rc=first.rc, seconds=first.seconds)
    assert rows == {}


def test_14_breakdowns_add_up(emit):
    first, _ = job("recorded")
    rows = {}
    for name in FEW.split(","):
        verdict = in_test(first.verdicts(), name)
        total = sum(verdict["breakdown"][0].values()) if verdict["breakdown"] else None
        rows[name] = [verdict["peaks"][0][0], total, verdict["breakdown"]]
    emit(rows=rows)
    assert all(total == peak for peak, total, _ in rows.values())
    named = in_test(first.verdicts(), "mlp_adamw")["breakdown"][0]
    assert {"parameters", "optimizer state", "gradients"} <= named.keys()


def test_15_a_second_process_has_the_same_bytes(emit):
    first, second = job("recorded")
    rows = {
        n: [in_test(first.verdicts(), n)["peaks"], in_test(second.verdicts(), n)["peaks"]]
        for n in FEW.split(",")
    }
    apart_ = {n: r for n, r in rows.items() if r[0] != r[1]}
    words = sorted({v["word"] for v in second.verdicts().values()})
    emit(apart=apart_, words=words, rc=second.rc)
    assert apart_ == {}
    assert second.rc == 0, second.tail()
    assert words == ["ok"], second.tail()


def test_16_snapshots_are_written(emit):
    import pickle

    limits = job("limits")
    files = sorted((limits.folder / "snaps").rglob("*.pickle"))
    sizes = []
    for path in files[:3]:
        snapshot = pickle.loads(path.read_bytes())
        sizes.append(
            [path.name, len(snapshot["segments"]), sum(map(len, snapshot["device_traces"]))]
        )
    emit(files=len(files), sizes=sizes)
    assert sizes
    assert all(events for *_, events in sizes)


def test_17_expandable_segments(emit):
    bare, marked = job("expandable-bare"), job("expandable")
    rows = [apart(bare, marked, figure) for figure in (0, 1)]
    warned = [line for line in (bare.out + marked.out).splitlines() if "abric" in line][:3]
    emit(
        allocated=rows[0],
        reserved=rows[1],
        warned=warned,
        fragmentation=by_name(bare)["fragmentation"]["peaks"],
        without=by_name(job("bare"))["fragmentation"]["peaks"],
    )
    assert rows == [{}, {}]


def test_18_fragmentation_is_seen(emit):
    first, _ = job("recorded")
    verdict = in_test(first.verdicts(), "fragmentation")
    emit(peaks=verdict["peaks"], hints=verdict["hints"] + verdict["attribution_hints"])
    allocated, reserved, _ = verdict["peaks"][0]
    assert reserved - allocated > 200 * MIB


def test_19_cudnn_benchmark_repeats(emit):
    name = "conv2d_benchmark"
    found = {
        "bare": by_name(job("bare"))[name]["peaks"],
        "marked": in_test(job("marked").verdicts(), name)["peaks"][0],
        "expandable bare": by_name(job("expandable-bare"))[name]["peaks"],
    }
    emit(**found)
    assert found["bare"][0] == found["marked"][0]


def test_20_unsynchronised_streams_spread(emit):
    verdicts = job("streams").verdicts()
    peaks = [verdicts[f"test_unsynchronised[{n}]"]["peaks"][0][:2] for n in range(5)]
    notes = sorted({n for v in verdicts.values() for n in v["notes"]})
    emit(
        peaks=peaks,
        spread=[max(p[i] for p in peaks) - min(p[i] for p in peaks) for i in (0, 1)],
        notes=notes,
    )
    assert job("streams").rc == 0


# -- 3. limits --


def test_21_max_gib(emit):
    done = job("limits")
    oom, text = done.judged("test_max_gib"), done.text("test_max_gib")
    emit(
        oom=oom["oom"],
        word=oom["word"],
        exactly=done.judged("test_max_gib_exactly")["peaks"],
        text=text[-400:],
    )
    assert "batch size 3 does not fit in max_gib=1 (1024.00 MiB)" in text.replace("\n", " ")
    assert "needs 1536.00 MiB" in text.replace("\n", " ")
    assert done.judged("test_max_gib_exactly")["peaks"][0][:2] == [GIB, GIB]


def test_22_card_t4_is_a_limit(emit):
    done = job("limits")
    outcomes = done.outcomes()
    emit(
        outcomes=[outcomes["test_t4[-64]"], outcomes["test_t4[64]"]],
        oom=done.judged("test_t4[64]")["oom"],
        text=done.text("test_t4[64]")[-400:],
    )
    assert (outcomes["test_t4[-64]"], outcomes["test_t4[64]"]) == (["call passed"], ["call failed"])
    assert "does not fit in card='T4'" in done.text("test_t4[64]").replace("\n", " ")


def test_23_a_fraction_is_of_the_card_and_ends_with_the_test(emit):
    outcomes = job("limits").outcomes()
    rows = {
        n: [outcomes.get(n), job("limits").text(n)[-300:]]
        for n in ("test_fraction_of_a_card", "test_the_fraction_is_back")
    }
    emit(rows=rows)
    assert rows["test_the_fraction_is_back"][0] == ["call passed"]
    assert rows["test_fraction_of_a_card"][0] == ["call passed"]


def test_24_the_gpu_itself_runs_out_and_goes_on(emit):
    done = job("limits")
    oom = done.judged("test_the_gpu_itself")
    emit(
        oom=oom["oom"],
        text=done.text("test_the_gpu_itself")[-400:],
        after=done.judged("test_after_that")["peaks"],
        last=done.judged("test_last")["peaks"],
    )
    assert "does not fit on" in done.text("test_the_gpu_itself").replace("\n", " ")
    assert done.judged("test_after_that")["peaks"][0][:2] == [96 * MIB, 96 * MIB]
    assert done.judged("test_last")["peaks"][0][:2] == [96 * MIB, 96 * MIB]


def test_25_other_places_to_run_out(emit):
    done = job("limits")
    rows = {
        n: [done.outcomes()[n], done.judged(n)["word"], done.judged(n)["oom"], done.text(n)[-250:]]
        for n in ("test_no_room_for_a_workspace", "test_in_backward", "test_caught")
    }
    emit(rows=rows)
    assert rows["test_no_room_for_a_workspace"][0] == ["call failed"]
    assert rows["test_in_backward"][0] == ["call failed"]
    assert all(
        "out of memory" in rows[n][1].lower() or rows[n][2]
        for n in ("test_no_room_for_a_workspace", "test_in_backward")
    )
    assert rows["test_caught"][0] == ["call passed"]


# -- 4. memory of other tests --


def test_26_leftovers_do_not_count(emit):
    done = job("leaks")
    names = ("test_alone", "test_beside", "test_frees_it", "test_after_the_failure")
    rows = {
        n: [done.judged(n)["peaks"][0][:2], done.judged(n)["held"][0][:2], done.judged(n)["notes"]]
        for n in names
    }
    emit(rows=rows)
    assert (
        rows["test_alone"][0]
        == rows["test_frees_it"][0]
        == rows["test_after_the_failure"][0]
        == [96 * MIB, 96 * MIB]
    )
    assert rows["test_beside"][0] == [99 * MIB, 96 * MIB + 20 * MIB]
    assert rows["test_beside"][1][0] == 305 * MIB


def test_27_leaks_are_found(emit):
    done = job("leaks")
    outcomes = done.outcomes()
    emit(
        found=[outcomes["test_leak_is_found"], done.text("test_leak_is_found")[-300:]],
        none=outcomes["test_no_leak"],
        steady=outcomes["test_steady"],
        unsteady=outcomes["test_not_steady"],
    )
    assert any("failed" in o for o in outcomes["test_leak_is_found"])
    assert outcomes["test_no_leak"] == outcomes["test_steady"] == ["call passed"]
    assert any("failed" in o for o in outcomes["test_not_steady"])


def test_28_wide_fixtures(emit):
    peaks = [job("leaks").judged(f"test_wide[{n}]")["peaks"][0][:2] for n in range(2)]
    emit(peaks=peaks)
    assert peaks[0] == peaks[1]
    assert peaks[0][0] == 700 * MIB


# -- 5. kernels --


@real_only
def test_29_values_are_computed(emit):
    done = job("values")
    emit(outcomes=done.outcomes(), text=done.text("test_values")[-400:])
    assert done.outcomes()["test_values"] == ["call passed"]


@real_only
def test_30_nothing_is_intercepted(emit):
    done = job("values")
    emit(text=done.text("test_nothing_is_intercepted")[-400:])
    assert done.outcomes()["test_nothing_is_intercepted"] == ["call passed"]


@real_only
def test_31_an_assert_on_the_device(emit):
    done = job("asserts")
    rows = {n: [o, done.text(n)[-300:]] for n, o in done.outcomes().items()}
    emit(rc=done.rc, seconds=done.seconds, rows=rows)
    assert done.rc == 1, done.tail()
    assert "device-side assert" in done.text("test_asserts_on_the_device")
    assert rows["test_before"][0] == ["call passed"]
    assert rows["test_unmarked"][0] == ["call passed"]
    assert any("failed" in o for o in rows["test_after"][0])
    assert "test_asserts_on_the_device left CUDA unusable" in done.text("test_after")


def test_32_graphs_are_captured_and_replayed(emit):
    bare, rows = by_name(job("graphs-bare")), {}
    for name, line in bare.items():
        rows[name] = [
            line["peaks"],
            *[job(j).verdicts().get(name, {}).get("peaks") for j in ("graphs", "graphs-mem-info")],
        ]
    emit(
        rows=rows,
        texts=[
            job(j).text(n)[-300:]
            for j in ("graphs", "graphs-mem-info")
            for n in bare
            if job(j).text(n)
        ],
    )
    assert job("graphs").rc == job("graphs-mem-info").rc == 0, (
        job("graphs").tail() + job("graphs-mem-info").tail()
    )
    # make_graphed_callables calls autograd.grad, whose thread may hold memory for longer in the bare script
    assert all(row[1] == row[2] and row[0][0] == row[1][0][0] for row in rows.values())
    assert all(row[1][0][1] <= row[0][1] <= row[1][0][1] + 32 * MIB for row in rows.values())


def test_33_a_graph_of_a_wide_fixture_lives_through_tests(emit):
    """The graph has the address of a workspace of cuBLAS: meter/plugs.py keeps the block."""
    bare, marked = job("graph-fixture-bare"), job("graph-fixture")
    emit(
        bare=bare.outcomes(),
        marked=marked.outcomes(),
        rc=[bare.rc, marked.rc],
        text=[marked.text(f"test_served[{n}]")[-300:] for n in range(3)],
    )
    assert bare.rc == 0, bare.tail()
    assert marked.rc == 0, marked.tail()


def test_34_compiled_code(emit):
    first, second = job("compiled")
    bare = {}
    for line in job("compiled-bare").lines:
        bare.setdefault(line["name"], []).append([*line["peaks"], line["error"]])
    rows = {
        n: {
            "bare cold, warm": b,
            "cold": first.verdicts().get(n, {}).get("peaks"),
            "warm": second.verdicts().get(n, {}).get("peaks"),
            "notes": first.verdicts().get(n, {}).get("notes"),
            "text": first.text(n)[-300:],
        }
        for n, b in bare.items()
    }
    emit(rows=rows, seconds=[first.seconds, second.seconds, job("compiled-bare").seconds])
    assert first.rc == second.rc == 0, first.tail() + second.tail()
    for name in ("test_compiled", "test_softmax_reduction", "test_triton_autotuned"):
        row = rows[name]
        assert row["warm"][0][0] == row["cold"][0][0], name
        assert row["warm"][0][0] == row["bare cold, warm"][1][0], name


# -- 6. processes --


def test_35_workers_take_turns(emit):
    done = job("xdist")
    spans = sorted(map(json.loads, (done.folder / "spans").read_text().splitlines()))
    overlaps = [b[0] - a[1] for a, b in itertools.pairwise(spans) if b[0] < a[1]]
    verdicts = done.verdicts()
    notes = sorted({n for v in verdicts.values() for n in v["notes"]})
    emit(
        rc=done.rc,
        workers=sorted({s[2] for s in spans}),
        overlaps=overlaps,
        notes=notes,
        peaks=sorted({tuple(v["peaks"][0]) for v in verdicts.values()}),
    )
    assert done.rc == 0
    assert len(spans) == 6
    assert overlaps == []
    assert {s[2] for s in spans} == {"gw0", "gw1"}


def test_36_children_are_told_of(emit):
    done = job("children")
    child, loader = done.judged("test_child"), done.judged("test_loader")
    emit(
        child=[child["peaks"], child["notes"]],
        loader=[loader["peaks"], loader["notes"], loader["pinned_count"]],
    )
    assert done.rc == 0, done.tail()
    assert any("child process" in n and "300.00 MiB" in n for n in child["notes"]), child["notes"]
    assert child["peaks"][0][:2] == [64 * MIB, 64 * MIB]
    assert loader["pinned_count"] == "by time"


def test_37_gpumem_run(emit):
    alone, watched = job("run")
    emit(bare=alone.lines, watched=watched.lines, out=watched.out[-600:])
    assert watched.rc == 0, watched.tail()
    assert watched.lines[-1]["peaks"] == alone.lines[-1]["peaks"]
    if not FAKE:
        allocated = f"{alone.lines[-1]['peaks'][0] / MIB:.2f} MiB"
        assert allocated in watched.out


def test_38_measure(emit):
    done = job("measure")
    emit(lines=done.lines)
    assert done.lines[-1]["peaks"] == [150 * MIB, 150 * MIB]


def alone(name):
    """Wait for the jobs: what is measured now has no neighbour."""
    if not is_asked(name):
        pytest.skip(f"{name} is not asked for")
    for future in _futures.values():
        future.exception()


def test_97_memory_outside_of_pytorch(emit):
    alone("outside")  # without NVML the jobs' memory would count as well
    done = session("outside", OUTSIDE)
    use = done.judged("test_outside")["use"][0]
    emit(use=use, unused=done.outcomes(), text=done.text("test_a_limit_and_no_memory")[-300:])
    assert 512 * MIB <= use[2] < 700 * MIB
    assert any("failed" in o for o in done.outcomes()["test_a_limit_and_no_memory"])


def test_40_one_rank_of_fsdp(emit):
    done = job("distributed")
    emit(
        fsdp=[
            done.outcomes().get("test_fsdp_rank_of_64"),
            done.text("test_fsdp_rank_of_64")[-300:],
            done.verdicts().get("test_fsdp_rank_of_64", {}).get("peaks"),
        ]
    )
    assert done.outcomes()["test_fsdp_rank_of_64"] == ["call passed"]


def test_41_one_rank_of_ddp(emit):
    done = job("distributed")
    emit(ddp=[done.outcomes().get("test_ddp_rank_of_2"), done.text("test_ddp_rank_of_2")[-300:]])
    assert done.outcomes()["test_ddp_rank_of_2"] == ["call passed"]


def test_42_nccl_alone(emit):
    done = job("distributed")
    verdict = done.verdicts().get("test_nccl_alone", {})
    emit(
        outcome=done.outcomes().get("test_nccl_alone"),
        text=done.text("test_nccl_alone")[-300:],
        use=verdict.get("use"),
        peaks=verdict.get("peaks"),
        notes=verdict.get("notes"),
    )
    assert done.outcomes()["test_nccl_alone"] == ["call passed"]


def test_43_host_memory(emit):
    verdicts = job("marked").verdicts()
    hosts = {n.partition("[")[2][:-1]: v["host"] for n, v in verdicts.items()}
    emit(first=list(hosts.items())[:3], largest=sorted(hosts.values(), key=lambda h: h or 0)[-3:])
    assert all(h is not None for h in hosts.values())


def peaks_of(name, count):
    done = job("order")
    peaks = [done.judged(f"{name}[{n}]")["peaks"][0][:2] for n in range(count)]
    return {
        "peaks": peaks,
        "held": [done.judged(f"{name}[{n}]")["held"][0][:2] for n in range(count)],
        "notes": done.judged(f"{name}[{count - 1}]")["notes"],
    }


@shown_false
def test_44_benchmark_mode_in_any_order(emit):
    """cuDNN's timed plans stay in the process: a test that grew is measured in a second run."""
    found = peaks_of("test_benchmark", 3)
    emit(**found)
    assert len(set(map(tuple, found["peaks"]))) == 1


def test_45_dropout_of_an_lstm_in_any_order(emit):
    """PyTorch keeps cuDNN's dropout state for the process; each test makes its own."""
    found = peaks_of("test_lstm_dropout", 2)
    emit(**found)
    assert len(set(map(tuple, found["peaks"]))) == 1


def test_46_other_libraries_in_any_order(emit):
    found = peaks_of("test_others", 2)
    emit(**found)
    assert len(set(map(tuple, found["peaks"]))) == 1


# -- 7. times: alone, at the end --


def test_99_what_measuring_costs(emit):
    alone("timing")
    plain = session(
        "timing", TIMING, "-s", "--gpumem-attribution=off", env={"CHECK_KIND": "measured"}
    )
    history = session(
        "timing-recorded", TIMING, "-s", "--gpumem-attribution=on", env={"CHECK_KIND": "recorded"}
    )
    no_nvml = session(
        "timing-no-nvml",
        TIMING,
        "-s",
        "-k",
        "marked",
        "--gpumem-attribution=off",
        env={"CHECK_KIND": "measured-no-nvml", "CHECK_NO_NVML": "1"},
    )
    found = {}
    for line in (*plain.lines, *history.lines, *no_nvml.lines):
        found.setdefault(f"{line['kind']} {line['step']}", []).append(line["ms"])
    best = {name: min(ms) for name, ms in found.items()}
    seconds = [
        r["seconds"]
        for r in plain.records
        if r["kind"] == "report" and r["test"].startswith("test_empty")
    ]
    by_phase = {}
    for r in plain.records:
        if r["kind"] == "report" and r["test"].startswith("test_empty"):
            by_phase.setdefault(r["when"], []).append(round(1000 * r["seconds"], 1))
    ratios = {
        name: round(ms / best[f"plain {name.split()[1]}"], 3)
        for name, ms in best.items()
        if not name.startswith("plain")
    }
    emit(
        ms=found,
        ratios=ratios,
        empty_test_ms={w: sorted(v)[len(v) // 2] for w, v in by_phase.items()},
        seconds=[plain.seconds, history.seconds, no_nvml.seconds],
    )
    assert plain.rc == history.rc == 0, plain.tail() + history.tail()
    if not FAKE:
        assert ratios["measured resnet50"] < 1.05
        assert ratios["recorded resnet50"] < 1.25
    assert seconds
