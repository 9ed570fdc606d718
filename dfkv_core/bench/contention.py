"""Small requests beside large ones: lookups while a thread keeps the node busy, and plain TCP ping-pong under the same load."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

ECHO_DEADLINE_S = 5.0
MESSAGE_BYTES = 64
_ECHO = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
peer, _ = server.accept()
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while data := peer.recv(4096):
    peer.sendall(data)
"""


@contextlib.contextmanager
def repeated(work: Callable[[], object]) -> Iterator[None]:
    """`work` again and again in a thread, until the end of the `with`; what it raises comes out there."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            while not stop.is_set():
                work()
        except BaseException as error:  # handed to the caller below
            failures.append(error)

    thread = threading.Thread(target=run, name="dfkv-bench-load")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if failures:
        raise failures[0]


class PingPong:
    """Round trips of 64 bytes to another process over one TCP connection, for the length of a `with`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", _ECHO], stdout=subprocess.PIPE, text=True)
        try:
            assert self._process.stdout is not None
            port = int(self._process.stdout.readline())
            self._socket = socket.create_connection(("127.0.0.1", port), timeout=ECHO_DEADLINE_S)
        except BaseException:
            self._process.kill()
            self._process.communicate()
            raise
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> PingPong:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        try:
            self._process.communicate(timeout=ECHO_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def round_trip(self) -> float:
        """Seconds."""
        began = time.perf_counter()
        self._socket.sendall(bytes(MESSAGE_BYTES))
        left = MESSAGE_BYTES
        while left:
            left -= len(self._socket.recv(left))
        return time.perf_counter() - began
