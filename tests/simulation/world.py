"""Virtual time, a network that loses, delays and cuts, and etcd as far as the membership service uses it."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dfkv_core.mds import store
from dfkv_core.mds.store import Held, Snapshot
from dfkv_core.membership.view import View

Thunk = Callable[[], None]


class World:
    """Events in the order of their time; ties in the order in which they were made."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self._events: list[tuple[float, int, Thunk]] = []
        self._made = 0
        self.disturbed_at_s = -1000.0
        """When something was last broken or mended on purpose."""

    def after(self, delay_s: float, event: Thunk) -> None:
        self._made += 1
        heapq.heappush(self._events, (self.now_s + delay_s, self._made, event))

    def run_until(self, end_s: float) -> None:
        events = self._events
        while events and events[0][0] <= end_s:
            self.now_s, _, event = heapq.heappop(events)
            event()
        self.now_s = end_s

    def disturb(self) -> None:
        self.disturbed_at_s = self.now_s

    def calm_for_s(self) -> float:
        return self.now_s - self.disturbed_at_s


class Network:
    """Which pairs can talk. A message takes a few milliseconds; where a link is cut it vanishes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._cut: set[tuple[str, str]] = set()
        self.loss = 0.0

    def cut(self, a: str, b: str) -> None:
        self._cut |= {(a, b), (b, a)}
        self._world.disturb()

    def mend(self, a: str, b: str) -> None:
        self._cut -= {(a, b), (b, a)}
        self._world.disturb()

    def mend_all(self) -> None:
        self._cut.clear()
        self.loss = 0.0
        self._world.disturb()

    def linked(self, a: str, b: str) -> bool:
        return (a, b) not in self._cut

    def passes(self, a: str, b: str) -> bool:
        """Whether one message gets through now."""
        return (a, b) not in self._cut and not (self.loss and self._world.random.random() < self.loss)

    def send(self, a: str, b: str, event: Thunk) -> None:
        """Runs `event` at b, unless the link is cut now or when it arrives."""
        if self.passes(a, b):
            delay_s = 0.001 + 0.004 * self._world.random.random()
            self._world.after(delay_s, lambda: event() if (a, b) not in self._cut else None)


@dataclass
class _Lease:
    ttl_s: float
    ends_s: float


class Etcd:
    """Linearizable keys, leases and compare-and-swap. Down: calls fail. A restart gives every lease its whole time again."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.up = True
        self.slow_s = 0.0
        self.revision = 1
        self.nodes: dict[str, Held] = {}
        self.drained: dict[str, int] = {}
        self.view: View | None = None
        self.view_revision = 0
        self.leases: dict[int, _Lease] = {}
        self._next_lease = 1
        self.lost_keys_at_s = -1000.0
        self._backup: tuple[Any, ...] | None = None
        self.on_view: Callable[[View], None] = lambda view: None

    # ---- faults

    def stop(self) -> None:
        self.up = False
        self._world.disturb()

    def start(self, *, lost_everything: bool = False, from_backup: bool = False) -> None:
        self.expire()
        if lost_everything or from_backup:
            self.lost_keys_at_s = self._world.now_s
        if lost_everything:
            self.nodes, self.drained, self.leases = {}, {}, {}
            self.view, self.view_revision = None, 0
        elif from_backup and self._backup is not None:
            nodes, drained, self.view, self.view_revision, leases = self._backup
            self.nodes, self.drained, self.leases = dict(nodes), dict(drained), dict(leases)
            self.revision += 1000  # as a restore with a bumped revision
        for lease in self.leases.values():
            lease.ends_s = self._world.now_s + lease.ttl_s
        self.up = True
        self._world.disturb()

    def back_up(self) -> None:
        leases = {node_id: replace(lease) for node_id, lease in self.leases.items()}
        self._backup = (dict(self.nodes), dict(self.drained), self.view, self.view_revision, leases)

    def revoke(self, node_id: str) -> None:
        """A lease ends although its node renews it."""
        held = self.nodes.get(node_id)
        if held is not None:
            self.lost_keys_at_s = self._world.now_s
            self.leases.pop(held.lease, None)
            self.expire()

    def lose_key(self, node_id: str) -> None:
        """The key goes, its lease lives on."""
        self.lost_keys_at_s = self._world.now_s
        self.nodes.pop(node_id, None)
        self.revision += 1

    # ---- what the service asks for

    def expire(self) -> None:
        if not self.up:
            return
        now = self._world.now_s
        over = [node_id for node_id, lease in self.leases.items() if lease.ends_s <= now]
        for lease_id in over:
            del self.leases[lease_id]
        gone = [node_id for node_id, held in self.nodes.items() if held.lease not in self.leases]
        for node_id in gone:
            del self.nodes[node_id]
        self.revision += bool(gone)

    def apply(self, command: store.Command) -> Any:
        """The command's result."""
        self.expire()
        if isinstance(command, store.Read):
            return Snapshot(dict(self.nodes), dict(self.drained), self.view, self.view_revision)
        if isinstance(command, store.KeepAlive):
            lease = self.leases.get(command.lease)
            if lease is None:
                return 0
            lease.ends_s = self._world.now_s + lease.ttl_s
            return int(lease.ttl_s)
        if isinstance(command, store.GetNode):
            return self.nodes.get(command.id)
        if isinstance(command, store.Grant):
            self._next_lease += 1
            self.leases[self._next_lease] = _Lease(command.ttl_s, self._world.now_s + command.ttl_s)
            return self._next_lease
        if isinstance(command, store.PutNode):
            held = self.nodes.get(command.entry.id)
            if (held.revision if held else 0) != command.revision or command.lease not in self.leases:
                return False
            self.revision += 1
            self.nodes[command.entry.id] = Held(command.entry, command.lease, self.revision)
            return True
        if isinstance(command, store.PutView):
            if self.view_revision != command.revision:
                return 0
            self.revision += 1
            self.view, self.view_revision = command.view, self.revision
            self.on_view(command.view)
            return self.revision
        assert isinstance(command, store.PutDrain)
        self.revision += 1
        if command.incarnation:
            self.drained[command.id] = command.incarnation
        else:
            self.drained.pop(command.id, None)
        return None
