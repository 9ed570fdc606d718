"""What the membership service does with a heartbeat, a drain and a tick of its clock, as steps without I/O or clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dfkv_core.mds.guard import Decision, GuardPolicy, Memory, at_rest, contact_regained, decide, noticed
from dfkv_core.mds.store import (
    DropDrain,
    GetNode,
    Grant,
    Held,
    KeepAlive,
    PutDrain,
    PutNode,
    PutView,
    Read,
    Snapshot,
    Steps,
    StoreError,
)
from dfkv_core.membership.view import NodeEntry, NodeState, View, usable

_TRIES = 3


@dataclass(frozen=True)
class Accepted:
    """The node is registered under `lease`."""

    lease: int


@dataclass(frozen=True)
class Refused:
    """Another process holds the id, for as long as it renews its lease."""

    reason: str


@dataclass(frozen=True)
class Busy:
    """etcd or a race came between: ask again."""

    reason: str


Answer = Accepted | Refused | Busy


def judge_beat(held: Held | None, entry: NodeEntry) -> str | None:
    """Why `entry` may not take the id, or None. A restart keeps its address and has a larger incarnation."""
    if held is None or held.entry.state == NodeState.GONE or held.entry.incarnation == entry.incarnation:
        return None
    at = ", ".join(held.entry.tcp)
    same_place = bool(set(held.entry.tcp) & set(entry.tcp))
    if entry.incarnation > held.entry.incarnation:
        if same_place:
            return None
        return f"node id {entry.id!r} is held by another node at {at}"
    if same_place:
        return f"node id {entry.id!r} was taken over by a later start of the node at {at}"
    return f"node id {entry.id!r} is held by another node at {at}, which was started later"


def heartbeat(known: Mapping[str, Held], entry: NodeEntry, lease: int, ttl_s: int) -> Steps[Answer]:
    """Registers or renews. known: the registrations as read lately, see Replica.known().

    A renewal costs one call. A lease alone proves nothing: the key must be the node's own, under that lease."""
    held = known.get(entry.id)
    if lease and held is not None and held.lease == lease and held.entry == entry and (yield KeepAlive(lease)) > 0:
        return Accepted(lease)
    for _ in range(_TRIES):
        held = yield GetNode(entry.id)
        reason = judge_beat(held, entry)
        if reason is not None:
            return Refused(reason)
        own = held is not None and held.lease == lease != 0 and (yield KeepAlive(lease)) > 0
        if not own:
            lease = yield Grant(ttl_s)
        elif held is not None and held.entry == entry:
            return Accepted(lease)
        if (yield PutNode(entry, lease, held.revision if held is not None else 0)):
            return Accepted(lease)
    return Busy(f"node id {entry.id!r} is being registered by several at once")


def drain(node_id: str, undo: bool) -> Steps[NodeEntry | None]:
    """Asks for a node to be drained, or takes that back. None: there is no such node."""
    held: Held | None = yield GetNode(node_id)
    if held is None or held.entry.state == NodeState.GONE:
        return None
    yield PutDrain(node_id, 0 if undo else held.entry.incarnation)
    return held.entry


@dataclass(frozen=True)
class Replica:
    """What one membership service knows. Times are its monotonic clock."""

    memory: Memory
    read_at_s: float | None = None
    """When etcd was last read; None: never."""
    snapshot: Snapshot = field(default_factory=Snapshot)
    view: View | None = None
    """What is told to nodes and clients. Only ever replaced by a newer one."""
    agreed: bool = False
    """The view is what the last look at etcd led to: without a change there is nothing to decide."""
    leap: bool = False
    """etcd was out of reach or comes from a backup: others may have told views that it does not have."""

    @classmethod
    def fresh(cls, now_s: float) -> Replica:
        return cls(Memory(settled_at_s=now_s))

    def known(self, now_s: float, silence_s: float) -> Mapping[str, Held]:
        """The registrations, where the last look is recent enough to answer a heartbeat by it; otherwise none.

        Renewals may get through where reads do not: a key that is lost meanwhile would be missed by nobody."""
        recent = self.read_at_s is not None and now_s - self.read_at_s <= silence_s
        return self.snapshot.nodes if recent else {}


@dataclass(frozen=True)
class Moment:
    """now_s: monotonic; wall_ms: since the epoch; new_cluster_id: for a cluster that has no view yet."""

    now_s: float
    wall_ms: int
    new_cluster_id: bytes


def tick(replica: Replica, moment: Moment, policy: GuardPolicy, silence_s: float) -> Steps[Replica]:
    """Reads etcd, and publishes a view where the nodes have changed. silence_s: longer than this without a read, and
    etcd counts as having been away. Raises StoreError."""
    snapshot: Snapshot = yield Read()
    memory, leap = replica.memory, replica.leap
    away = replica.read_at_s is None or moment.now_s - replica.read_at_s > silence_s
    if away or snapshot.epoch != replica.snapshot.epoch:
        memory, leap = contact_regained(memory, moment.now_s, policy), True
    elif replica.agreed and snapshot == replica.snapshot and at_rest(memory):
        return replace(replica, read_at_s=moment.now_s)
    published = newest(replica.view, snapshot.view)
    if replica.view is not None and published is not None and published != replica.view:
        memory = noticed(memory, replica.view.nodes, published.nodes, moment.now_s, policy)
    decision: Decision = decide(
        published.nodes if published is not None else (),
        {node_id: held.entry for node_id, held in snapshot.nodes.items()},
        snapshot.drained,
        moment.now_s,
        memory,
        policy,
    )
    view = published
    # A view that etcd has lost is put back, with what this replica last told.
    if usable(decision.nodes) and (
        published is None or decision.nodes != published.nodes or published != snapshot.view
    ):
        lost = published is not None and snapshot.view != published
        view = next_view(published, decision.nodes, moment, leap=lost or leap)
        try:
            written = yield PutView(view, snapshot.view_revision)
        except StoreError:
            # It may be done all the same, be read by others, and be lost: its revision is not given again.
            written, leap = 0, True
        if not written:
            # Another replica was quicker, or it is not known: the next read tells. Nothing was decided.
            return Replica(memory, moment.now_s, snapshot, published, agreed=False, leap=leap)
        leap = False
    for node_id, incarnation in snapshot.drained.items():
        held = snapshot.nodes.get(node_id)
        if held is not None and held.entry.incarnation != incarnation:
            yield DropDrain(node_id, incarnation)  # of an earlier start of the node
    return Replica(decision.memory, moment.now_s, snapshot, view, agreed=view == snapshot.view, leap=leap)


def newest(told: View | None, stored: View | None) -> View | None:
    """The later of what this replica has told and what etcd has."""
    if told is None or stored is None:
        return stored or told
    return stored if (stored.cluster_id, stored.revision) >= (told.cluster_id, told.revision) else told


def next_view(published: View | None, nodes: tuple[NodeEntry, ...], moment: Moment, *, leap: bool = False) -> View:
    """Revisions follow the time of day where it goes on, so that an etcd restored from a backup does not fall behind.

    leap: etcd has lost views, or may have. Another replica may have told some that this one never saw: their revisions
    are passed."""
    if published is None:
        return View(moment.new_cluster_id, moment.wall_ms, nodes)
    step = 1000 + int.from_bytes(moment.new_cluster_id[8:10], "big") if leap else 1
    return View(published.cluster_id, max(published.revision + step, moment.wall_ms), nodes)
