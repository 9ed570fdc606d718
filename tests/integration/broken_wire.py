"""A relay of bytes between clients and one node that can break in the ways that networks and nodes do."""

from __future__ import annotations

import contextlib
import enum
import random
import socket
import threading
import time
from collections.abc import Callable

PIECE_BYTES = 64 * 1024
SLOW_PIECE_BYTES = 256
SLOW_PAUSE_S = 0.02
BUFFER_BYTES = 64 * 1024
JOIN_DEADLINE_S = 5.0


class Break(enum.Enum):
    """What becomes of what travels, in both directions unless said otherwise."""

    NONE = "whole"
    SLOW = "slow"  # some bytes now and then
    DROPPING = "dropping"  # taken, and thrown away
    HALF_CLOSED = "half-closed"  # the node's side has ended; the client's is read
    GARBAGE = "garbage"  # the node's answers are noise
    RESET = "reset"  # each connection ends with its first bytes


class BrokenWire:
    """Relays to 127.0.0.1:`node_port`, which may be set later. Any thread; close() ends every connection and thread."""

    def __init__(self, *, seed: int, node_port: int = 0) -> None:
        self.node_port = node_port
        self._noise = random.Random(seed)
        self._kind = Break.NONE
        self._lock = threading.Lock()
        self._closed = False
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        # Inherited by what is accepted: otherwise the kernel takes whole transfers at once.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def become(self, kind: Break) -> None:
        """From now on. Healing ends the connections that were broken, as a restart of what broke them does."""
        self._kind = kind
        if kind is Break.NONE:
            self.drop()
        elif kind is Break.HALF_CLOSED:
            with self._lock:
                connections = list(self._sockets)
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_WR)

    def drop(self) -> None:
        with self._lock:
            connections = list(self._sockets)
        for connection in connections:
            _end(connection)

    def close(self) -> None:
        self._closed = True
        _end(self._listener)
        self.drop()
        for thread in self._threads:
            thread.join(JOIN_DEADLINE_S)
        assert not any(thread.is_alive() for thread in self._threads), "a thread of the wire did not end"

    # ---- threads

    def _start(self, run: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, daemon=True)
        with self._lock:
            self._threads = [one for one in self._threads if one.is_alive()]
            self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                node = socket.create_connection(("127.0.0.1", self.node_port), timeout=5)
            except OSError:
                _end(client)
                continue
            node.settimeout(None)
            for connection in (client, node):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets |= {client, node}
            if self._kind is Break.HALF_CLOSED:
                client.shutdown(socket.SHUT_WR)
            self._start(self._pump, client, node, False)
            self._start(self._pump, node, client, True)

    def _pump(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(SLOW_PIECE_BYTES if self._kind is Break.SLOW else PIECE_BYTES):
                kind = self._kind
                if kind is Break.RESET:
                    break
                if kind is Break.DROPPING or kind is Break.HALF_CLOSED:
                    continue
                if kind is Break.SLOW:
                    time.sleep(SLOW_PAUSE_S)
                target.sendall(self._noise.randbytes(len(piece)) if kind is Break.GARBAGE and answers else piece)
        if self._kind is not Break.HALF_CLOSED:
            for connection in (source, target):
                _end(connection)
        with self._lock:
            if self._kind is not Break.HALF_CLOSED:
                self._sockets -= {source, target}


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
