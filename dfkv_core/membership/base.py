"""The membership interface between a node and whatever keeps track of the cluster."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

from dfkv_core.membership.view import NodeEntry, NodeState, View

Listener = Callable[[View], None]


class MembershipError(RuntimeError):
    """This node cannot join. `hint` says what to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(f"{message}; {hint}")
        self.message = message
        self.hint = hint


class Membership(ABC):
    """Keeps one node announced and its view current.

    Called by the node process, from any thread. An implementation owes:
    1. view() never blocks on I/O, and never returns an empty view after join().
    2. revisions of one cluster id only grow, also across restarts of this process.
    3. listeners are called once per change, in order, without locks that view() needs; they must not block.
    4. close() ends every thread it started; no listener runs after it.
    """

    @abstractmethod
    def join(self, entry: NodeEntry) -> None:
        """Announces this node. Called once, after its port is known and before it serves. Raises MembershipError."""

    @abstractmethod
    def set_state(self, state: NodeState) -> None:
        """Announces another state of this node."""

    @abstractmethod
    def view(self) -> View:
        """The current view. Raises RuntimeError before join()."""

    @abstractmethod
    def subscribe(self, listener: Listener) -> None:
        """Calls `listener` with every later view."""

    @abstractmethod
    def close(self) -> None:
        """Takes this node out and ends. Idempotent."""


class LocalMembership(Membership):
    """What memberships without a service share: a view that changes only when this process says so."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._notify_lock = threading.Lock()  # keeps listeners' calls in order; never held with _lock
        self._view: View | None = None
        self._listeners: list[Listener] = []
        self._closed = False

    def view(self) -> View:
        with self._lock:
            if self._view is None:
                raise RuntimeError("no view before join()")
            return self._view

    def subscribe(self, listener: Listener) -> None:
        with self._lock:
            self._listeners.append(listener)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._listeners.clear()

    def _publish(self, change: Callable[[View | None], View]) -> None:
        with self._notify_lock:
            with self._lock:
                if self._closed:
                    raise RuntimeError("membership is closed")
                view = self._view = change(self._view)
                listeners = list(self._listeners)
            for listener in listeners:
                listener(view)
