"""The program that stands in for ``python``: requests a fork of the warm process (warm_server.py).

It starts in 10 ms, with ``python -IS``. It passes its arguments, environment, folder, standard
streams and signals on to the fork, and ends with the fork's exit code or signal. It runs a new
interpreter if a fork would behave differently: for options other than ``-u``, ``-c`` and ``-m``,
and for other values of variables that are read while Python or torch are loaded.
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
"""variables that may have other values in a fork: it sets paths and threads itself, CUDA reads its
variables when it is initialised, and compilers read the folders of caches when they compile"""
ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
"""variables that are read when CUDA is initialised, except for ``backend``, read at load"""
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def forkable(arguments, environment, server_environment, read_at_load):
    """Whether a fork of the warm process behaves like a new interpreter."""
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
    """Whether the allocator's settings name a backend in one of the environments."""
    return any("backend" in environment.get(name, "") for environment in environments)


def request(arguments, environment):
    """Encode the request for a fork."""
    variables = [f"{name}={value}" for name, value in environment.items()]
    folder = os.getcwd()  # noqa: PTH109 - importing pathlib takes longer than all of this
    words = [folder, str(len(arguments)), *arguments, *variables]
    body = b"\0".join(map(os.fsencode, words))
    return struct.pack("!Q", len(body)) + body


def received(connection):
    """Receive a number from the server; None if the server has ended."""
    data = b""
    while len(data) < 8:
        piece = connection.recv(8 - len(data))
        if not piece:
            return None
        data += piece
    return struct.unpack("!q", data)[0]


def await_number(connection, wake_up):
    """Receive a number as ``received`` does, passing on signals that arrive meanwhile.

    Python would handle a signal that arrives just before ``recv`` only after it returns, which is
    never if that signal is to end the forked process.
    """
    while connection not in select.select([connection, wake_up], [], [])[0]:
        os.read(wake_up, 512)  # Python has handled the signals by now
    return received(connection)


def main(address, python, server_environment, read_at_load):
    """Run the fork, or ``python``, with this process's arguments; exit as it does."""
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
        for stream in (0, 1, 2):  # else a pipe's reader would wait for this process, too
            os.close(stream)
        status = await_number(connection, wake_up)
    if status is None:
        os._exit(255)
    if status < 0:  # a signal ended the fork: end this process by the same one
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
