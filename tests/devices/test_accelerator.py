"""Accelerators other than CUDA, on a backend of PyTorch for tests alone (programs/standin).

It is registered in processes of their own: a process has one accelerator, and here it is CUDA.
"""

import os
import re
import sys

import pytest
from helpers.virtual_gpu import child, run_python

from pytest_gpumem.devices import accelerator, select
from pytest_gpumem.devices.accelerator import (
    Accelerator,
    AcceleratorBackend,
    AcceleratorDevice,
    accelerator_expected,
)
from pytest_gpumem.devices.cards import CARDS
from pytest_gpumem.devices.cuda import CudaDevice
from pytest_gpumem.devices.select import choose
from pytest_gpumem.devices.torch_build import TorchBuild
from pytest_gpumem.meter.out_of_memory import OutOfMemoryWatch

FOUND = Accelerator("xpu", "Intel Arc", ["xpu records no history"])
README = """
@pytest.mark.gpu_memory(max_gib=0.5, batch_size=4)
def test_step(gpu_memory):
    layer = torch.nn.TransformerEncoderLayer(64, 4, {width}, batch_first=True)
    layer.to(gpu_memory.device)
    samples = torch.randn(gpu_memory.batch_size, 16, 64, device=gpu_memory.device)
    layer(samples).sum().backward()
"""
"""the README's test, with gpu_memory.device, and small enough to be computed"""


@pytest.fixture
def accelerated(suite, standin):
    """Sessions whose tests import the stand-in."""
    suite.write("conftest.py", f"import sys\nsys.path.insert(0, {str(standin)!r})\nimport standin")
    suite.pytester.makeini("[pytest]\ngpumem_device = accelerator")
    return suite


def run(suite, *args, source=None):
    """Run a session; its header would ask another process for the accelerator."""
    return suite.run_warm("--no-header", *args, source=source)


# ---- a test's way ----


def test_the_readmes_test_is_recorded_repeated_and_judged(accelerated):
    session = run(accelerated, "--gpumem-update-baselines", source=README.format(width=256))
    assert session.outcomes == {"passed": 1}
    (path,) = accelerated.baselines()
    assert path == "standin-Stand-in-1000/test_it.json"
    recorded = accelerated.baselined()["test_it.py::test_step"]
    assert 0 < recorded[0] <= recorded[1] < 2
    session = run(accelerated)
    assert session.outcomes == {"passed": 1}
    assert session.table["test_step"]["verdict"] == "ok"
    session = run(accelerated, source=README.format(width=65536))
    assert session.outcomes == {"failed": 1}
    assert "regressed" in session.flat
    assert "peak allocated" in session.flat


SEVERAL = """
kept = []

@pytest.mark.gpu_memory(max_leak_mib=1)
def test_leaks(gpu_memory):
    kept.append(mib(3, gpu_memory.device))

@pytest.mark.gpu_memory
def test_beside_what_was_left(gpu_memory):
    mib(7, gpu_memory.device)

@pytest.mark.gpu_memory
def test_has_parts(gpu_memory):
    with gpu_memory.measure("small"):
        mib(5, gpu_memory.device)
    with gpu_memory.measure("large", max_gib=0.01):
        mib(50, gpu_memory.device)

@pytest.mark.gpu_memory(max_gib=2, batch_size=8)
def test_does_not_fit(gpu_memory):
    kept_here = [mib(100, gpu_memory.device), mib(1000, gpu_memory.device)]

@pytest.mark.gpu_memory(steady=True)
def test_grows(gpu_memory):
    grown = []
    for _ in range(6):
        grown.append(mib(2, gpu_memory.device))
        gpu_memory.step()

@pytest.mark.gpu_memory(devices=2)
def test_has_two_devices(gpu_memory):
    sizes = [mib(11 + device.index, device) for device in gpu_memory.devices]

@pytest.fixture(scope="module")
def model():
    return mib(20, "standin")

@pytest.mark.gpu_memory
def test_uses_a_wide_fixture(model):
    mib(4, "standin")

@pytest.mark.gpu_memory
def test_uses_it_too(model):
    mib(6, "standin")
"""


