"""The invariants of membership, one method per moment at which they can break. Each failure names its invariant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dfkv_core.membership.view import USED_STATES, NodeEntry, NodeState, View, usable
from tests.simulation.actors import CALL_S, ETCD_CALL_S, POLICY, POLL_S
from tests.simulation.world import TTL_S, describe

if TYPE_CHECKING:
    from tests.simulation.actors import Node
    from tests.simulation.history import History

SLACK_S = 4.0
SAMPLE_S = 5
"""Between two calls of steady()."""
HELD_S = 2 * TTL_S + POLL_S + SLACK_S
"""A loss that the guard holds: a TTL for the lease, a TTL to be believed."""
SKEW_S = 2 * ETCD_CALL_S
"""Between a decision and its view in etcd: at most one read and one write."""


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
        self._written: set[tuple[bytes, int]] = set()
        self._heard: set[tuple[bytes, int]] = set()
        self._last: View | None = None
        self._losses: list[tuple[str, float, bool]] = []
        """Of published nodes that went: id, when, and whether the key had been gone for less than a TTL."""
        self._listed_since_s: dict[str, float] = {}
        self._left_out_since_s: dict[str, float] = {}
        self._arrivals_s: dict[str, list[float]] = {}
        self._missing_since_s: dict[Node, float] = {}
        self._alone_s = 0.0
        self.views = 0

    def _fail(self, invariant: str, message: str) -> None:
        history = self._history
        raise InvariantError(invariant, f"seed {history.seed}, at {history.world.now_s:.3f} s: {message}")

    def _one_owner(self, view: View) -> None:
        nodes = self._owners.setdefault((view.cluster_id, view.revision), view.nodes)
        if nodes != view.nodes:
            self._fail(
                "one owner per view revision",
                f"revision {view.revision} is {describe(nodes)} and {describe(view.nodes)}",
            )

    def published(self, view: View) -> None:
        """etcd has a new view."""
        self.views += 1
        self._written.add(_key(view))
        self._one_owner(view)
        history = self._history
        last, self._last = self._last, view
        if not usable(view.nodes):
            self._fail("no empty view", describe(view.nodes))
        self._flaps(last.nodes if last is not None else (), view.nodes)
        if last is None:
            return
        if last.cluster_id != view.cluster_id:
            self._fail("a cluster keeps its id", f"{last.cluster_id.hex()} -> {view.cluster_id.hex()}")
        self._mass_losses(last.nodes, view.nodes)
        listed = {node.id: node for node in view.nodes}
        for node in last.nodes:
            if node.state not in USED_STATES or node.id in listed:
                continue
            # With what etcd has lost, a service may know less than another has told before.
            lost = history.world.now_s - history.etcd.lost_keys_at_s < TTL_S
            if not lost and history.world.now_s - history.etcd_back_s < TTL_S:
                self._fail(
                    "nothing shrinks within a TTL of an outage", f"{node.id} went, etcd back {history.etcd_back_s}"
                )
            for alive in history.alive(node.id):
                if not lost and history.world.now_s - alive.served_since_s() > TTL_S + SLACK_S:
                    self._fail("no live node is lost", f"{node.id}: {describe(last.nodes)} -> {describe(view.nodes)}")

    def _mass_losses(self, before: Sequence[NodeEntry], after: Sequence[NodeEntry]) -> None:
        """Of more than a share of the nodes within a TTL, only those go that have been missing for a TTL."""
        history, now_s = self._history, self._history.world.now_s
        left = {node.id for node in after}
        lost = [node for node in before if node.id not in left and node.state != NodeState.GONE]
        if now_s - history.etcd.lost_keys_at_s < TTL_S + SKEW_S:
            lost = []  # views may go back with what etcd has lost, and nodes with them
        # A service may overlook one that is soon back.
        back = left - {node.id for node in before}
        recent = [
            (node_id, at_s, early)
            for node_id, at_s, early in self._losses
            if at_s > now_s - TTL_S - SKEW_S and not (node_id in back and at_s > now_s - POLL_S - SKEW_S)
        ]
        used = sum(node.state in USED_STATES for node in before)
        allowed = max(1, int(POLICY.loss_share * (used + len(recent))))
        gone_at_s = history.etcd.gone_at_s
        # A service counts from when it began to look, and a slow look may find what went after that.
        enough_s = TTL_S - SKEW_S
        self._losses = recent + [(n.id, now_s, now_s - gone_at_s.get(n.id, now_s) < enough_s) for n in lost]
        early = sum(early for _, at_s, early in self._losses if at_s > now_s - TTL_S + SKEW_S)
        if any(early for _, at_s, early in self._losses if at_s == now_s) and early > allowed:
            self._fail("losses of many at once wait", f"{early} within a TTL, of {used}: {describe(lost)}")

    def _flaps(self, before: Sequence[NodeEntry], after: Sequence[NodeEntry]) -> None:
        """A node that comes and goes is not used at once."""
        history, now_s = self._history, self._history.world.now_s
        used_before = {node.id for node in before if node.state in USED_STATES}
        listed = {node.id: node for node in after if node.state != NodeState.GONE}
        for node_id in self._listed_since_s.keys() - listed.keys():
            del self._listed_since_s[node_id]
            self._left_out_since_s[node_id] = now_s
        for node_id, node in listed.items():
            if node_id not in self._listed_since_s:
                self._listed_since_s[node_id] = now_s
                # A service may overlook a short absence; and what it finds at its start did not come.
                away_s = now_s - self._left_out_since_s.get(node_id, -TTL_S)
                if min(away_s, now_s) > POLL_S + SKEW_S:
                    self._arrivals_s.setdefault(node_id, []).append(now_s)
            if node_id in used_before or node.state not in USED_STATES or not history.services_stay:
                continue
            arrivals = [at for at in self._arrivals_s.get(node_id, ()) if at > now_s - POLICY.flap_window_s + SKEW_S]
            waited_s = now_s - self._listed_since_s[node_id]
            others = [other for other in used_before & listed.keys() if other in history.etcd.nodes]
            if len(arrivals) >= POLICY.flap_arrivals and waited_s < TTL_S - SKEW_S and others:
                self._fail("a node that comes and goes waits", f"{node_id} came at {arrivals}")

    def registered(self, held: NodeEntry | None, entry: NodeEntry) -> None:
        """etcd has another entry for an id, in place of `held`."""
        if held is None or held.state == NodeState.GONE or held.incarnation <= entry.incarnation:
            return
        self._fail("an id goes to later starts", f"{describe((held,))} -> {describe((entry,))}")

    def restored(self) -> None:
        """etcd comes from a backup, or without its data: a view that nobody told has never been."""
        if self._last is not None and _key(self._last) not in self._heard:
            self._last = self._history.etcd.view

    def told(self, service: str, life: int, view: View) -> None:
        """A service has a new view for its followers."""
        if _key(view) not in self._written:
            self._fail("what is told was agreed on", f"{service} tells revision {view.revision}")
        self._one_owner(view)
        self._heard.add(_key(view))
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
            if other.address == node.address:
                continue  # a later start takes over, and the earlier one must soon find its key gone: below
            if other is not node and not lost and history.world.now_s - other.accepted_s < TTL_S / 2:
                self._fail("one process holds an id", f"{node.name} and {other.name}")
        etcd = history.etcd
        etcd.expire()
        held = etcd.nodes.get(node.id)
        missing = held is None or held.entry.incarnation != node.entry.incarnation
        since = self._missing_since_s.setdefault(node, history.world.now_s) if missing else None
        if not missing:
            self._missing_since_s.pop(node, None)
        elif since is not None and history.world.now_s - since > TTL_S / 3 + POLL_S + CALL_S:
            self._fail("an answered heartbeat has a key", f"{node.name} is answered without one since {since:.1f} s")

    def steady(self) -> None:
        """Now and then: what must hold at any time."""
        history = self._history
        for client in history.clients:
            if client.disk is not None and client.view is None:
                self._fail("no client without a view that once had one", client.name)
        now = history.world.now_s
        held = history.etcd.nodes
        if not any(node.up and node.id in held and held[node.id].entry == node.entry for node in history.nodes):
            self._alone_s = now + SAMPLE_S  # nobody is missed before somebody is there
        if not history.only_nodes_fail or history.etcd.view is None:
            return
        # Nothing but nodes has failed: then the dead are gone in time, and the living are there.
        for node in history.etcd.view.nodes:
            owner = history.node_of(node)
            if owner is None or owner.up or node.state not in USED_STATES:
                continue
            left_s = owner.left_s
            if left_s is not None and now - max(left_s, self._alone_s) > POLL_S + SLACK_S:
                self._fail("who says that it goes is gone at once", f"{node.id} left at {left_s:.1f} s")
            within_s = HELD_S if history.mass_loss else TTL_S + POLL_S + SLACK_S
            if now - max(owner.died_s, self._alone_s) > within_s:
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
            if view != history.etcd.view:
                self._fail("the newest view is everywhere", service.name)
            for node in view.nodes:
                drains = history.etcd.wished.get(node.id) == node.incarnation
                if node.id in living and drains != (node.state == NodeState.DRAINING):
                    self._fail("who shall drain drains", f"{service.name}: {describe((node,))}")
            used = {node.id for node in view.nodes if node.state in USED_STATES}
            if living - used:
                self._fail(
                    "no live node is lost", f"{service.name} misses {sorted(living - used)}: {describe(view.nodes)}"
                )
            if used - living:
                self._fail("the dead are gone within TTL and poll", f"{service.name} lists {sorted(used - living)}")
        for follower in (*history.clients, *(node for node in history.nodes if node.up)):
            if follower.view != history.etcd.view:
                self._fail("the newest view is everywhere", follower.name)
        for client in history.clients:
            if client.view is None:
                self._fail("no client without a view that once had one", client.name)
            elif not living <= client.uses() <= {node.id for node in history.nodes if node.up}:
                self._fail("no live node is lost", f"{client.name} uses {sorted(client.uses())}, not {sorted(living)}")


def _key(view: View) -> tuple[bytes, int]:
    return view.cluster_id, view.revision
