"""The warm process: has torch, pytest and its plugins in memory, and forks for each session.

warm.py starts this program: ``python warm_server.py FOLDER``. It writes the executable ``python``
into the folder, and prints its path. Running the executable is like running the interpreter
(warm_client.py has the exceptions), in a process that is forked from this one. The modules are
imported at the first run. This process ends when its standard input is closed.
"""

import atexit
import contextlib
import gc
import importlib
import importlib.machinery
import io
import multiprocessing.process
import os
import runpy
import select
import selectors
import signal
import socket
import struct
import sys
import threading
import types
import weakref
from pathlib import Path

from helpers import installed_packages, known_plugins
from helpers.hidden_heap import hide_objects

READ_AT_LOAD = (
    "LD_", "PYTHON", "GPUMEM_VIRTUAL", "PYTORCH_", "TORCH_LOGS", "TORCH_COMPILE", "CUDA_",
    "TRITON_", "TORCHINDUCTOR_", "COV", "LC_", "LANG", "MALLOC_", "GLIBC_",
)  # fmt: skip
"""prefixes of the variables that Python, torch or this package read while they are loaded"""
STARTED_WITH = {"OPENBLAS_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"}
"""variables that are 1 here, so that numpy's OpenBLAS and Inductor start no threads while they are
loaded; forks do not inherit the values"""

WARM_UP = """
import importlib
import pkgutil

import torch
import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed.run
import torch.utils.checkpoint
import torch.utils.data
import xdist.remote
import pytest_rerunfailures

import pytest_gpumem

for module in pkgutil.walk_packages(pytest_gpumem.__path__, "pytest_gpumem."):
    if ".native." not in module.name:
        importlib.import_module(module.name)
"""
"""a file for pytest to collect in this process: the plugin loads the virtual GPU and hides it"""


