"""What the measurement asks of a store."""

from __future__ import annotations

from typing import Protocol

from bench_peers.objects import Objects

DEADLINE_S = 30.0
CONNECTIONS = 2  # of each client to its server, where the client lets one choose


class StoreMissingError(RuntimeError):
    """A store is not installed here, or does not start. The message says which and why."""


class StoreFailedError(RuntimeError):
    """An operation did not do all of its objects: the figure would mean nothing."""


class Store(Protocol):
    """One server process and one client, until close(). One thread at a time."""

    name: str
    version: str
    how: str  # its interface as used here, and what it was told

    def put(self, objects: Objects) -> float:
        """Stores all under their names. Returns seconds until the last is acknowledged."""

    def get(self, objects: Objects) -> float:
        """Reads all into their places. Returns seconds until the last byte is there."""

    def forget(self, objects: Objects) -> None:
        """Makes room where the store does not do so by itself. Not measured."""

    def close(self) -> None: ...
