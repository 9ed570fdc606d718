"""A relay between engine and node that knows the frames: it breaks the node, or the wire, at a chosen moment.

The node advertises the relay's address, so that every connection of every client goes through it.
"""

import contextlib
import enum
import random
import socket
import threading
import time
from collections.abc import Callable

from tests.reference.frames import OPCODES
from tests.tcp_relay import TcpRelay, end

HEADER_BYTES = 32
PIECE_BYTES = 64 * 1024


class Moment(enum.Enum):
    """LOOKUP: now, before the request is made. LOAD: a lookup was answered, its load was not passed on. LOADING: half of a
    load's first piece of payload was passed on. SAVING: the same of a save."""

    LOOKUP = "before the lookup"
    LOAD = "between lookup and load"
    LOADING = "during the load"
    SAVING = "during the save"


class Wire(enum.Enum):
    """What becomes of the node's answers: passed on, kept back until the wire passes again, or replaced by noise."""

    PASS = 0
    HOLD = 1
    NOISE = 2


class FaultRelay(TcpRelay):
    """Any thread."""

    def __init__(self, node_port: int, *, seed: int) -> None:
        self._noise = random.Random(seed)
        self._moment: Moment | None = None
        self._action: Callable[[], None] | None = None
        self.fired = threading.Event()
        self._wire = Wire.PASS
        self._passing = threading.Event()
        self._passing.set()
        self._longest_delay_s = 0.0
        super().__init__(node_port)

    def arm(self, moment: Moment, action: Callable[[], None]) -> None:
        """Runs `action` once, when the next `moment` comes, before anything else is passed on that connection."""
        self.fired.clear()
        with self.lock:
            self._moment, self._action = moment, action
        if moment is Moment.LOOKUP:
            self._reached(moment)

    def set_wire(self, wire: Wire) -> None:
        self._wire = wire
        if wire is Wire.HOLD:
            self._passing.clear()
        else:
            self._passing.set()

    def set_delay(self, longest_s: float) -> None:
        """From now on each piece of payload of loads and saves waits, up to `longest_s`, before it is passed on."""
        self._longest_delay_s = longest_s

    def close(self) -> None:
        self._passing.set()
        super().close()

    def joined(self, client: socket.socket, node: socket.socket) -> None:
        self.start(self._pump, client, node, self._to_node)
        self.start(self._pump, node, client, self._to_client)

    def _pump(
        self, source: socket.socket, target: socket.socket, frame: Callable[[socket.socket, socket.socket], bool]
    ) -> None:
        with contextlib.suppress(OSError):
            while frame(source, target):
                pass
        for connection in (source, target):
            end(connection)
        with self.lock:
            self.sockets -= {source, target}

    # ---- frames

    def _to_node(self, client: socket.socket, node: socket.socket) -> bool:
        header = _receive(client, HEADER_BYTES)
        if not header:
            return False
        if header[5] == OPCODES["GET"]:
            self._reached(Moment.LOAD)
        node.sendall(header)
        _copy(client, int.from_bytes(header[20:24], "little"), node.sendall)
        payload = int.from_bytes(header[24:28], "little")
        if header[5] == OPCODES["PUT"] and payload > HEADER_BYTES * 64:
            self._delay()
            _copy(client, payload // 2, node.sendall)
            self._reached(Moment.SAVING)
            payload -= payload // 2
        _copy(client, payload, node.sendall)
        return True

    def _to_client(self, node: socket.socket, client: socket.socket) -> bool:
        header = _receive(node, HEADER_BYTES)
        if not header:
            return False

        def forward(piece: bytes) -> None:
            self._passing.wait()
            client.sendall(self._noise.randbytes(len(piece)) if self._wire is Wire.NOISE else piece)

        forward(header)
        _copy(node, int.from_bytes(header[20:24], "little"), forward)
        payload = int.from_bytes(header[24:28], "little")
        if header[5] == OPCODES["GET"] and payload > HEADER_BYTES * 64:
            self._delay()
            _copy(node, payload // 2, forward)
            self._reached(Moment.LOADING)
            payload -= payload // 2
        _copy(node, payload, forward)
        return True

    def _delay(self) -> None:
        if self._longest_delay_s:
            time.sleep(self._noise.uniform(0, self._longest_delay_s))

    def _reached(self, moment: Moment) -> None:
        with self.lock:
            if self._moment is not moment or self._action is None:
                return
            action, self._moment, self._action = self._action, None, None
        action()
        self.fired.set()


def _receive(source: socket.socket, count: int) -> bytes:
    """`count` bytes; nothing when the connection ended before them."""
    received = b""
    while len(received) < count:
        piece = source.recv(count - len(received))
        if not piece:
            return b""
        received += piece
    return received


def _copy(source: socket.socket, count: int, forward: Callable[[bytes], None]) -> None:
    while count:
        piece = source.recv(min(count, PIECE_BYTES))
        if not piece:
            raise ConnectionError("the connection ended inside a frame")
        forward(piece)
        count -= len(piece)
