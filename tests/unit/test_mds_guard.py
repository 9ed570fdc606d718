"""The view guard and the node-state machine as functions: what is published when nodes come, go, flap, or seem to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from dfkv_core.mds.guard import Decision, GuardPolicy, Memory, contact_regained, decide, noticed
from dfkv_core.membership.view import NodeEntry, NodeState

POLICY = GuardPolicy()
TTL_S = POLICY.ttl_s


def node(node_id: str, incarnation: int = 1, state: NodeState = NodeState.SERVING) -> NodeEntry:
    return NodeEntry(node_id, (f"{node_id}:7440",), incarnation, state=state)


class Replica:
    """decide() with a clock that the test moves: what one service would publish."""

    def __init__(self, settled: bool = True) -> None:
        self.now_s = 1000.0
        self.memory = Memory(settled_at_s=0.0)
        self.nodes: tuple[NodeEntry, ...] = ()
        self.drained: dict[str, int] = {}
        if not settled:
            self.memory = contact_regained(self.memory, self.now_s, POLICY)

    def sees(self, registered: Iterable[NodeEntry], after_s: float = 1.0) -> dict[str, str]:
        """State by id of the view after looking at etcd once more."""
        self.now_s += after_s
        decision: Decision = decide(
            self.nodes, {entry.id: entry for entry in registered}, self.drained, self.now_s, self.memory, POLICY
        )
        self.nodes, self.memory = decision.nodes, decision.memory
        return {entry.id: entry.state.name.lower() for entry in self.nodes}


def many(count: int) -> list[NodeEntry]:
    return [node(f"n{i:02}") for i in range(count)]


def test_growth_is_believed_at_once() -> None:
    replica = Replica()
    assert replica.sees(many(1)) == {"n00": "serving"}
    assert set(replica.sees(many(40)).values()) == {"serving"}
    assert [entry.id for entry in replica.nodes] == sorted(entry.id for entry in many(40))


def test_an_empty_registry_is_never_believed() -> None:
    replica = Replica()
    before = replica.sees(many(3))
    for _ in range(5):
        assert replica.sees([], after_s=10 * TTL_S) == before
    # As soon as somebody is there again, the others are missed like any node.
    assert replica.sees([node("n00")]).keys() == {"n00", "n02"}
    assert replica.sees([node("n00")], after_s=TTL_S).keys() == {"n00"}


def test_one_lost_node_goes_at_once() -> None:
    replica = Replica()
    replica.sees(many(8))
    assert replica.sees(many(7)).keys() == {entry.id for entry in many(7)}


def test_a_loss_at_once_is_believed_only_when_it_lasts() -> None:
    replica = Replica()
    replica.sees(many(16))
    assert len(replica.sees(many(4))) == 12  # a quarter
    assert len(replica.sees(many(4), after_s=TTL_S - 2)) == 12
    assert len(replica.sees(many(4), after_s=2)) == 4


def test_nodes_that_come_back_in_time_were_never_away() -> None:
    replica = Replica()
    replica.sees(many(16))
    kept = {entry.id for entry in replica.nodes if entry.id in replica.sees(many(4))}
    back = replica.sees(many(16), after_s=TTL_S / 2)
    assert back == {entry.id: "serving" for entry in many(16)}
    assert len(kept) == 12


def test_a_loss_bit_by_bit_is_slowed_down() -> None:
    replica = Replica()
    replica.sees(many(16))
    sizes = [len(replica.sees(many(16 - gone), after_s=1)) for gone in range(1, 13)]
    assert sizes[:4] == [15, 14, 13, 12]
    assert sizes[4:] == [12] * 8  # more than a quarter within one TTL
    assert len(replica.sees(many(4), after_s=2 * TTL_S)) == 4


def test_a_flapping_node_waits_longer_each_time() -> None:
    replica = Replica()
    waits = []
    for _ in range(6):
        replica.sees([node("a"), node("b")], after_s=40)
        waited = 0
        while dict(replica.sees([node("a"), node("b")], after_s=1))["b"] == "joining":
            waited += 1
        waits.append(waited)
        replica.sees([node("a")], after_s=1)
    assert waits[:2] == [0, 0]
    assert waits == sorted(waits)
    assert TTL_S <= waits[-1] + 45 <= POLICY.max_wait_s
    # Long after, it is like any other.
    assert replica.sees([node("a"), node("b")], after_s=2 * POLICY.flap_window_s)["b"] == "serving"


def test_after_an_outage_nothing_goes_for_a_ttl() -> None:
    replica = Replica()
    replica.sees(many(8))
    replica.memory = contact_regained(replica.memory, replica.now_s, POLICY)
    for _ in range(int(TTL_S) - 1):
        assert len(replica.sees(many(7), after_s=1)) == 8
    assert len(replica.sees(many(7), after_s=1)) == 7


def test_replicas_that_disagree_do_not_undo_each_other() -> None:
    one, other = Replica(), Replica()
    one.sees([node("a"), node("b")])
    for _ in range(4):  # only one of them has seen b flap
        one.sees([node("a")], after_s=5)
        one.sees([node("a"), node("b")], after_s=5)
    assert {entry.id: entry.state for entry in one.nodes}["b"] == NodeState.JOINING
    other.now_s, other.nodes = one.now_s, one.nodes
    assert other.sees([node("a"), node("b")])["b"] == "joining"
    # And one that is in use is not put back by the replica that remembers.
    other.nodes = tuple(replace(entry, state=NodeState.SERVING) for entry in other.nodes)
    one.nodes = other.nodes
    assert one.sees([node("a"), node("b")])["b"] == "serving"
    # A restarted replica that finds it joining waits a TTL and no longer.
    fresh = Replica()
    fresh.nodes = (node("a"), node("b", state=NodeState.JOINING))
    assert fresh.sees([node("a"), node("b")])["b"] == "joining"
    assert fresh.sees([node("a"), node("b")], after_s=TTL_S)["b"] == "serving"


def test_what_others_publish_counts() -> None:
    """Two replicas take turns: a node that flaps before both waits as before one."""
    replicas = [Replica(), Replica()]
    seen = []
    for turn in range(12):
        one, other = replicas[turn % 2], replicas[1 - turn % 2]
        before = other.nodes
        state = one.sees([node("a"), *([node("b")] if turn % 2 else [])], after_s=20)
        other.now_s, other.nodes = one.now_s, one.nodes
        other.memory = noticed(other.memory, before, one.nodes, one.now_s, POLICY)
        seen.append(state.get("b", "absent"))
    assert seen[:4] == ["absent", "serving", "absent", "serving"]
    assert set(seen[5:]) == {"absent", "joining"}
    assert len(replicas[0].memory.arrivals_at_s["b"]) == len(replicas[1].memory.arrivals_at_s["b"]) == 6


def test_ids_that_never_come_again_are_forgotten() -> None:
    replica = Replica()
    for index in range(100):
        replica.sees([node("a"), node(f"pod-{index}")], after_s=POLICY.flap_window_s / 10)
    assert len(replica.memory.arrivals_at_s) < 15


def test_another_incarnation_takes_the_place() -> None:
    replica = Replica()
    replica.sees([node("a", 1), node("b", 1)])
    replica.sees([node("a", 2), node("b", 1)])
    assert [(entry.id, entry.incarnation, entry.state) for entry in replica.nodes] == [
        ("a", 2, NodeState.SERVING),
        ("b", 1, NodeState.SERVING),
    ]


def test_states() -> None:
    replica = Replica()
    replica.sees([node("a"), node("b")])
    # An operator drains this start of b.
    replica.drained = {"b": 1}
    assert replica.sees([node("a"), node("b")]) == {"a": "serving", "b": "draining"}
    replica.drained = {}
    assert replica.sees([node("a"), node("b")])["b"] == "serving"
    # The wish does not outlive the process it was for.
    replica.drained = {"b": 1}
    assert replica.sees([node("a"), node("b", 2)])["b"] == "serving"
    # The node says itself that it drains, and that it is gone; then it is not missed.
    assert replica.sees([node("a"), node("b", 2, NodeState.DRAINING)])["b"] == "draining"
    assert replica.sees([node("a"), node("b", 2, NodeState.GONE)])["b"] == "gone"
    assert replica.sees([node("a")]) == {"a": "serving"}


def test_somebody_is_always_used() -> None:
    replica = Replica()
    for _ in range(5):
        replica.sees([node("a"), node("b")], after_s=5)
        replica.sees([node("a")], after_s=5)
    replica.sees([node("a"), node("b")], after_s=5)
    # a dies while b still waits.
    assert replica.sees([node("b")], after_s=5)["b"] == "serving"


@pytest.mark.parametrize("lost", [1, 5, 20])
def test_every_dead_node_is_gone_in_the_end(lost: int) -> None:
    replica = Replica()
    replica.sees(many(24))
    left = many(24 - lost)
    for _ in range(int(2 * TTL_S)):
        replica.sees(left, after_s=1)
    assert {entry.id for entry in replica.nodes} == {entry.id for entry in left}
