"""A marked test reads of PyTorch's allocator what the same program reads without the plugin."""

import functools
import importlib
import inspect
import json
import os
import re

import pytest
from helpers.left_out import need_libraries
from helpers.sources import program
from helpers.torch_features import require_release
from helpers.virtual_gpu import MIB, highest, run_python, tensor, virtual_card, virtual_device

from pytest_gpumem.devices.cards import CARDS
from pytest_gpumem.devices.virtual.inherited import INHERITED, LIBRARIES, PRELOAD
from pytest_gpumem.recording.allocator_view import VIEW

PROGRAM = program("allocator_figures.py")

MARKED = """
import json, pytest, program

@pytest.mark.gpu_memory(card="T4", max_gib=12)
def test_alone():
    json.dump(program.steps(), open("alone.json", "w"))

@pytest.mark.gpu_memory(card="T4")
def test_leaves():
    program.leave()

@pytest.mark.gpu_memory(card="T4", max_gib=12)
def test_beside():
    json.dump(program.steps(), open("beside.json", "w"))
"""


THREE_STEPS = """
import torch

def peak():
    torch.cuda.reset_peak_memory_stats()
    with torch.device("cuda"):
        net = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(8)])
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(3):
        net(torch.zeros(8192, 4096, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated()
"""
WITHOUT_PLUGIN = """
import gc, json, os, pathlib, torch, torch._dynamo, program, three_steps

def steps(leave):
    if leave:
        program.leave()
    gc.collect()
    torch.cuda.empty_cache()
    return program.steps()

READINGS = {
    "alone": lambda: steps(False), "beside": lambda: steps(True), "three": three_steps.peak
}
for name, read in READINGS.items():
    process = os.fork()  # each uses CUDA first
    if not process:
        pathlib.Path(f"{name}.json").write_text(json.dumps(read()))
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0
"""


@pytest.fixture(scope="module")
def without_plugin(tmp_path_factory):
    """What programs read on a T4 that only the native library knows of, by their names."""
    need_libraries()  # to import torch without the plugin
    device = virtual_device()
    device.library.set_card(CARDS["T4"])
    try:
        description = device.library.describe(1)
    finally:
        device.library.set_card(device.card)
    folder = tmp_path_factory.mktemp("without")
    (folder / "program.py").write_text(PROGRAM, encoding="utf-8")
    (folder / "three_steps.py").write_text(THREE_STEPS, encoding="utf-8")
    process = run_python(
        f"import os; os.chdir({str(folder)!r})\n{WITHOUT_PLUGIN}",
        PYTHONPATH=os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
        **{PRELOAD: LIBRARIES, INHERITED: description},
    )
    assert process.returncode == 0, process.stderr
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def differences(expected, actual, path=""):
    """Yield each figure that is another one."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        for key in sorted({*expected, *actual}):
            yield from differences(expected.get(key), actual.get(key), f"{path}/{key}")
    elif isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        for index, pair in enumerate(zip(expected, actual, strict=True)):
            yield from differences(*pair, f"{path}/{index}")
    elif expected != actual:
        yield f"{path}: {expected!r:.200} here {actual!r:.200}"


@pytest.mark.parametrize("name", ["alone", "beside"])
def test_a_marked_test_reads_what_the_program_reads_without_the_plugin(suite, without_plugin, name):
    """Of every function; all of tensors' memory where earlier tests left some as well."""
    suite.write("program.py", PROGRAM)
    suite.write("test_marked.py", "import pytest\n" + MARKED)
    chosen = ["test_marked.py::test_alone"]
    if name == "beside":
        chosen = ["test_marked.py::test_leaves", "test_marked.py::test_beside"]
    session = suite.run_warm("-p", "no:randomly", *chosen)
    assert session.ret == 0, session.out
    actual = json.loads((suite.path / f"{name}.json").read_text())
    expected = without_plugin[name]
    assert expected[0]["torch.cuda.memory.max_memory_allocated"] > 1200 * MIB
    names = list(differences(expected, actual))
    if name == "beside":  # the step has segments of its own, so that these are others
        names = [line for line in names if not SEGMENTS.search(line)]
    assert names == []


SEGMENTS = re.compile(
    "napshot|summary|reserved|cached|segment|inactive_split|num_device|mem_get_info|memory_info|/events"
)


def test_three_steps_of_sgd_read_as_without_the_plugin(suite, without_plugin):
    """Their peak lies between two steps of the optimizer, at which the meter resets the peaks."""
    suite.write("three_steps.py", THREE_STEPS)
    expected = without_plugin["three"]  # each torch has other workspaces of cuBLAS
    assert expected > 1800 * MIB
    session = suite.run(
        source=f"""
        import three_steps

        @pytest.mark.gpu_memory(card="T4")
        def test_steps():
            assert three_steps.peak() == {expected}
        """
    )
    assert session.outcomes == {"passed": 1}, session.out