SHORT = """
import contextlib

@pytest.mark.gpu_memory(max_gib=2, batch_size=8)
def test_does_not_fit(gpu_memory):
    kept_here = [mib(100, gpu_memory.device), mib(1000, gpu_memory.device)]

@pytest.mark.gpu_memory(devices=2)
def test_has_two_devices(gpu_memory):
    mib(2000, gpu_memory.devices[1])

@pytest.mark.gpu_memory
def test_turns_it_into_another_error(gpu_memory):
    try:
        mib(2000, gpu_memory.device)
    except RuntimeError as error:
        raise ValueError("too much") from error

@pytest.mark.gpu_memory
def test_searches(gpu_memory):
    assert gpu_memory.largest(lambda size: mib(400 * size, gpu_memory.device)).value == 2

@pytest.mark.gpu_memory
def test_fails_by_another_error(gpu_memory):
    mib(-1, gpu_memory.device)
"""


REFUSED = """
@pytest.mark.gpu_memory(devices=3)
def test_has_three_devices(gpu_memory):
    pass

@pytest.mark.gpu_memory(card="T4")
def test_names_a_card(gpu_memory):
    pass

@pytest.mark.gpu_memory(world_size=8, rank=3)
def test_is_a_rank(gpu_memory):
    pass

@pytest.mark.gpu_memory(max_pinned_gib=1)
def test_pins(gpu_memory):
    pass

@pytest.mark.gpu_memory
def test_pins_in_a_part(gpu_memory):
    with gpu_memory.measure("pins", max_pinned_gib=2):
        pass
"""


def test_leaks_parts_steps_fixtures_and_several_devices_are_judged(accelerated):
    session = run(accelerated, source=SEVERAL)
    assert session.outcomes == {"passed": 5, "failed": 3, "errors": 1}
    rows = {name: float(row["allocated"].lstrip(">")) for name, row in session.table.items()}
    assert rows == {
        "test_leaks": 3,
        "test_beside_what_was_left": 7,
        "test_has_parts": 50,
        "test_has_parts (small)": 5,
        "test_has_parts (large)": 50,
        "test_does_not_fit": 100,
        "test_grows": 12,
        "test_has_two_devices": 12,
        "test_uses_a_wide_fixture": 24,
        "test_uses_it_too": 26,
    }
    for sentence in (
        "leaked: 3.00 MiB still allocated after the test, max_leak_mib=1",
        "part large: over budget: peak reserved of 55.00 MiB is 44.76 MiB over max_gib=0.01",
        "batch size 8 does not fit on Stand-in 1000 (1024.00 MiB): it asked for 1000.00 MiB more",
        "when 100.00 MiB were allocated",
        "standin does not tell what was allocated when it refused the request: the figures are",
        "leaked: allocated memory grew by 2.00 MiB in each of the last 3 of 6 steps",
        "standin does not list its blocks: if the test freed some of the 6.00 MiB that",
    ):
        assert sentence in session.flat
    assert "garbage in reference cycles" not in session.flat  # the second run collected it


def test_an_error_without_a_class_of_its_own_is_out_of_memory_too(accelerated, monkeypatch):
    """MPS's is a RuntimeError."""
    monkeypatch.setenv("STANDIN_LACKS", "class")
    session = run(accelerated, source=SHORT)
    assert session.outcomes == {"passed": 1, "failed": 4}, session.out
    assert session.verdicts() == {
        "test_does_not_fit": "out of memory",
        "test_has_two_devices": "out of memory",
        "test_turns_it_into_another_error": "out of memory",
        "test_searches": "no baseline",
    }
    for sentence in (
        "batch size 8 does not fit on Stand-in 1000 (1024.00 MiB): it asked for 1000.00 MiB more",
        "the test turned the out-of-memory error into ValueError: too much",
        "note: standin does not tell which device refused: it may be another",
    ):
        assert sentence in session.flat


