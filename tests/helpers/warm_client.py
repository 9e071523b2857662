"""The program that stands in for ``python``: has the warm process of warm_server.py fork for it.

It starts in 10 ms, with ``python -IS``, and passes on its arguments, environment, folder, standard
streams and signals; it ends as the forked process does. What a fork cannot do as a new interpreter
would is left to a new one: other options than ``-u``, ``-c`` and ``-m``, and other values of the
variables that are read while Python or torch are loaded.
"""

import os
import select
import signal
import socket
import struct
import sys

MAY_DIFFER = {
    "PYTHONPATH", "CUDA_MODULE_LOADING", "CUDA_VISIBLE_DEVICES", "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS", "TRITON_CACHE_DIR",
}  # fmt: skip
"""variables of any value: a fork sets its own paths and threads, CUDA's are read as CUDA is
initialised, those of caches as something is compiled"""
ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
"""variables that are read as CUDA is initialised, but for a backend, which is chosen at load"""
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def forkable(arguments, environment, server_environment, read_at_load):
    """Whether a fork of the warm process does what a new interpreter would do."""
    if arguments[:1] == ["-u"]:
        arguments = arguments[1:]
    if not arguments or (arguments[0][:1] == "-" and arguments[0][:2] not in ("-c", "-m")):
        return False
    return all(
        environment.get(name) == server_environment.get(name)
        or (name in ALLOCATOR and not names_backend(name, environment, server_environment))
        for name in {*environment, *server_environment}
        if name.startswith(read_at_load) and name not in MAY_DIFFER
    )


def names_backend(name, *environments):
    """Whether the allocator's settings choose another allocator in one of the environments."""
    return any("backend" in environment.get(name, "") for environment in environments)


def request(arguments, environment):
    """The message that asks for a fork."""
    variables = [f"{name}={value}" for name, value in environment.items()]
    folder = os.getcwd()  # noqa: PTH109 - importing pathlib takes longer than all of this
    words = [folder, str(len(arguments)), *arguments, *variables]
    body = b"\0".join(map(os.fsencode, words))
    return struct.pack("!Q", len(body)) + body


def received(connection):
    """One number from the server; None: it has ended."""
    data = b""
    while len(data) < 8:
        piece = connection.recv(8 - len(data))
        if not piece:
            return None
        data += piece
    return struct.unpack("!q", data)[0]


def await_number(connection, wake_up):
    """One number from the server, as ``received``; signals that come meanwhile are passed on.

    A signal that came just before ``recv`` would be handled after it: never, where the process is
    to end by that signal.
    """
    while connection not in select.select([connection, wake_up], [], [])[0]:
        os.read(wake_up, 512)  # Python has handled the signals by now
    return received(connection)


def main(address, python, server_environment, read_at_load):
    """Run as ``python`` would with this process's arguments."""
    arguments, environment = sys.argv[1:], dict(os.environ)
    if not forkable(arguments, environment, server_environment, read_at_load):
        os.execv(python, [python, *arguments])
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until it is known whom to pass them on to
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        data = request(arguments, environment)
        sent = socket.send_fds(connection, [data], [0, 1, 2])
        connection.sendall(data[sent:])
        process = received(connection)
        if process is None:
            sys.exit(f"the warm process has ended; its log is {os.path.dirname(address)}/log")  # noqa: PTH120 - likewise
        wake_up, waker = os.pipe()
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker)
        for number in FORWARDED:
            signal.signal(number, lambda number, _frame: os.kill(process, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        for stream in (0, 1, 2):  # or a pipe would not end before this process does
            os.close(stream)
        status = await_number(connection, wake_up)
    if status is None:
        os._exit(255)
    if status < 0:  # it was ended by a signal, and so is this
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
