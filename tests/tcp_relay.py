"""What relays between clients and one node have in common: connections in pairs, and their end."""

from __future__ import annotations

import contextlib
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

HOST = "127.0.0.1"
BUFFER_BYTES = 64 * 1024
CONNECT_DEADLINE_S = 5.0
JOIN_DEADLINE_S = 5.0


class TcpRelay(ABC):
    """Relays to 127.0.0.1:`node_port`, which may be set later. Any thread; close() ends every connection and thread.

    It takes connections from the end of __init__ on: a subclass sets what its joined() needs before that.
    """

    def __init__(self, node_port: int = 0) -> None:
        self.node_port = node_port
        self.lock = threading.Lock()
        self.sockets: set[socket.socket] = set()
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server((HOST, 0), backlog=64)
        # Inherited by what is accepted: with large buffers the kernel would take whole transfers at once.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self.port: int = self._listener.getsockname()[1]
        self.start(self._accept)

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @abstractmethod
    def joined(self, client: socket.socket, node: socket.socket) -> None:
        """A client has come, and a connection to the node was made for it: starts what moves bytes between them."""

    def start(self, run: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, daemon=True)
        with self.lock:
            self._threads = [one for one in self._threads if one.is_alive()]
            self._threads.append(thread)
        thread.start()

    def connections(self) -> list[socket.socket]:
        with self.lock:
            return list(self.sockets)

    def drop(self) -> None:
        """Ends every connection, with whatever was on its way."""
        for connection in self.connections():
            end(connection)

    def close(self) -> None:
        self._closed = True
        end(self._listener)
        self.drop()
        for thread in self._threads:
            thread.join(JOIN_DEADLINE_S)
        assert not any(thread.is_alive() for thread in self._threads), "a thread of the relay did not end"

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                node = self._connect()
            except OSError:
                end(client)
                continue
            for connection in (client, node):
                connection.settimeout(None)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self.lock:
                self.sockets |= {client, node}
            self.joined(client, node)

    def _connect(self) -> socket.socket:
        node = socket.socket()
        node.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        node.settimeout(CONNECT_DEADLINE_S)
        try:
            node.connect((HOST, self.node_port))
        except OSError:
            node.close()
            raise
        return node


def end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
