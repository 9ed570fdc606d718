"""The invariants of membership, one method per moment at which they can break. Each failure names its invariant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dfkv_core.membership.view import NodeEntry, NodeState, View
from tests.simulation.actors import CALL_S, POLL_S, TTL_S, USED

if TYPE_CHECKING:
    from tests.simulation.actors import Node
    from tests.simulation.history import History

SLACK_S = 4.0
SAMPLE_S = 5
"""Between two calls of steady()."""
HELD_S = 2 * TTL_S + POLL_S + SLACK_S
"""A loss that the guard holds: a TTL for the lease, a TTL to be believed."""


class InvariantError(AssertionError):
    """invariant: its name; the message adds the seed and the time."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant


class Checks:
    def __init__(self, history: History) -> None:
        self._history = history
        self._owners: dict[tuple[bytes, int], tuple[NodeEntry, ...]] = {}
        self._told: dict[tuple[str, int], View] = {}
        self._last: View | None = None
        self._alone_s = 0.0
        self.views = 0

    def _fail(self, invariant: str, message: str) -> None:
        history = self._history
        raise InvariantError(invariant, f"seed {history.seed}, at {history.world.now_s:.3f} s: {message}")

    def _one_owner(self, view: View) -> None:
        nodes = self._owners.setdefault((view.cluster_id, view.revision), view.nodes)
        if nodes != view.nodes:
            self._fail(
                "one owner per view revision", f"revision {view.revision} is {_text(nodes)} and {_text(view.nodes)}"
            )

    def published(self, view: View) -> None:
        """etcd has a new view."""
        self.views += 1
        self._one_owner(view)
        history = self._history
        last, self._last = self._last, view
        if not any(node.state in USED for node in view.nodes):
            self._fail("no empty view", _text(view.nodes))
        if last is None or last.cluster_id != view.cluster_id:
            return
        listed = {node.id: node for node in view.nodes}
        calm = history.world.calm_for_s()
        for node in last.nodes:
            if node.state not in USED or node.id in listed:
                continue
            # With what etcd has lost, a service may know less than another has told before.
            lost = history.world.now_s - history.etcd.lost_keys_at_s < TTL_S
            if not lost and history.world.now_s - history.etcd_back_s < TTL_S:
                self._fail(
                    "nothing shrinks within a TTL of an outage", f"{node.id} went, etcd back {history.etcd_back_s}"
                )
            # Its heartbeats were answered lately: then it may not go.
            for alive in history.alive(node.id):
                if history.world.now_s - alive.accepted_s < TTL_S / 2 and calm > TTL_S:
                    self._fail("no live node is lost", f"{node.id}: {_text(last.nodes)} -> {_text(view.nodes)}")

    def told(self, service: str, life: int, view: View) -> None:
        """A service has a new view for its followers."""
        self._one_owner(view)
        last = self._told.get((service, life))
        if last is not None and _key(view) <= _key(last):
            self._fail("views never go back", f"{service}: {last.revision} -> {view.revision}")
        self._told[service, life] = view

    def took(self, name: str, life: int, before: View | None, view: View) -> None:
        """A node or a client goes by another view."""
        self._one_owner(view)
        if before is not None and _key(view) <= _key(before) and view.nodes != before.nodes:
            self._fail("views never go back", f"{name}: {before.revision} -> {view.revision}")

    def accepted(self, node: Node) -> None:
        """A heartbeat was answered. The key may lag behind by a poll, not by another heartbeat."""
        history = self._history
        for other in history.alive(node.id):
            # An id whose registration etcd has lost is free for whoever comes first.
            lost = history.world.now_s - history.etcd.lost_keys_at_s < TTL_S
            if other is not node and not lost and history.world.now_s - other.accepted_s < TTL_S / 2:
                self._fail("one process holds an id", f"{node.name} and {other.name}")
        etcd = history.etcd
        etcd.expire()
        held = etcd.nodes.get(node.id)
        missing = held is None or held.entry.incarnation != node.entry.incarnation
        since = history.missing_since_s.setdefault(node.name, history.world.now_s) if missing else None
        if not missing:
            history.missing_since_s.pop(node.name, None)
        elif since is not None and history.world.now_s - since > TTL_S / 3 + POLL_S + CALL_S:
            self._fail("an answered heartbeat has a key", f"{node.name} is answered without one since {since:.1f} s")

    def steady(self) -> None:
        """Now and then: what must hold at any time."""
        history = self._history
        for client in history.clients:
            if client.disk is not None and client.view is None:
                self._fail("no client without a view that once had one", client.name)
        now = history.world.now_s
        if not any(node.up for node in history.nodes):
            self._alone_s = now + SAMPLE_S  # nobody is missed before somebody is there
        if not history.only_nodes_fail or history.etcd.view is None:
            return
        # Nothing but nodes has failed: then the dead are gone in time, and the living are there.
        for node in history.etcd.view.nodes:
            owner = history.node_of(node)
            if owner is None or owner.up or node.state not in USED:
                continue
            within_s = HELD_S if history.mass_loss else TTL_S + POLL_S + SLACK_S
            if now - max(owner.died_s, self._alone_s) > within_s and history.others_alive(node.id):
                self._fail("the dead are gone within TTL and poll", f"{node.id} died at {owner.died_s:.1f} s")

    def at_rest(self) -> None:
        """Everything has been mended for long enough."""
        history = self._history
        living = {node.id for node in history.nodes if node.up and not node.beat.ended}
        if not living:
            return
        for service in history.services:
            view = service.replica.view
            if view is None:
                self._fail("no live node is lost", f"{service.name} has no view")
                return
            used = {node.id for node in view.nodes if node.state in USED}
            if living - used:
                self._fail(
                    "no live node is lost", f"{service.name} misses {sorted(living - used)}: {_text(view.nodes)}"
                )
            if used - living:
                self._fail("the dead are gone within TTL and poll", f"{service.name} lists {sorted(used - living)}")
        for client in history.clients:
            if client.view is None:
                self._fail("no client without a view that once had one", client.name)
            elif not living <= client.uses() <= {node.id for node in history.nodes if node.up}:
                self._fail("no live node is lost", f"{client.name} uses {sorted(client.uses())}, not {sorted(living)}")


def _key(view: View) -> tuple[bytes, int]:
    return view.cluster_id, view.revision


def _text(nodes: tuple[NodeEntry, ...]) -> str:
    return (
        ", ".join(f"{node.id} {NodeState(node.state).name.lower()} {node.incarnation}" for node in nodes) or "nothing"
    )