def warm_up(folder):
    """Import what sessions need, in a session that only collects a file."""
    import pytest

    (folder / "test_warm_up.py").write_text(WARM_UP, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    path, before = list(sys.path), Path.cwd()
    os.chdir(folder)
    # rerunfailures starts a thread; inner sessions do not load the other plugins either
    left_out = ("cacheprovider", "rerunfailures", "hypothesispytest", "randomly", "asyncio")
    options = [word for name in left_out for word in ("-p", f"no:{name}")]
    status = pytest.main(["--collect-only", "--gpumem-device=virtual", *options])
    os.chdir(before)
    sys.path[:] = path
    sys.modules.pop("test_warm_up", None)
    if status != pytest.ExitCode.NO_TESTS_COLLECTED or "torch" not in sys.modules:
        sys.exit(f"the warm-up session ended with {status!r}")
    # runpy asks the loader of a module for its code: pytest's has none to give.
    for spec in (getattr(module, "__spec__", None) for module in [*sys.modules.values()]):
        if type(getattr(spec, "loader", None)).__name__ == "AssertionRewritingHook":
            spec.loader = importlib.machinery.SourceFileLoader(spec.name, spec.origin)
    prepare_virtual_gpu()
    prepare_inductor()
    remember_driver()
    # else each collection in a fork traverses all of torch's objects, and thus copies their pages
    if not hide_objects():
        gc.collect()
        gc.freeze()
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        sys.exit(f"a fork of a process of {threads} threads may hang")


def remember_driver():
    """Query the driver for GPUs once; forks inherit the cached answer."""
    from helpers import known_driver  # imports this package, after the warm-up

    known_driver.ask_once()
    known_driver.select.visible_gpus()


def prepare_virtual_gpu():
    """Do once what would take each process about 0.1 s: register operators, skip finalizers.

    Forks that compute values use the operators registered here. Finalizers of torch.library remove
    torch's registrations at exit, which a process that ends by ``os._exit`` does not need.
    """
    from pytest_gpumem.devices.virtual.device import VirtualDevice
    from pytest_gpumem.devices.virtual.values.interception import Interception
    from pytest_gpumem.devices.virtual.values.mode import prepared_functions

    if VirtualDevice.loaded() is not None:
        prepared_functions(VirtualDevice.loaded().library)
        Interception.register()
    for finalizer, info in weakref.finalize._registry.items():
        if info.func.__module__ == "torch.library":
            finalizer.atexit = False


LATE_MODULES = (
    "sympy.tensor.tensor",
    "torch._inductor.codegen.cpp_wrapper_gpu",
    "torch._inductor.codegen.cuda_combined_scheduling",
    "torch._inductor.fx_passes.freezing_patterns",
    "torch._inductor.fx_passes.mkldnn_fusion",
    "torch._inductor.fx_passes.pad_mm",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
    "triton.compiler.code_generator",
)
"""modules that PyTorch imports while it compiles; each imports many others"""


def prepare_inductor():
    """Do once what would take each compiling process about 0.6 s: import modules, hash sources.

    Keys of Inductor's caches contain hashes of PyTorch's sources and of Triton's library.
    """
    from torch._inductor import codecache

    for name in ("torch_key", "triton_key"):
        if hasattr(codecache, name):  # older versions of torch have no function for Triton's
            getattr(codecache, name)()
    for name in LATE_MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


class Request:
    """A client's request for a process with these streams, arguments and environment."""

    def __init__(self, connection):
        data, self.streams, _, _ = socket.recv_fds(connection, 1 << 16, 3)
        while len(data) < 8 or len(data) < 8 + struct.unpack("!Q", data[:8])[0]:
            piece = connection.recv(1 << 16)
            if not piece:
                self.close_streams()
                raise ConnectionError("the client ended before it had said what it wants")
            data += piece
        folder, count, *words = map(os.fsdecode, data[8:].split(b"\0"))
        self.folder = folder
        self.arguments = words[: int(count)]
        self.environment = dict(word.split("=", 1) for word in words[int(count) :])

    def close_streams(self):
        for stream in self.streams:
            os.close(stream)


class Server:
    """Accepts clients, forks a process for each, and sends each its process's exit code."""

    def __init__(self, listener):
        self.processes = {}
        self.listener = listener
        self.selector = selectors.DefaultSelector()
        self.wake_up, self.waker = os.pipe()
        for descriptor in (self.wake_up, self.waker):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self.waker)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(0, selectors.EVENT_READ, self.end)
        self.selector.register(self.wake_up, selectors.EVENT_READ, self.reap)
        self.selector.register(self.listener, selectors.EVENT_READ, self.accept)

    def serve(self):
        """Serve clients; return only in forked processes, each with its request."""
        while True:
            for key, _ in self.selector.select():
                request = key.data(key.fileobj)
                if request is not None:
                    return request

    def end(self, _stream):
        """Kill all forked processes and exit, as the process that started this one has ended."""
        for process in self.processes.values():
            os.kill(process, signal.SIGKILL)
        os._exit(0)

    def reap(self, _pipe):
        """Send the exit codes of ended processes to their clients."""
        os.read(self.wake_up, 4096)
        for connection, process in list(self.processes.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                del self.processes[connection]
                self.tell(connection, os.waitstatus_to_exitcode(status))
                self.forget(connection)

    def hang_up(self, connection):
        """Kill the process of a client that has ended."""
        process = self.processes.pop(connection, None)
        if process is None:
            return  # the process has ended by itself, and was reaped
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        self.forget(connection)

    def forget(self, connection):
        self.selector.unregister(connection)
        connection.close()

    @staticmethod
    def tell(connection, number):
        """Send a number to a client, which may be gone."""
        with contextlib.suppress(OSError):
            connection.sendall(struct.pack("!q", number))

    def accept(self, listener):
        """Fork for a client; return its request in the forked process."""
        connection, _ = listener.accept()
        try:
            request = Request(connection)
        except OSError:  # the client is gone
            connection.close()
            return None
        process = os.fork()
        if process == 0:
            self.leave(connection)
            return request
        request.close_streams()
        self.processes[connection] = process
        self.selector.register(connection, selectors.EVENT_READ, self.hang_up)
        self.tell(connection, process)
        return None

    def leave(self, connection):
        """Close the server's descriptors in a forked process."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.selector.close()
        for it in (self.listener, connection, *self.processes):
            it.close()
        os.close(self.wake_up)
        os.close(self.waker)


def take_streams(streams, *, unbuffered):
    """Use three descriptors as the standard streams."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        server = getattr(sys, name)
        mode = "rb" if name == "stdin" else "wb"
        buffering = 0 if unbuffered and mode == "wb" else -1
        buffer = open(number, mode, buffering=buffering)  # noqa: PTH123, SIM115 - a descriptor
        stream = io.TextIOWrapper(
            buffer,
            server.encoding,
            server.errors,
            line_buffering=name == "stderr" or buffer.isatty(),
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def become(request, python):
    """Turn this process into the requested one; return its arguments."""
    # The warm-up's session has imported these; pytest warns if it cannot rewrite a module in time.
    import torch._inductor.config

    from pytest_gpumem.devices.virtual import uncaptured_stderr

    arguments = request.arguments
    unbuffered = arguments[0] == "-u"
    take_streams(request.streams, unbuffered=unbuffered)
    os.dup2(2, uncaptured_stderr())
    os.chdir(request.folder)
    multiprocessing.process.ORIGINAL_DIR = request.folder  # from which children find the program
    os.environ.clear()
    os.environ.update(request.environment)
    torch._inductor.config.compile_threads = torch._inductor.config.decide_compile_threads()
    sys.executable = python  # processes that this one starts are forked as well
    del sys.path[0]  # this program's folder
    paths = request.environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [str(Path(path).absolute()) for path in paths if path]
    sys.modules["__main__"] = types.ModuleType("__main__")
    return arguments[unbuffered:]


def run(arguments):
    """Run the program as the interpreter would: ``-c code``, ``-m module`` or a file."""
    kind, rest = arguments[0], arguments[1:]
    main = sys.modules["__main__"]
    # A new interpreter has no finder of pytest's, whose loaders runpy cannot use.
    sys.meta_path[:] = [
        finder for finder in sys.meta_path if type(finder).__name__ != "AssertionRewritingHook"
    ]
    if kind[:2] in ("-c", "-m"):
        operand, *rest = ([kind[2:]] if kind[2:] else []) + rest
        sys.argv = [kind[:2], *rest]
    if kind[:2] == "-m":
        sys.path.insert(0, str(Path.cwd()))
        if not hasattr(sys.modules.get(operand), "__path__"):  # a program is executed again
            sys.modules.pop(operand, None)
        sys.modules.pop(f"{operand}.__main__", None)  # if it is a package
        runpy._run_module_as_main(operand)
    elif kind[:2] == "-c":
        sys.path.insert(0, "")
        exec(compile(operand, "<string>", "exec"), main.__dict__)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(kind).absolute().parent))
        main.__file__ = kind
        exec(compile(Path(kind).read_bytes(), kind, "exec"), main.__dict__)