def test_a_fraction_in_the_allocators_settings_is_of_the_cards_memory(suite):
    require_release(2, 12, "the setting throw_on_cudamalloc_oom")
    session = suite.run(
        source="""
        from pytest_gpumem.meter.allocator import expandable_segments

        @pytest.mark.gpu_memory(card="T4")
        def test_settings():
            settings = "throw_on_cudamalloc_oom:True,per_process_memory_fraction:0.05"
            torch._C._accelerator_setAllocatorSettings(settings)
            assert torch._C._accelerator_getAllocatorSettings() == settings
            with expandable_segments():
                mib(1)  # the settings are read, and set again twice
            with pytest.raises(torch.OutOfMemoryError, match="per_process_memory_fraction"):
                mib(750)  # 5 % of 14,917 MiB are 745
            assert torch.cuda.memory_stats()["num_oom_rejections"] > 0
            mib(740)
            with pytest.raises(ValueError, match="per_process_memory_fraction is invalid"):
                torch._C._accelerator_setAllocatorSettings("per_process_memory_fraction:1.5")
            torch._C._accelerator_setAllocatorSettings(
                "throw_on_cudamalloc_oom:False,per_process_memory_fraction:1.0"
            )
            mib(750)
        """,
    )
    assert session.outcomes == {"passed": 1}, session.out


def test_a_fraction_of_the_tests_own_is_of_the_cards_memory_and_lifts_no_limit(suite):
    session = suite.run(
        "-v",
        source="""
        @pytest.mark.gpu_memory(card="T4")
        def test_small_fraction():
            torch.cuda.set_per_process_memory_fraction(0.05)
            with pytest.raises(torch.OutOfMemoryError):
                mib(1000)
            mib(700)
            assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(0.05)

        @pytest.mark.gpu_memory(card="T4")
        def test_next():
            assert torch.cuda.get_per_process_memory_fraction() == 1.0
            mib(1000)

        @pytest.mark.gpu_memory(card="T4", max_gib=0.5)
        def test_limited():
            torch.cuda.set_per_process_memory_fraction(1.0)
            mib(700)
        """,
    )
    assert session.outcomes == {"passed": 2, "failed": 1}, session.out
    assert session.verdicts()["test_limited"] == "out of memory"


def test_the_wrapped_bindings_are_installed_once(virtual_gpu):
    VIEW.install()
    binding = virtual_gpu._C._cuda_memoryStats
    VIEW.install()
    assert virtual_gpu._C._cuda_memoryStats is binding


HISTORY = """
LEFT = []

def test_leaves():
    LEFT.append(mib(70))

def events(frames=True):
    snapshot = torch.cuda.memory._snapshot()
    records = snapshot["device_traces"][0]
    records += [block for segment in snapshot["segments"] for block in segment["blocks"]]
    actions = [record["action"] for record in records if "action" in record]
    return actions, [record for record in records if record.get("frames")]

@pytest.mark.gpu_memory
@pytest.mark.parametrize("context", ["all", "alloc", "state", None])
def test_records(context):
    torch.cuda.memory._record_memory_history("all", context=context, stacks="all")
    LEFT.clear()
    kept = mib(3)
    mib(5)
    actions, framed = events()
    torch.cuda.memory._record_memory_history(None)
    assert actions.count("alloc") == 2, actions
    assert actions.count("free_completed") == 1, actions
    names = [frame["name"] for record in framed for frame in record["frames"]]
    if context is None:
        assert not framed
    elif context == "state":
        assert not any("action" in record for record in framed) and framed
    else:
        assert any("::" in name or "c10" in name for name in names), names
    lines = {
        record["action"]: [frame["line"] for frame in record["frames"] if frame["name"] == "mib"]
        for record in framed if "action" in record
    }
    if context == "all":
        assert not lines["free_completed"] and lines["alloc"]
"""


@pytest.mark.parametrize("options", [(), ("--gpumem-update-baselines", "--gpumem-html=page.html")])
def test_a_history_of_the_tests_own_has_what_it_asked_for(suite, options):
    """Beside a recording of the measurement's, and when an earlier test's memory is freed."""
    suite.write("test_it.py", HISTORY)
    options = ("-p", "no:randomly", "--gpumem-visible=session", "--gpumem-values=off", *options)
    session = suite.run(*options)
    assert session.outcomes.get("passed") == 5, session.out


def test_a_history_keeps_as_many_events_as_it_was_asked_for(suite):
    session = suite.run(
        "--gpumem-html=page.html",
        "--gpumem-update-baselines",
        source="""
        def recorded(*arguments, **options):
            torch.cuda.memory._record_memory_history(*arguments, **options)
            mib(1), mib(2)
            events = torch.cuda.memory._snapshot()["device_traces"][0]
            torch.cuda.memory._record_memory_history(None)
            return [event["action"] for event in events]

        @pytest.mark.gpu_memory
        def test_it():
            assert len(recorded("all", max_entries=3)) == 3
            assert len(recorded("state")) == 1
            assert "alloc" in recorded(True, trace_alloc_max_entries=1000)
            if torch.__version__ >= "2.10":
                assert "alloc" not in recorded("all", skip_actions=["alloc"])
        """,
    )
    assert session.outcomes == {"passed": 1}, session.out