MPS_ERROR = (
    "MPS backend out of memory (MPS allocated: 9.00 GiB, other allocations: 464.00 KiB, max "
    "allowed: 9.32 GiB). Tried to allocate 1024.00 MiB on private pool."
)


@pytest.mark.parametrize(
    ("device_type", "text", "requested"),
    [
        ("mps", MPS_ERROR, 1 << 30),
        ("npu", "NPU out of memory. Tried to allocate 2.00 MiB (NPU 0; 1 GiB total)", 2 << 20),
        ("openreg", "Failed to allocate 4096 bytes on openreg device 0. Allocated: 0 bytes", 4096),
    ],
)
def test_an_error_that_names_the_device_is_known_by_its_text(device_type, text, requested):
    backend = AcceleratorBackend(device_type)
    assert backend.is_out_of_memory(RuntimeError(text))
    assert OutOfMemoryWatch().last(RuntimeError(text)).requested == requested
    assert not AcceleratorBackend("xpu").is_out_of_memory(RuntimeError(text))
    assert not backend.is_out_of_memory(ValueError(text))
    assert not backend.is_out_of_memory(RuntimeError("DataLoader worker is out of memory"))
    assert not backend.is_out_of_memory(None)


def test_what_it_cannot_do_is_refused_by_name(accelerated):
    session = run(accelerated, source=REFUSED)
    assert session.outcomes == {"errors": 4, "failed": 1}
    for sentence in (
        "devices=3: this machine shows 2 standin devices; request fewer devices",
        "card='T4': this is a CUDA GPU, and the test runs on standin; leave card out",
        "world_size=8: one rank alone needs NCCL, and the test runs on standin; start all ranks",
        "does not report how much host memory is pinned for standin",
        "DeviceError: max_pinned_gib=2",
    ):
        assert sentence in session.flat, session.out


def test_workers_of_xdist_have_the_figures_of_one_process(accelerated):
    run(accelerated, "--gpumem-update-baselines", source=README.format(width=256))
    session = run(accelerated, "-n2", "--dist=each")
    assert session.outcomes == {"passed": 2}
    assert session.table["test_step"]["verdict"] == "ok"


def test_baselines_of_cuda_are_not_compared(accelerated):
    run(accelerated, "--gpumem-update-baselines", source=README.format(width=256))
    folder = accelerated.path / "baselines"
    path = folder / "standin-Stand-in-1000" / "test_it.json"
    text = path.read_text().replace("standin-Stand-in-1000", "cuda-Stand-in-1000")
    path.unlink()
    (folder / "cuda-Stand-in-1000").mkdir()
    (folder / "cuda-Stand-in-1000" / "test_it.json").write_text(text)
    session = run(accelerated)
    assert session.outcomes == {"passed": 1}
    assert session.table["test_step"]["verdict"] == "incomparable"
    assert "baselines: 0 of 1 compared, 1 recorded on cuda-Stand-in-1000 only" in session.out


def test_a_comparison_with_a_cuda_gpus_baselines_is_refused(accelerated):
    """Its memory, and its library's, are another's."""
    session = run(accelerated, "--gpumem-against=virtual:L4", source=README.format(width=256))
    assert session.outcomes == {"errors": 1}
    assert (
        "--gpumem-against=virtual-L4: this is a CUDA GPU, and the test runs on standin; leave the "
        "option out"
    ) in session.flat


