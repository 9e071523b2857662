"""A network of a rate: a proxy through which all connections together get so much a second.

Programs that are given the proxy's address (``HTTPS_PROXY``) ask it for tunnels (HTTP's CONNECT),
so it reads nothing of what they load. What comes down is held to the rate; what goes up is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCK = 2**18
"""bytes that are passed on at once: 2 ms of a network with 1 Gbit/s"""
SLACK_S = 0.02
"""seconds of bytes that may come at once after a pause, since no sleep ends when it should"""
ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"
REFUSED = b"HTTP/1.1 501 Not Implemented\r\nContent-Length: 0\r\n\r\n"


class RatedNetwork:
    """The proxy's tunnels, and the bytes that came down through them."""

    def __init__(self, mbit: int) -> None:
        self._bytes_a_second = mbit * 1e6 / 8
        self._free_at = 0.0
        """the time at which the next byte may come"""
        self.address = ""
        self.carried = 0
        self.end: Callable[[], object] = lambda: None

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables by which programs find the proxy, in both spellings."""
        names = ("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy")
        return {**dict.fromkeys(names, self.address), "NO_PROXY": "", "no_proxy": ""}

    async def run(self, began: threading.Event) -> None:
        """Serve until :meth:`end` is called."""
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        self.end = lambda: loop.call_soon_threadsafe(ended.set)
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        began.set()
        await ended.wait()
        server.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Make a tunnel for a connection, and let it end when the connection ends."""
        async with contextlib.AsyncExitStack() as closing:
            closing.callback(writer.close)
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                head = await reader.readuntil(b"\r\n\r\n")
                method, target, *_ = head.split()
                if method != b"CONNECT":
                    writer.write(REFUSED)
                    return
                host, _, port = target.decode("ascii").rpartition(":")
                above, below = await asyncio.open_connection(host, int(port), limit=BLOCK)
                closing.callback(below.close)
                writer.write(ESTABLISHED)
                await asyncio.gather(self._up(reader, below), self._down(above, writer))

    async def _up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while block := await reader.read(BLOCK):
            writer.write(block)
            await writer.drain()
        writer.write_eof()

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while block := await reader.read(BLOCK):
            now = time.perf_counter()
            self._free_at = max(self._free_at, now - SLACK_S) + len(block) / self._bytes_a_second
            self.carried += len(block)
            if self._free_at > now:
                await asyncio.sleep(self._free_at - now)
            writer.write(block)
            await writer.drain()
        writer.write_eof()


@contextlib.contextmanager
def rated_network(mbit: int) -> Iterator[RatedNetwork]:
    """Have a network of so many megabits a second, on a thread of this process."""
    network = RatedNetwork(mbit)
    began = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(network.run(began)), daemon=True)
    thread.start()
    began.wait()
    try:
        yield network
    finally:
        network.end()
        thread.join()