def ended_by(error):
    """Report an error that ended the program as the interpreter does; return the exit status."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        sys.stderr.write(f"{error.code}\n")
        return 1
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    sys.excepthook(type(error), error.with_traceback(traceback), traceback)
    return 1


def end(status):
    """Exit without clearing modules, which takes longer than most sessions."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it
            stream.flush()
    os._exit(status)


def main(folder):
    """Serve clients; return a request and the path of ``python``, in a forked process."""
    address, python = str(folder / "socket"), folder / "python"
    server_environment = {k: v for k, v in os.environ.items() if k not in STARTED_WITH}
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    client = Path(__file__).with_name("warm_client.py").read_text(encoding="utf-8")
    known = {k: v for k, v in server_environment.items() if k.startswith(READ_AT_LOAD)}
    call = f"main({address!r}, {sys.executable!r}, {known!r}, {READ_AT_LOAD!r})"
    python.write_text(f"#!{sys.executable} -IS\n{client}\n\n{call}\n", encoding="utf-8")
    python.chmod(0o700)
    os.write(1, os.fsencode(python) + b"\n")
    os.dup2(2, 1)  # closes the pipe to the process that started this one
    if listener not in select.select([0, listener], [], [])[0]:
        sys.exit()  # nobody has run it
    installed_packages.read_once()
    known_plugins.look_through_once()
    warm_up(folder)
    return Server(listener).serve(), str(python)


if __name__ == "__main__":
    arguments = become(*main(Path(sys.argv[1])))
    status = 0
    try:
        run(arguments)
    except BaseException as error:  # noqa: BLE001 - as the interpreter does
        status = ended_by(error)
    end(status)