def test_only_what_is_known_of_its_own_type_skips_a_test_as_too_large(accelerated, monkeypatch):
    skip, source = "--gpumem-skip-too-large", README.format(width=256)
    run(accelerated, "--gpumem-update-baselines", source=source)
    (path,) = accelerated.path.glob("baselines/*/test_it.json")
    larger = re.sub(r'("peak_reserved": )\[\d+\]', r"\g<1>[9000000000]", path.read_text())
    for kind, outcome in {"virtual": "passed", "standin": "skipped"}.items():
        (folder := accelerated.path / "baselines" / f"{kind}-Larger").mkdir()
        path.rename(folder / path.name)
        path = folder / path.name
        path.write_text(larger.replace("standin-Stand-in-1000", f"{kind}-Larger"))
        assert run(accelerated, skip).outcomes == {outcome: 1}
    monkeypatch.setenv("STANDIN_LACKS", "info")  # how much memory it has
    assert run(accelerated, skip).outcomes == {"passed": 1}


SEARCHED = """
@pytest.mark.gpu_memory(max_gib=0.1)
def test_searches_below_a_limit(gpu_memory):
    largest = gpu_memory.largest(lambda size: mib(10 * size, gpu_memory.device))
    assert largest.value == 10
"""


def test_a_search_compares_with_the_limit_that_nothing_holds_a_step_to(accelerated):
    assert run(accelerated, source=SEARCHED).outcomes == {"passed": 1}


def test_a_block_of_a_program_is_measured(standin):
    code = """
        import sys
        sys.path.insert(0, sys.argv[1])
        import standin, torch
        import pytest_gpumem

        with pytest_gpumem.measure() as measured:
            torch.empty(30 << 20, dtype=torch.uint8, device="standin")
        print(measured.peak_allocated >> 20, measured.measurement.device.key)
    """
    assert child(code, card=None, warm=True, args=[str(standin)]) == "30 standin-Stand-in-1000\n"


