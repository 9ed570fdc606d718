"""Membership from a fixed list: several nodes without any service, the same list on each of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from dfkv_core.membership.base import LocalMembership
from dfkv_core.membership.view import NodeEntry, NodeState, View


class StaticMembership(LocalMembership):
    """The configured list as a view. Every node publishes the same bytes: incarnations and states, which only one
    node would know, are left out. The list is the truth: a node that is down is found by its connections."""

    def __init__(self, peers: Sequence[tuple[str, str]], *, revision: int, cluster: str = "static") -> None:
        """peers: (id, "host:port"). revision: grows with every change of the list."""
        super().__init__()
        if not peers:
            raise ValueError("a static membership needs at least one node")
        cluster_id = hashlib.sha256(b"dfkv.static.1" + cluster.encode()).digest()[:16]
        nodes = tuple(NodeEntry(id=node_id, tcp=(address,)) for node_id, address in sorted(peers))
        self._configured = View(cluster_id, revision, nodes)

    def join(self, entry: NodeEntry) -> None:
        ids = [node.id for node in self._configured.nodes]
        if entry.id not in ids:
            raise ValueError(f"this node is {entry.id!r}, which is not in the list of peers {ids}")
        self._publish(lambda _: self._configured)

    def set_state(self, state: NodeState) -> None:
        """Does nothing: no other node would learn of it."""
