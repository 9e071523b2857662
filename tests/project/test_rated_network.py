"""The network of a rate, through which benchmarks install."""

import importlib
import socket
import threading
import time

import pytest
from helpers.paths import ROOT

SENT = 2**20


@pytest.fixture
def module(monkeypatch):
    """The module; it is imported in a test alone, as benchmarks are not installed."""
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.speed.rated_network")


@pytest.fixture
def server():
    """Return the port of a server that sends so many bytes to each that connects."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return  # it was closed
            with connection:
                connection.sendall(bytes(SENT))

    threading.Thread(target=serve, daemon=True).start()
    yield listening.getsockname()[1]
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()


def ask(address, request):
    """Send a request to the proxy; return all that it answers."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(request.encode())
        return b"".join(iter(lambda: connection.recv(2**16), b""))


def test_all_tunnels_together_have_the_rate(module, server):
    with module.rated_network(80) as network:
        began = time.perf_counter()
        answers = []
        threads = [
            threading.Thread(
                target=lambda: answers.append(
                    ask(network.address, f"CONNECT 127.0.0.1:{server} HTTP/1.1\r\n\r\n")
                )
            )
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took = time.perf_counter() - began
    assert [len(it.partition(b"\r\n\r\n")[2]) for it in answers] == [SENT, SENT]
    assert network.carried == 2 * SENT
    assert took > 2 * SENT * 8 / 80e6 - module.SLACK_S


def test_what_asks_for_no_tunnel_is_refused(module):
    with module.rated_network(80) as network:
        assert ask(network.address, "GET http://x/ HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 501 ")