@pytest.fixture
def imported(standin, monkeypatch):
    """New interpreters in which torch imports the stand-in, as it does a package."""
    paths = [str(standin), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


GPUMEM_RUN = (sys.executable, "-m", "pytest_gpumem", "run", "--device=accelerator")
PROGRAM = """
import subprocess, sys, torch
torch.empty(40 << 20, dtype=torch.uint8, device="standin")
if not sys.argv[1:]:
    subprocess.run([sys.executable, __file__, "child"], check=True)
"""


def test_a_whole_program_is_measured_with_the_processes_that_it_starts(
    suite, imported, monkeypatch
):
    monkeypatch.setenv("STANDIN_LACKS", "info")
    path = suite.write("program.py", PROGRAM)
    done = suite.pytester.run(*GPUMEM_RUN, "--phases", str(path))
    assert done.ret == 0
    text = done.stderr.str()
    assert "gpumem (load): ok: 40.00 MiB allocated" in text
    assert re.search(r"^program +standin:0 +40.00 MiB +40.00 MiB$", text, re.MULTILINE), text
    assert re.search(
        r"^program.py \(pid \d+\) +standin:0 +40.00 MiB +40.00 MiB$", text, re.MULTILINE
    )
    assert "of 0 B" not in text  # how much memory there is is unknown


SIZED = """
import sys, torch
torch.empty(int(sys.argv[-1]) << 20, dtype=torch.uint8, device="standin")
"""


def test_the_largest_argument_is_that_of_the_devices_own_memory(suite, imported, monkeypatch):
    """Not of the card that a virtual GPU would have."""
    path = suite.write("program.py", SIZED)
    command = (*GPUMEM_RUN, "--largest=--size:1000..1025", str(path))
    done = suite.pytester.run(*command)
    assert "--size 1024 fits in 1024.00 MiB with 1024.00 MiB reserved; 1025" in done.stdout.str()
    monkeypatch.setenv("STANDIN_LACKS", "info")
    text = suite.pytester.run(*command).stderr.str()
    assert "--largest: Stand-in 1000 does not report how much memory it has; declare a li" in text


LINES = """
def of_the_model(width):
    return torch.nn.Linear(1024, width, bias=False, device="standin")

kept = []

@pytest.mark.gpu_memory(max_leak_mib=1)
def test_leaks():
    kept.append(torch.ones(1024, 1024, device="standin"))

@pytest.mark.gpu_memory
def test_step():
    layer = of_the_model({width})
    samples = torch.ones(64, 1024, device="standin")
    layer(samples).sum().backward()

@pytest.mark.gpu_memory(max_gib=0.02)
def test_larger():
    layer = of_the_model(8192)
"""


def test_where_the_backend_records_a_history_a_failure_names_its_lines(accelerated, monkeypatch):
    """XPU does, as its memory module has the functions; the stand-in has their Python names."""
    monkeypatch.setenv("STANDIN_HISTORY", "1")
    run(accelerated, "--gpumem-update-baselines", source=LINES.format(width=1024))
    session = run(accelerated, source=LINES.format(width=4096))
    assert session.outcomes == {"passed": 1, "failed": 2, "errors": 1}, session.out
    for sentence in (
        "regressed: parameters +12.00 MiB at test_it.py:7 (of_the_model)",
        "32.00 MiB parameters test_it.py:7 in of_the_model: return torch.nn.Linear(",
    ):
        assert sentence in session.flat, session.out


def test_a_second_run_that_fails_is_noted_as_well(accelerated, monkeypatch):
    """Else another run could follow it, to find more."""
    monkeypatch.setenv("STANDIN_HISTORY", "1")
    source = """
RUNS = []

@pytest.mark.gpu_memory(max_allocated_gib=0.001)
def test_fails_again():
    kept = torch.ones(1 << 20, device="standin")
    RUNS.append(1)
    assert len(RUNS) == 1
"""
    session = run(accelerated, source=source)
    assert session.outcomes == {"failed": 1}
    assert "note: the test failed, and ran a second time to find" in session.flat, session.out


# ---- what it finds out about a backend ----


def test_what_a_backend_lacks_is_said_by_name(standin):
    """Of each: the sentences before the first test, or the refusal."""
    code = """
        import os, sys
        sys.path.insert(0, sys.argv[1])
        import standin, torch
        from pytest_gpumem.devices.accelerator import AcceleratorDevice
        from pytest_gpumem.errors import DeviceError

        for lacking in ("", "reserved info", "allocated", "peak", "devices"):
            os.environ["STANDIN_LACKS"] = lacking
            device = AcceleratorDevice()
            try:
                info = device.open(None, 1)
                print(lacking, [info.key, info.total_memory, *device.describe()], sep="|")
            except DeviceError as error:
                print(lacking, error, sep="|")
            device.close()
        del os.environ["STANDIN_LACKS"]
        torch.cuda.is_available = lambda: True
        device = AcceleratorDevice()
        device.open(None, 1)
        print("two accelerators", device.describe()[-1], sep="|")
    """
    lines = child(code, card=None, warm=True, args=[str(standin)]).splitlines()
    told = dict(line.split("|", 1) for line in lines)
    limits = [
        "standin device Stand-in 1000",
        "standin records no history: a failure names no lines",
        "standin is not limited: max_gib is compared after the test",
    ]
    more = [
        "standin counts no reserved memory: allocated memory stands for it",
        "standin does not report how much memory it has",
    ]
    remedy = "install a release of the backend that does, or write --gpumem-device=none"
    assert told == {
        "": str(["standin-Stand-in-1000", 1 << 30, *limits]),
        "reserved info": str(["standin-Stand-in-1000", 0, *limits, *more]),
        "allocated": f"the standin device: its allocator counts no allocated memory; {remedy}",
        "peak": f"the standin device: its allocator counts no peak; {remedy}",
        "devices": "--gpumem-device=accelerator: standin is registered and shows no device; look "
        "whether its driver works here",
        "two accelerators": "memory on cuda, which this torch has too, is not counted",
    }


def test_an_allocator_without_statistics_is_refused(standin):
    code = """
        import sys
        sys.path.insert(0, sys.argv[1])
        import standin
        from pytest_gpumem.devices.accelerator import AcceleratorDevice

        AcceleratorDevice().open(None, 1)
    """
    done = run_python(code, str(standin), warm=True, STANDIN_LACKS="statistics")
    assert "the standin device: its allocator has no statistics (" in done.stderr
    assert "whose allocator is a c10::DeviceAllocator" in done.stderr


def test_mps_of_an_older_torch_is_refused_with_the_version_that_has_its_figures(standin):
    """The stand-in has its name in the sentences."""
    code = """
        import sys
        sys.path.insert(0, sys.argv[1])
        import standin
        from pytest_gpumem.devices.accelerator import AcceleratorBackend
        from pytest_gpumem.errors import DeviceError
        from pytest_gpumem.recording.allocator_view import VIEW

        VIEW.backend = backend = AcceleratorBackend("standin")
        backend.title = "mps"
        try:
            backend.prove(0)
        except DeviceError as error:
            print(error)
    """
    told = run_python(code, str(standin), warm=True, STANDIN_LACKS="statistics").stdout
    assert "the mps device: its allocator has no statistics (" in told
    assert told.endswith("); install torch 2.13 or newer, the first with those of MPS\n")
    told = run_python(code, str(standin), warm=True, STANDIN_LACKS="peak").stdout
    assert told == (
        "the mps device: its allocator counts no peak; install a newer torch that does, or write "
        "--gpumem-device=none\n"
    )


def test_without_an_accelerator_it_says_what_to_do():
    code = """
        from pytest_gpumem.devices.accelerator import AcceleratorDevice
        AcceleratorDevice().open(None, 1)
    """
    done = run_python(code, warm=True)
    assert "the accelerator of this torch is CUDA; write --gpumem-device=cuda" in done.stderr


# ---- which device a session has ----


def test_an_allocator_that_counts_no_requested_bytes_is_measured_by_allocated_ones(
    accelerated, monkeypatch
):
    """As PyTorch's own reference backend, torch_openreg: growth is that of allocated bytes."""
    monkeypatch.setenv("STANDIN_LACKS", "requested")
    session = run(accelerated, "-k", "grows or parts", source=SEVERAL)
    assert "allocated memory grew by 2.00 MiB in each of the last 3 of 6 steps" in session.flat
    assert session.table["test_has_parts"]["allocated"] == "50.00"


@pytest.fixture
def expected(monkeypatch):
    """A machine on which torch may have an accelerator, and another process finds one."""
    monkeypatch.setattr(select, "accelerator_expected", lambda: True)
    monkeypatch.setattr(select, "query_accelerator", lambda: FOUND)
    monkeypatch.setattr(select, "real_gpu_expected", lambda: False)


def test_auto_takes_cuda_before_another_accelerator_before_the_virtual_gpu(expected, monkeypatch):
    card = CARDS["T4"]
    device = choose("auto", card).device
    assert isinstance(device, AcceleratorDevice)
    assert device.describe() == ["xpu device Intel Arc", "xpu records no history"]
    monkeypatch.setattr(
        select, "query_accelerator", lambda: "mps is registered and shows no device"
    )
    assert choose("auto", card).device.option == "virtual"
    monkeypatch.setattr(select, "real_gpu_expected", lambda: True)
    assert isinstance(choose("auto", card).device, CudaDevice)
    assert isinstance(choose("accelerator", card).device, AcceleratorDevice)


@pytest.fixture
def expects(monkeypatch, tmp_path):
    """Tell whether a machine of this kind may have an accelerator."""

    def expects(platform, packages=(), xpu=None, dri=tmp_path):
        monkeypatch.setattr(accelerator, "DRI", dri)
        monkeypatch.setattr(accelerator.sys, "platform", platform)
        monkeypatch.setattr(accelerator, "entry_points", lambda group: packages)
        build = TorchBuild("2.15.0", None, xpu=xpu)
        monkeypatch.setattr(accelerator, "installed_torch", lambda: build)
        return accelerator_expected()

    return expects


def test_torch_is_imported_to_ask_only_where_it_may_have_an_accelerator(expects, tmp_path):
    assert expects("darwin")
    assert not expects("win32")
    assert expects("win32", xpu="20250301")
    assert not expects("linux")
    assert expects("linux", xpu="20250301")
    assert not expects("linux", xpu="20250301", dri=tmp_path / "missing")


def test_a_package_that_torch_imports_by_itself_is_expected(expects, monkeypatch):
    assert expects("linux", ["torch_npu"])
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert not expects("linux", ["torch_npu"])


def test_a_session_finds_the_accelerator_and_says_what_it_is(suite, imported):
    session = suite.run_apart(source=README.format(width=256))
    assert session.outcomes == {"passed": 1}
    assert "gpumem: standin device Stand-in 1000" in session.out
    assert session.out.count("standin is not limited: max_gib is compared after the test") == 1
    assert "Peak memory in MiB on standin-Stand-in-1000" in session.out


# ---- processes that a test starts ----

WORKER = """
import os, sys
import torch
sys.path.insert(0, os.environ["STANDIN_FOLDER"])
import standin

def work():
    torch.empty(60 << 20, dtype=torch.uint8, device="standin")
"""
STARTER = """
import multiprocessing, os, subprocess
import worker

CODE = '''
import os, signal, sys
import torch
sys.path.insert(0, os.environ["STANDIN_FOLDER"])
import standin
torch.empty(40 << 20, dtype=torch.uint8, device="standin:1")
torch.accelerator.reset_peak_memory_stats(1)
if sys.argv[1:]:
    os.kill(os.getpid(), signal.SIGKILL)
'''

PYTHON = os.environ["NEW_PYTHON"]  # this session's has torch in memory

def start(*words):
    subprocess.run([PYTHON, "-c", CODE, *words], check=not words)

@pytest.mark.gpu_memory(max_gib=0.03, devices=2)
def test_starts_one():
    start()

@pytest.mark.gpu_memory(devices=2)
def test_starts_one_without_a_limit():
    start()

@pytest.mark.gpu_memory
def test_starts_one_that_is_killed(gpu_memory):
    mib(3, gpu_memory.device)
    start("killed")

@pytest.mark.gpu_memory
def test_starts_one_by_multiprocessing():
    context = multiprocessing.get_context("forkserver")  # ends without atexit
    context.set_executable(PYTHON)
    process = context.Process(target=worker.work)
    process.start()
    process.join()

@pytest.mark.gpu_memory
def test_starts_one_without_the_accelerator(gpu_memory):
    mib(3, gpu_memory.device)
    subprocess.run([PYTHON, "-c", "import torch"], check=True)
"""


def test_processes_that_a_test_starts_are_measured(accelerated, standin, monkeypatch):
    monkeypatch.setenv("STANDIN_FOLDER", str(standin))
    monkeypatch.setenv("STANDIN_LACKS", "info")
    monkeypatch.setenv("NEW_PYTHON", sys.executable)
    accelerated.write("worker.py", WORKER)
    session = run(accelerated, "-v", source=STARTER)
    assert session.outcomes == {"passed": 4, "failed": 1}, session.out
    assert (
        "part child processes: over budget: peak reserved of 40.00 MiB is 9.28 MiB over "
        "max_gib=0.03"
    ) in session.flat
    assert session.figures() == {
        "test_starts_one": (0, 0),
        "test_starts_one (child processes)": (40, 40),
        "test_starts_one_without_a_limit": (0, 0),
        "test_starts_one_without_a_limit (child processes)": (40, 40),
        "test_starts_one_that_is_killed": (3, 3),
        "test_starts_one_by_multiprocessing": (0, 0),
        "test_starts_one_by_multiprocessing (child processes)": (60, 60),
        "test_starts_one_without_the_accelerator": (3, 3),
    }
    assert "1 child process may have used the GPU and reported no peak: a process" in session.flat
    assert session.flat.count("may have used the GPU") == 1
    assert "the limit is 0 B" not in session.flat  # how much memory there is is unknown
