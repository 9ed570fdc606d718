"""memcached and redis over raw sockets: a whole batch is pipelined, and what comes back goes straight into its place.

Requests and answers have known lengths, so that one system call sends the batch of a connection and one receives it: there is no
client library in between, and no copy beside the kernel's.
"""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from bench_peers.objects import Objects
from bench_peers.store import CONNECTIONS, DEADLINE_S, StoreFailedError, StoreMissingError

START_DEADLINE_S = 10.0
VECTORS = 512  # of one call; the kernel takes 1024

Piece = bytes | bytearray | memoryview


class _Pipelined(ABC):
    """A server process and CONNECTIONS connections, each driven by a thread of its own."""

    name = ""
    program = ""

    def __init__(self, ram_bytes: int) -> None:
        path = shutil.which(self.program)
        if path is None:
            raise StoreMissingError(f"{self.program} is not installed")
        self.version = self._version(path)
        self.how = f"raw pipelined sockets, {CONNECTIONS} connections, no checksums"
        port = _free_port()
        self._process = subprocess.Popen(
            [path, *self._arguments(port, ram_bytes)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._sockets: list[socket.socket] = []
        self._pool = ThreadPoolExecutor(CONNECTIONS)
        try:
            self._sockets = [self._connect(port) for _ in range(CONNECTIONS)]
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _version(self, path: str) -> str: ...

    @abstractmethod
    def _arguments(self, port: int, ram_bytes: int) -> list[str]: ...

    @abstractmethod
    def _put(self, key: bytes, value: memoryview) -> list[Piece]: ...

    @abstractmethod
    def _stored(self) -> bytes: ...

    @abstractmethod
    def _get(self, key: bytes) -> bytes: ...

    @abstractmethod
    def _found(self, key: bytes, size_bytes: int) -> tuple[bytes, bytes]:
        """What comes before a value, and after it."""

    def put(self, objects: Objects) -> float:
        return self._in_parallel(objects, self._put_some)

    def get(self, objects: Objects) -> float:
        return self._in_parallel(objects, self._get_some)

    def forget(self, objects: Objects) -> None:  # noqa: B027
        """Nothing is to be done: it evicts. redis, which would evict from the batch itself, removes them."""

    def close(self) -> None:
        for one in self._sockets:
            one.close()
        self._pool.shutdown()
        self._process.terminate()
        try:
            self._process.wait(START_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _in_parallel(
        self, objects: Objects, work: Callable[[socket.socket, list[tuple[bytes, memoryview]]], None]
    ) -> float:
        pairs = [(block_id.hex().encode(), view) for block_id, view in zip(objects.ids, objects.views, strict=True)]
        shares = [pairs[i::CONNECTIONS] for i in range(CONNECTIONS)]
        began = time.perf_counter()
        list(self._pool.map(work, self._sockets, shares))
        return time.perf_counter() - began

    def _put_some(self, connection: socket.socket, share: list[tuple[bytes, memoryview]]) -> None:
        _send(connection, [piece for key, value in share for piece in self._put(key, value)])
        wanted = self._stored() * len(share)
        answer = bytearray(len(wanted))
        _receive(connection, [answer])
        if answer != wanted:
            raise StoreFailedError(f"{self.name} answered {bytes(answer[:80])!r}")

    def _get_some(self, connection: socket.socket, share: list[tuple[bytes, memoryview]]) -> None:
        frames = [self._found(key, len(value)) for key, value in share]
        around = [(bytearray(len(before)), bytearray(len(after))) for before, after in frames]
        places: list[bytearray | memoryview] = []
        for (before, after), (_, value) in zip(around, share, strict=True):
            places += [before, value, after]
        connection.sendall(b"".join(self._get(key) for key, _ in share))
        _receive(connection, places)
        if [(bytes(before), bytes(after)) for before, after in around] != frames:
            raise StoreFailedError(f"{self.name} does not have all that was asked for")

    def _connect(self, port: int) -> socket.socket:
        until = time.monotonic() + START_DEADLINE_S
        while True:
            try:
                connection = socket.create_connection(("127.0.0.1", port), timeout=1)
            except OSError:
                if time.monotonic() > until or self._process.poll() is not None:
                    raise StoreMissingError(f"{self.program} does not start") from None
                time.sleep(0.02)
                continue
            connection.settimeout(None)  # blocking, so that one call can wait for everything
            limit = struct.pack("@ll", int(DEADLINE_S), 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection


class MemcachedStore(_Pipelined):
    name = "memcached"
    program = "memcached"

    def _version(self, path: str) -> str:
        return _said(path, "-V").split()[-1]

    def _arguments(self, port: int, ram_bytes: int) -> list[str]:
        arguments = ["-l", "127.0.0.1", "-p", str(port), "-m", str(ram_bytes >> 20), "-I", "8m"]
        return [*arguments, "-u", "nobody"] if os.getuid() == 0 else arguments

    def _put(self, key: bytes, value: memoryview) -> list[Piece]:
        return [b"set %b 0 0 %d\r\n" % (key, len(value)), value, b"\r\n"]

    def _stored(self) -> bytes:
        return b"STORED\r\n"

    def _get(self, key: bytes) -> bytes:
        return b"get %b\r\n" % key

    def _found(self, key: bytes, size_bytes: int) -> tuple[bytes, bytes]:
        return b"VALUE %b 0 %d\r\n" % (key, size_bytes), b"\r\nEND\r\n"


class RedisStore(_Pipelined):
    name = "redis"
    program = "redis-server"

    def _version(self, path: str) -> str:
        return _said(path, "--version").partition("v=")[2].split()[0]

    def _arguments(self, port: int, ram_bytes: int) -> list[str]:
        return ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]

    def forget(self, objects: Objects) -> None:
        """What it evicts is as good as random among the keys of one second, and would be some of the batch itself."""
        names = [block_id.hex().encode() for block_id in objects.ids]
        order = b"*%d\r\n$3\r\nDEL\r\n" % (len(names) + 1)
        connection = self._sockets[0]
        connection.sendall(order + b"".join(b"$%d\r\n%b\r\n" % (len(name), name) for name in names))
        answer = b""
        while not answer.endswith(b"\r\n"):
            answer += connection.recv(64)

    def _put(self, key: bytes, value: memoryview) -> list[Piece]:
        return [b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(value)), value, b"\r\n"]

    def _stored(self) -> bytes:
        return b"+OK\r\n"

    def _get(self, key: bytes) -> bytes:
        return b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key)

    def _found(self, key: bytes, size_bytes: int) -> tuple[bytes, bytes]:
        return b"$%d\r\n" % size_bytes, b"\r\n"


def _send(connection: socket.socket, pieces: Sequence[Piece]) -> None:
    left = [memoryview(piece) for piece in pieces]
    while left:
        _drop(left, connection.sendmsg(left[:VECTORS]))


def _receive(connection: socket.socket, places: Sequence[bytearray | memoryview]) -> None:
    left = [memoryview(place) for place in places]
    while left:
        count = connection.recvmsg_into(left[:VECTORS], 0, socket.MSG_WAITALL)[0]
        if count == 0:
            raise StoreFailedError("the connection was closed")
        _drop(left, count)


def _drop(left: list[memoryview], count: int) -> None:
    whole = 0
    while whole < len(left) and count >= len(left[whole]):
        count -= len(left[whole])
        whole += 1
    del left[:whole]
    if count:
        left[0] = left[0][count:]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=START_DEADLINE_S, check=False).stdout.strip()