def test_what_is_hidden_stays_so_after_an_error():
    with virtual_card():
        with pytest.raises(KeyError), VIEW.hidden([0]):
            tensor(50 * MIB)
            raise KeyError
        assert highest(0).allocated < 50 * MIB


OUTLIVED = """
import pytest, torch
LEFT = []

def mib(size):
    return torch.empty(size << 20, dtype=torch.uint8, device="cuda")

def events():
    found = torch.cuda.memory._snapshot()["device_traces"][0]
    sizes = [event["size"] >> 20 for event in found if event["action"] == "alloc"]
    return sizes, {event["action"] for event in found} & {"snapshot", "oom"}

def test_before():
    torch.cuda.memory._record_memory_history("all", context=None)
    LEFT.append([mib(3) for _ in range(2)])
    del LEFT[0][0]  # a gap, which the next measurement fills

@pytest.mark.gpu_memory
def test_recorded():
    kept = mib(5)
    assert events() == ([3, 3, 5], set())

def test_after():
    LEFT.append(mib(7))
    assert events() == ([3, 3, 5, 7], {"snapshot"})  # of the test before
    torch.cuda.memory._record_memory_history(None)
"""


def test_a_history_of_the_tests_own_goes_on_before_within_and_after_a_recording(suite):
    """PyTorch has one history: a recording that begins or ends drops its events."""
    suite.write("test_it.py", OUTLIVED)
    options = ("--gpumem-visible=session", "--gpumem-values=off", "--gpumem-html=page.html")
    session = suite.run("-p", "no:randomly", "--gpumem-update-baselines", *options)
    assert session.outcomes == {"passed": 3}, session.out


@pytest.mark.parametrize("values", ["off", "auto"])
def test_a_history_of_the_tests_own_has_no_frames_of_this_package(suite, values):
    """Operators whose values are computed are called through it."""
    suite.write(
        "test_it.py",
        """
        import pytest, torch

        @pytest.mark.gpu_memory
        def test_it():
            torch.cuda.memory._record_memory_history(stacks="python")
            x = torch.rand(311, 411, device="cuda")
            y = x * 2
            del x
            snapshot = torch.cuda.memory._snapshot()
            records = [*snapshot["device_traces"][0]]
            records += [block for one in snapshot["segments"] for block in one["blocks"]]
            framed = [one["frames"] for one in records if one.get("frames")]
            assert len(framed) > 3
            assert all(frames[0]["name"] == "test_it" for frames in framed)
            assert not [one for frames in framed for one in frames
                        if "/pytest_gpumem/" in one["filename"]]
            torch.cuda.memory._record_memory_history(None)
        """,
    )
    session = suite.run(f"--gpumem-values={values}")
    assert session.outcomes.get("passed") == 1, session.out


SNAPSHOTS = """
import sys, threading
from pytest_gpumem import use_virtual_gpu

use_virtual_gpu("T4")
import torch
from pytest_gpumem.recording.allocator_view import VIEW

torch.cuda.memory._record_memory_history()
kept = torch.ones(4 << 20, device="cuda")
assert VIEW.snapshot()["device_traces"]
assert VIEW.segments()[0]["blocks"]
print([name for name in ("torch._inductor", "torch._dynamo", "sympy") if name in sys.modules])

inner = torch.cuda.memory._snapshot
def asking():
    threads = [threading.Thread(target=lambda: print(torch._inductor.__name__))]
    print(hasattr(torch, "_inductor"))
    threads[0].start()
    threads[0].join()
    return inner()
torch.cuda.memory._snapshot = asking
VIEW.snapshot()
print(hasattr(torch, "_inductor"), sorted(torch._lazy_modules))
"""


def test_a_snapshot_imports_no_compiler():
    """PyTorch's own imports Inductor, Dynamo and sympy; other threads find Inductor meanwhile."""
    done = run_python(SNAPSHOTS)
    assert done.stdout.splitlines()[:3] == ["[]", "False", "torch._inductor"], done.stderr
    assert done.stdout.splitlines()[3].startswith("True ['_dynamo', ")


def test_blocks_are_read_without_the_history(monkeypatch):
    """Making all its events takes long, and memory is settled often."""
    torch = virtual_device() and importlib.import_module("torch")
    real, calls = torch.cuda.memory_snapshot, []

    @functools.wraps(real)
    def noting(**options):
        calls.append(options)
        return real(**options)

    monkeypatch.setattr(torch.cuda, "memory_snapshot", noting)
    VIEW.segments()
    has_option = "include_traces" in inspect.signature(real).parameters
    assert calls == [{"include_traces": False} if has_option else {}]
