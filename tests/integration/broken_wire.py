"""A relay of bytes between clients and one node that can break in the ways that networks and nodes do."""

from __future__ import annotations

import contextlib
import enum
import random
import socket
import time

from tests.tcp_relay import TcpRelay, end

PIECE_BYTES = 64 * 1024
SLOW_PIECE_BYTES = 256
SLOW_PAUSE_S = 0.02


class Break(enum.Enum):
    """What becomes of what travels, in both directions unless said otherwise."""

    NONE = "whole"
    SLOW = "slow"  # some bytes now and then
    DROPPING = "dropping"  # taken, and thrown away
    HALF_CLOSED = "half-closed"  # the node's side has ended; the client's is read
    GARBAGE = "garbage"  # the node's answers are noise
    RESET = "reset"  # each connection ends with its first bytes


class BrokenWire(TcpRelay):
    """Any thread."""

    def __init__(self, *, seed: int, node_port: int = 0) -> None:
        self._noise = random.Random(seed)
        self._kind = Break.NONE
        super().__init__(node_port)

    def become(self, kind: Break) -> None:
        """From now on. Healing ends the connections that were broken, as a restart of what broke them does."""
        self._kind = kind
        if kind is Break.NONE:
            self.drop()
        elif kind is Break.HALF_CLOSED:
            for connection in self.connections():
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_WR)

    def joined(self, client: socket.socket, node: socket.socket) -> None:
        if self._kind is Break.HALF_CLOSED:
            client.shutdown(socket.SHUT_WR)
        self.start(self._pump, client, node, False)
        self.start(self._pump, node, client, True)

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
                end(connection)
        with self.lock:
            if self._kind is not Break.HALF_CLOSED:
                self.sockets -= {source, target}
