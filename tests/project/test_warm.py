"""The tests' own tools: the warm process and its forks, and the hidden objects."""

import gc
import os
import select
import signal
import socket
import subprocess
import sys
import weakref
from pathlib import Path
from types import ModuleType, SimpleNamespace

import _pytest.fixtures
import pluggy
import pytest
from helpers import warm_server
from helpers.hidden_heap import hide_objects
from helpers.paths import TESTS
from helpers.warm import HANGS, warm_python

KIND = "import sys; print('fork' if 'torch' in sys.modules else 'new', *sys.argv[1:])"


def run(*arguments, **environment):
    """Run the warm interpreter to its end."""
    return subprocess.run(
        [warm_python(), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )


@pytest.fixture(autouse=True)
def possible(virtual_gpu):
    """Skips where the warm process has no virtual GPU."""


def test_a_fork_has_torch_its_callers_arguments_and_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("-c", KIND, "a", "b c").stdout == "fork a b c\n"
    (tmp_path / "program.py").write_text(f"{KIND}\nimport os; print(os.getcwd(), __file__)\n")
    assert run("-u", "program.py").stdout == f"fork\n{tmp_path} program.py\n"
    assert run("-m", "program", "x").stdout.startswith(f"fork x\n{tmp_path}")


@pytest.mark.parametrize("options", [["-X", "dev"], ["-I"], ["-W", "error"]])
def test_other_options_take_a_new_interpreter(options):
    assert run(*options, "-c", KIND).stdout == "new\n"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LD_BIND_NOW", ""),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),
        ("PYTHONUNBUFFERED", ""),
        ("TORCHINDUCTOR_MAX_AUTOTUNE", ""),
    ],
)
def test_variables_that_are_read_at_load_take_a_new_interpreter(name, value):
    assert run("-c", KIND, **{name: value}).stdout == "new\n"


def test_a_fork_has_the_allocator_with_its_callers_settings():
    """PyTorch reads them as CUDA is initialised, which the warm process never does."""
    code = (
        "import pytest_gpumem; pytest_gpumem.use_virtual_gpu(); import torch\n"
        "blocks = [torch.empty(size << 20, dtype=torch.uint8, device='cuda') for size in (30, 50)]"
        "\nprint(torch.cuda.memory_reserved() >> 20, len(torch.cuda.memory_snapshot()))"
    )
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert run("-c", f"{KIND}\n{code}", **settings).stdout == "fork\n80 1\n"


def test_a_fork_compiles_with_the_folders_and_threads_that_its_caller_says():
    code = "from torch._inductor.config import compile_threads; print(compile_threads)"
    folders = {"TORCHINDUCTOR_CACHE_DIR": "/nowhere", "TRITON_CACHE_DIR": "/nowhere"}
    done = run("-c", f"{KIND}\n{code}", **folders, TORCHINDUCTOR_COMPILE_THREADS="3")
    assert done.stdout == "fork\n3\n"


def test_a_fork_has_inductor_and_the_registered_operators():
    """Each process that imports the one takes a second, and a fifth to register the others."""
    code = (
        "import sys; print('torch._inductor.compile_fx' in sys.modules)\n"
        "from pytest_gpumem.devices.virtual.values.interception import Interception\n"
        "print(bool(Interception._registered), Interception.run)"
    )
    assert run("-c", code).stdout == "True\nTrue None\n"


def test_a_fork_has_the_hash_of_pytorchs_sources():
    """Inductor asks for it as it compiles, which takes each process that has to read them 0.3 s."""
    code = (
        "import builtins; builtins.open = None\n"
        "from torch._inductor.codecache import torch_key; print(len(torch_key()))"
    )
    assert run("-c", code).stdout == "32\n"


def test_a_fork_has_its_callers_environment_and_no_other(monkeypatch):
    monkeypatch.setenv("WARM_TEST", "1")
    code = "import os; print(os.environ['WARM_TEST'], os.environ.get('OPENBLAS_NUM_THREADS'))"
    assert run("-c", code).stdout == "1 None\n"


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("pass", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("import sys; sys.exit('a reason')", 1, "a reason\n"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import os; os.abort()", -6, ""),
    ],
)
def test_it_ends_as_its_fork_does(code, status, error):
    done = run("-c", code)
    assert (done.returncode, done.stderr) == (status, error)


def test_an_error_is_shown_without_frames_of_the_server():
    done = run("-c", "def f(): raise LookupError('mine')\nf()")
    assert done.returncode == 1
    assert done.stderr.startswith('Traceback (most recent call last):\n  File "<string>", line 2')
    assert done.stderr.endswith("LookupError: mine\n")


def test_signals_reach_the_fork_and_its_end_ends_it():
    # A handler would not be run where the signal came just before a call that waits (time.sleep).
    code = (
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
        "print('ready', flush=True); signal.sigwait({signal.SIGTERM}); exit(7)"
    )
    with subprocess.Popen([warm_python(), "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 7
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
    with subprocess.Popen(
        [warm_python(), "-c", code], stdout=subprocess.PIPE, text=True
    ) as process:
        fork = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
    assert select.select([fork], [], [], HANGS)[0]  # readable when that process has ended
    os.close(fork)


def test_processes_that_a_fork_starts_are_forks_as_well():
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {KIND!r}])"
    assert run("-c", code).stdout == "fork\n"


