"""Virtual time, a network that loses, delays and cuts, and etcd as far as the membership service uses it."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from dfkv_core.mds import store
from dfkv_core.mds.store import Held, Snapshot
from dfkv_core.membership.view import NodeEntry, NodeState, View

Thunk = Callable[[], None]
TTL_S = 30  # of a lease
BRIEF_S = 10.0
"""A service may overlook what lasts no longer."""


class World:
    """Events in the order of their time; ties in the order in which they were made."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self._events: list[tuple[float, int, Thunk]] = []
        self._made = 0
        self.disturbed_at_s = -1000.0
        """When something was last broken or mended on purpose."""
        self.tracing = False

    def trace(self, *parts: object) -> None:
        """Tells what happens to whoever reads one history."""
        if self.tracing:
            print(f"{self.now_s:9.3f}", *parts)

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
        self._changed_s: dict[tuple[str, str], float] = {}
        self._all_changed_s = 0.0
        self.loss = 0.0

    def cut(self, a: str, b: str) -> None:
        self._world.trace("cut", a, b)
        self._cut |= {(a, b), (b, a)}
        self._changed_s[a, b] = self._changed_s[b, a] = self._world.now_s
        self._world.disturb()

    def mend(self, a: str, b: str) -> None:
        self._world.trace("mend", a, b)
        self._cut -= {(a, b), (b, a)}
        self._changed_s[a, b] = self._changed_s[b, a] = self._world.now_s
        self._world.disturb()

    def mend_all(self) -> None:
        self._cut.clear()
        self.loss = 0.0
        self._all_changed_s = self._world.now_s
        self._world.disturb()

    def lose(self, share: float) -> None:
        self._world.trace("lost messages:", share)
        self.loss = share
        self._all_changed_s = self._world.now_s
        self._world.disturb()

    def linked_since_s(self, a: str, b: str) -> float:
        """Since when every message between the two arrives; infinite while they do not."""
        if self.loss or (a, b) in self._cut:
            return inf
        return max(self._changed_s.get((a, b), 0.0), self._all_changed_s)

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
        self.reads_stall = False
        """Looks at all keys are not answered, as those of a large cluster may not be; calls for one key are."""
        self.revision = 1
        self.nodes: dict[str, Held] = {}
        self.drained: dict[str, int] = {}
        self.wished: dict[str, int] = {}
        """What operators asked for last; 0: not to drain."""
        self.view: View | None = None
        self.view_revision = 0
        self.leases: dict[int, _Lease] = {}
        self._expires_s = inf
        """No lease ends before."""
        self._next_lease = 1
        self.epoch = 0
        self.lost_keys_at_s = -1000.0
        self._stopped_s = inf
        self.changed_s = 0.0
        self.gone_at_s: dict[str, float] = {}
        """When the key of a node went last. One that was back for a moment only has not been back."""
        self._back_at_s: dict[str, float] = {}
        self._backup: tuple[Any, ...] | None = None
        self.on_view: Callable[[View], None] = lambda view: None
        self.on_node: Callable[[NodeEntry | None, NodeEntry], None] = lambda held, entry: None

    # ---- faults

    def stop(self) -> None:
        self._world.trace("etcd stops")
        self.up = False
        self.changed_s = self._stopped_s = self._world.now_s
        self._world.disturb()

    def stall_reads(self, stall: bool) -> None:
        self._world.trace("etcd's reads", "stall" if stall else "go on")
        self.reads_stall = stall
        self.changed_s = self._world.now_s
        self._world.disturb()

    def slow_down(self, slow_s: float) -> None:
        """Calls take up to slow_s longer."""
        self._world.trace("etcd answers within", slow_s)
        self.slow_s = slow_s
        self.changed_s = self._world.now_s
        self._world.disturb()

    def start(self, *, lost_everything: bool = False, from_backup: bool = False) -> None:
        self.expire()
        before = set(self.nodes)
        # What it lost shortly before it stopped again shows only now.
        if lost_everything or from_backup or self._stopped_s - self.lost_keys_at_s < TTL_S:
            self.lost_keys_at_s = self._world.now_s
        if lost_everything:
            self.nodes, self.drained, self.leases = {}, {}, {}
            self.view, self.view_revision = None, 0
        elif from_backup and self._backup is not None:
            nodes, drained, self.view, self.view_revision, leases = self._backup
            self.nodes, self.drained, self.leases = dict(nodes), dict(drained), dict(leases)
            self.revision += 1000  # as a restore with a bumped revision
        if lost_everything or from_backup:
            self.wished = dict(self.drained)
            self.epoch += 1
        for node_id in before - self.nodes.keys():
            self._went(node_id)
        for node_id in self.nodes.keys() - before:
            self._came(node_id)
        self._expires_s = -inf
        for lease in self.leases.values():
            lease.ends_s = self._world.now_s + lease.ttl_s
        self.up = True
        self.changed_s = self._world.now_s
        self._world.disturb()
        how = "lost everything" if lost_everything else "from backup" if from_backup else ""
        self._world.trace("etcd starts", how, "at view", self.view.revision if self.view else None, *self.nodes)

    def back_up(self) -> None:
        leases = {node_id: replace(lease) for node_id, lease in self.leases.items()}
        self._backup = (dict(self.nodes), dict(self.drained), self.view, self.view_revision, leases)

    def revoke(self, node_id: str) -> None:
        """A lease ends although its node renews it."""
        self._world.trace("etcd loses the lease of", node_id)
        held = self.nodes.get(node_id)
        if held is not None:
            self.lost_keys_at_s = self._world.now_s
            self.leases.pop(held.lease, None)
            self._expires_s = -inf
            self.expire()

    def lose_key(self, node_id: str) -> None:
        """The key goes, its lease lives on."""
        self._world.trace("etcd loses the key of", node_id)
        self.lost_keys_at_s = self._world.now_s
        if self.nodes.pop(node_id, None) is not None:
            self._went(node_id)
        self.revision += 1

    def _went(self, node_id: str) -> None:
        now_s = self._world.now_s
        since_s = self.gone_at_s.get(node_id, now_s)
        brief = now_s - self._back_at_s.pop(node_id, -inf) < BRIEF_S
        self.gone_at_s[node_id] = since_s if brief else now_s

    def _came(self, node_id: str) -> None:
        self._back_at_s[node_id] = self._world.now_s

    # ---- what the service asks for

    def expire(self) -> None:
        now = self._world.now_s
        if not self.up or now < self._expires_s:
            return
        over = [node_id for node_id, lease in self.leases.items() if lease.ends_s <= now]
        for lease_id in over:
            del self.leases[lease_id]
        gone = [node_id for node_id, held in self.nodes.items() if held.lease not in self.leases]
        for node_id in gone:
            self._world.trace("etcd", node_id, "expires")
            del self.nodes[node_id]
            self._went(node_id)
        self.revision += bool(gone)
        self._expires_s = min((lease.ends_s for lease in self.leases.values()), default=inf)

    def apply(self, command: store.Command) -> Any:
        """The command's result."""
        result = self._apply(command)
        if self._world.tracing and not isinstance(command, store.Read | store.KeepAlive | store.GetNode):
            self._world.trace("etcd", _short(command), "->", result)
        return result

    def _apply(self, command: store.Command) -> Any:
        self.expire()
        if isinstance(command, store.Read):
            return Snapshot(dict(self.nodes), dict(self.drained), self.view, self.view_revision, self.epoch)
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
            self._expires_s = min(self._expires_s, self._world.now_s + command.ttl_s)
            return self._next_lease
        if isinstance(command, store.PutNode):
            held = self.nodes.get(command.entry.id)
            if (held.revision if held else 0) != command.revision or command.lease not in self.leases:
                return False
            self.on_node(held.entry if held else None, command.entry)
            if held is None:
                self._came(command.entry.id)
            if self.wished.get(command.entry.id) != command.entry.incarnation:
                self.wished.pop(command.entry.id, None)  # a wish does not outlive the start that it is for
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
        if isinstance(command, store.DropDrain):
            if self.drained.get(command.id) == command.incarnation:
                self.revision += 1
                del self.drained[command.id]
            return None
        assert isinstance(command, store.PutDrain)
        self.revision += 1
        self.wished[command.id] = command.incarnation
        if command.incarnation:
            self.drained[command.id] = command.incarnation
        else:
            self.drained.pop(command.id, None)
        return None


def describe(nodes: Iterable[NodeEntry]) -> str:
    """Nodes with their states and incarnations, for people."""
    return (
        ", ".join(f"{node.id} {NodeState(node.state).name.lower()} {node.incarnation}" for node in nodes) or "nothing"
    )


def _short(command: store.Command) -> str:
    if isinstance(command, store.PutView):
        view = command.view
        return f"PutView at {command.revision}: {view.cluster_id.hex()[:6]} {view.revision} {describe(view.nodes)}"
    if isinstance(command, store.PutNode):
        return f"PutNode at {command.revision} lease {command.lease}: {describe((command.entry,))}"
    return str(command)
