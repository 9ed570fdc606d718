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

HEADER_BYTES = 32
PIECE_BYTES = 64 * 1024
BUFFER_BYTES = 64 * 1024
JOIN_DEADLINE_S = 5.0


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


class FaultRelay:
    """Relays connections to 127.0.0.1:`node_port`. Any thread; close() ends every connection and thread."""

    def __init__(self, node_port: int, *, seed: int) -> None:
        self._node_port = node_port
        self._noise = random.Random(seed)
        self._lock = threading.Lock()
        self._moment: Moment | None = None
        self._action: Callable[[], None] | None = None
        self.fired = threading.Event()
        self._wire = Wire.PASS
        self._passing = threading.Event()
        self._passing.set()
        self._longest_delay_s = 0.0
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        # Inherited by what is accepted. With large buffers the kernel would take whole transfers at once.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept)

    def arm(self, moment: Moment, action: Callable[[], None]) -> None:
        """Runs `action` once, when the next `moment` comes, before anything else is passed on that connection."""
        self.fired.clear()
        with self._lock:
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

    def drop(self) -> None:
        """Ends every connection, with whatever was on its way."""
        with self._lock:
            connections = list(self._sockets)
        for connection in connections:
            _end(connection)

    def close(self) -> None:
        self._closed = True
        self._passing.set()
        _end(self._listener)
        self.drop()
        for thread in self._threads:
            thread.join(JOIN_DEADLINE_S)
        assert not any(thread.is_alive() for thread in self._threads), "a thread of the relay did not end"

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
                node = self._connect()
            except OSError:
                _end(client)
                continue
            for connection in (client, node):
                connection.settimeout(None)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets |= {client, node}
            self._start(self._pump, client, node, self._to_node)
            self._start(self._pump, node, client, self._to_client)

    def _connect(self) -> socket.socket:
        node = socket.socket()
        node.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        node.settimeout(5.0)
        try:
            node.connect(("127.0.0.1", self._node_port))
        except OSError:
            node.close()
            raise
        return node

    def _pump(
        self, source: socket.socket, target: socket.socket, frame: Callable[[socket.socket, socket.socket], bool]
    ) -> None:
        with contextlib.suppress(OSError):
            while frame(source, target):
                pass
        for connection in (source, target):
            _end(connection)
        with self._lock:
            self._sockets -= {source, target}

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
        with self._lock:
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


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