@pytest.mark.parametrize("data", [b"", b"\0" * 3, b"\0" * 7 + b"\x09a"])
def test_a_client_that_ends_before_it_has_asked_ends_nothing_else(data):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(Path(warm_python()).parent / "socket"))
        connection.sendall(data)
    assert run("-c", KIND).stdout == "fork\n"


def test_a_client_that_is_gone_ends_its_process_and_no_other():
    server = object.__new__(warm_server.Server)
    forgotten = []
    server.forget = forgotten.append
    ended, hanging = (subprocess.Popen(["sleep", seconds]) for seconds in ("0", "900"))
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # it waits to be reaped
    server.processes = {"its": ended.pid, "gone": hanging.pid}
    server.hang_up("gone")
    assert forgotten == ["gone"]
    assert os.waitpid(ended.pid, os.WNOHANG)[0] == ended.pid
    server.hang_up("gone")  # told of in the same round as its end
    assert server.processes == {"its": ended.pid}
    ended.returncode = hanging.returncode = 0  # both are reaped


def protocol_around(request, nextitem=None):
    """The conftest file's part around a test, at its middle."""
    plugin = request.config.pluginmanager.get_plugin(str(TESTS / "conftest.py"))
    protocol = plugin.pytest_runtest_protocol(request.node, nextitem)
    next(protocol)
    return protocol


def test_each_test_gives_environment_and_threshold_back_as_they_were(request, monkeypatch):
    """Inductor sets a variable for good, with which no fork would do; mypy sets the threshold."""
    monkeypatch.setenv("WARM_TEST", "1")
    threshold = gc.get_threshold()
    protocol = protocol_around(request)
    os.environ["TRITON_CACHE_DIR"] = "/nowhere"
    del os.environ["WARM_TEST"]
    gc.set_threshold(200_000, 30, 30)
    with pytest.raises(StopIteration):
        protocol.send(None)
    assert "TRITON_CACHE_DIR" not in os.environ
    assert os.environ["WARM_TEST"] == "1"
    assert gc.get_threshold() == threshold


def test_objects_of_libraries_that_tests_import_are_hidden_between_files(request, torch):
    if not hide_objects():
        pytest.skip("not of this Python")
    imported = [[] for _ in range(70_000)]
    for path, hidden in ((request.path, False), (Path("test_other.py"), True)):
        protocol = protocol_around(request, SimpleNamespace(path=path))
        with pytest.raises(StopIteration):
            protocol.send(None)
        assert (len(gc.get_objects()) < len(imported)) is hidden


def test_the_files_that_a_run_begins_with_are_there(request):
    names = request.config.pluginmanager.get_plugin(str(TESTS / "conftest.py")).LONGEST
    assert [name for name in names if not (TESTS / name).is_file()] == []
    assert len(set(names)) == len(names)


def test_hidden_objects_cost_no_collection_and_others_are_collected():
    if not hide_objects():
        pytest.skip("not of this Python")
    assert len(gc.get_objects()) < 10_000
    assert sys.modules not in gc.get_objects()

    class Node:
        pass

    node = Node()
    node.self = node
    reference = weakref.ref(node)
    gc.freeze()
    del node
    gc.collect()
    assert reference() is not None
    gc.unfreeze()
    gc.collect()
    assert reference() is None
    assert gc.get_freeze_count() == 0


def test_what_pytest_finds_in_installed_plugins_is_what_it_would_find(request):
    find_hooks, find_fixtures = pluggy._manager.dir, _pytest.fixtures.dir
    plugins = [plugin for _, plugin in request.config.pluginmanager.list_name_plugin()]
    modules = [it for it in plugins if isinstance(it, ModuleType) and it.__name__ != "conftest"]
    assert len(modules) > 30
    for module in modules:
        is_installed = module.__file__.startswith(sys.prefix)
        hooks = [name for name in dir(module) if name.startswith("pytest_")]
        assert find_hooks(module) == (hooks if is_installed else dir(module))
        fixtures = {
            name
            for name in dir(module)
            if "FixtureFunctionDefinition" in repr(type(vars(module).get(name)))
        }
        assert fixtures <= set(find_fixtures(module))


def test_a_module_of_another_folder_is_looked_through_each_time(tmp_path):
    module = ModuleType("plugin")
    module.__file__ = str(tmp_path / "plugin.py")
    for name in ("pytest_configure", "pytest_unconfigure"):
        setattr(module, name, lambda: None)
        assert name in pluggy._manager.dir(module)
    module.__file__ = str(Path(sys.prefix, "plugin.py"))
    assert pluggy._manager.dir(module) == ["pytest_configure", "pytest_unconfigure"]
    module.pytest_sessionstart = lambda: None
    assert "pytest_sessionstart" not in pluggy._manager.dir(module)
