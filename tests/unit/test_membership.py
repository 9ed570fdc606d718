"""Membership without a service: one node's view, and a fixed list."""

from __future__ import annotations

import pytest

from dfkv_core.config import NodeConfig, load_config
from dfkv_core.membership import EmbeddedMembership, Membership, NodeEntry, NodeState, StaticMembership, View

ME = NodeEntry(id="a", tcp=("127.0.0.1:1",), incarnation=7, boot_id=bytes(range(16)))


def test_embedded_is_this_node_alone() -> None:
    membership = EmbeddedMembership(start_revision=10)
    with pytest.raises(RuntimeError, match="join"):
        membership.view()
    with pytest.raises(RuntimeError, match="join"):
        membership.set_state(NodeState.DRAINING)
    seen: list[View] = []
    membership.subscribe(seen.append)
    membership.join(ME)
    membership.set_state(NodeState.DRAINING)
    assert [view.revision for view in seen] == [10, 11]
    assert [view.nodes[0].state for view in seen] == [NodeState.SERVING, NodeState.DRAINING]
    assert membership.view() is seen[-1]
    assert len(seen[0].cluster_id) == 16


def test_a_restart_is_the_same_cluster_with_a_larger_revision() -> None:
    first, second = EmbeddedMembership(), EmbeddedMembership()
    first.join(ME)
    first.set_state(NodeState.DRAINING)
    second._start_revision += 1000  # a second later
    second.join(ME)
    assert first.view().cluster_id == second.view().cluster_id
    assert second.view().revision > first.view().revision


def test_other_nodes_are_other_clusters() -> None:
    first, second = EmbeddedMembership(), EmbeddedMembership()
    first.join(ME)
    second.join(NodeEntry(id="b", tcp=("127.0.0.1:2",)))
    assert first.view().cluster_id != second.view().cluster_id


def test_static_view_is_the_same_on_every_node() -> None:
    peers = [("b", "h2:1"), ("a", "h1:1")]
    first = StaticMembership(peers, revision=3)
    second = StaticMembership(list(reversed(peers)), revision=3)
    first.join(ME)
    second.join(NodeEntry(id="b", tcp=("h2:1",), incarnation=9))
    assert first.view() == second.view()
    assert [node.id for node in first.view().nodes] == ["a", "b"]
    assert first.view().revision == 3
    with pytest.raises(ValueError, match="'c'"):
        StaticMembership(peers, revision=3).join(NodeEntry(id="c", tcp=("h3:1",)))
    with pytest.raises(ValueError, match="at least one"):
        StaticMembership([], revision=1)


@pytest.mark.parametrize(
    "membership", [EmbeddedMembership(), StaticMembership([("a", "h:1")], revision=1)], ids=["embedded", "static"]
)
def test_no_listener_runs_after_close(membership: Membership) -> None:
    seen: list[View] = []
    membership.join(ME)
    membership.subscribe(seen.append)
    membership.close()
    membership.close()
    if isinstance(membership, EmbeddedMembership):
        with pytest.raises(RuntimeError, match="closed"):
            membership.set_state(NodeState.GONE)
    assert seen == []


def test_views_survive_the_wire() -> None:
    node = NodeEntry(
        "n-1", ("h:1", "[::1]:2"), 5, bytes(range(16)), NodeState.DRAINING, 50, 0, "z", 3, ("fe80::1",), "/s"
    )
    view = View(bytes(range(16)), 42, (ME, node))  # in the order of the ids, as on the wire
    assert View.decode(view.encode()) == view
    damaged = bytearray(view.encode())
    damaged[-1] ^= 1
    with pytest.raises(ValueError, match=r"view|malformed|digest"):
        View.decode(bytes(damaged))


def test_peers_are_parsed() -> None:
    flags = {"node_id": "a", "peers": "a=h1:1,b=[::1]:2"}
    value = load_config(NodeConfig, flags=flags, environ={}).value
    assert value.peer_addresses() == [("a", "h1:1"), ("b", "[::1]:2")]
