"""Heartbeats, ids and ticks as steps over a model of etcd: who may have an id, and what an answered heartbeat proves."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import pytest

from dfkv_core.mds import registry, store
from dfkv_core.mds.registry import Accepted, Moment, Refused, Replica, judge_beat
from dfkv_core.mds.store import Held, Keys, StoreError
from dfkv_core.membership import beat as beats
from dfkv_core.membership.beat import Beat
from dfkv_core.membership.packing import PackingError, pack, unpack
from dfkv_core.membership.view import NodeEntry, NodeState, View
from tests.simulation.actors import POLICY
from tests.simulation.world import Etcd, World


def node(node_id: str = "a", incarnation: int = 1, at: str = "h:1", state: NodeState = NodeState.SERVING) -> NodeEntry:
    return NodeEntry(node_id, (at,), incarnation, state=state)


class Desk:
    """Runs steps at once on the model of etcd, and counts the calls."""

    def __init__(self) -> None:
        self.world = World(1)
        self.etcd = Etcd(self.world)
        self.calls: list[str] = []

    def run(self, steps: Generator[store.Command, Any, Any]) -> Any:
        try:
            command = next(steps)
            while True:
                self.calls.append(type(command).__name__)
                command = steps.send(self.etcd.apply(command))
        except StopIteration as end:
            return end.value

    def beat(self, entry: NodeEntry, lease: int = 0, known: Mapping[str, Held] | None = None) -> Any:
        self.calls.clear()
        return self.run(registry.heartbeat(self.etcd.nodes if known is None else known, entry, lease, 30))


def test_a_renewal_is_one_call() -> None:
    desk = Desk()
    first = desk.beat(node())
    assert isinstance(first, Accepted)
    assert desk.beat(node(), first.lease) == first
    assert desk.calls == ["KeepAlive"]


def test_a_lease_without_the_key_is_no_registration() -> None:
    desk = Desk()
    first = desk.beat(node())
    desk.etcd.lose_key("a")
    again = desk.beat(node(), first.lease)
    assert isinstance(again, Accepted)
    assert desk.etcd.nodes["a"].lease == again.lease


def test_a_lost_lease_is_replaced() -> None:
    desk = Desk()
    first = desk.beat(node())
    stale = dict(desk.etcd.nodes)
    desk.etcd.revoke("a")
    again = desk.beat(node(), first.lease, stale)
    assert isinstance(again, Accepted)
    assert again.lease != first.lease
    assert desk.etcd.nodes["a"].lease == again.lease


def test_an_old_look_vouches_for_nobody() -> None:
    """Reads fail while renewals get through: the key is asked for."""
    desk = Desk()
    first = desk.beat(node())
    replica = tick(desk, Replica.fresh(0.0), 100.0, 1000)
    desk.etcd.lose_key("a")
    assert desk.beat(node(), first.lease, replica.known(105.0, 5.0)) == first  # it cannot know yet
    again = desk.beat(node(), first.lease, replica.known(105.1, 5.0))
    assert isinstance(again, Accepted)
    assert desk.etcd.nodes["a"].lease == again.lease
    assert Replica.fresh(0.0).known(0.0, 5.0) == {}


def test_a_changed_state_is_written_under_the_same_lease() -> None:
    desk = Desk()
    first = desk.beat(node())
    assert desk.beat(node(state=NodeState.DRAINING), first.lease) == first
    assert desk.etcd.nodes["a"].entry.state == NodeState.DRAINING


def test_who_may_have_an_id() -> None:
    held = Held(node("a", 5, "h:1"), 1, 1)
    assert judge_beat(None, node("a", 1)) is None
    assert judge_beat(held, node("a", 5, "h:1", NodeState.DRAINING)) is None
    assert judge_beat(held, node("a", 6, "h:1")) is None  # restarted
    for other, words in ((node("a", 6, "other:1"), "held by another node at h:1"),):
        assert words in str(judge_beat(held, other))
    assert "taken over" in str(judge_beat(held, node("a", 4, "h:1")))
    assert "started later" in str(judge_beat(held, node("a", 4, "other:1")))
    gone = Held(node("a", 5, "h:1", NodeState.GONE), 1, 1)
    assert judge_beat(gone, node("a", 6, "other:1")) is None
    desk = Desk()
    desk.beat(node("a", 5, "h:1"))
    assert isinstance(desk.beat(node("a", 6, "other:1")), Refused)
    assert desk.etcd.nodes["a"].entry.tcp == ("h:1",)


def tick(desk: Desk, replica: Replica, now_s: float, wall_ms: int) -> Replica:
    moment = Moment(now_s, wall_ms, bytes([1] * 16))
    result: Replica = desk.run(registry.tick(replica, moment, POLICY, 5.0))
    return result


def test_views_are_numbered_by_time_and_always_grow() -> None:
    desk = Desk()
    replica = Replica.fresh(0.0)
    desk.beat(node("a"))
    replica = tick(desk, replica, 0, 1000)
    assert replica.view is not None
    assert replica.view.revision == 1000
    assert tick(desk, replica, 1, 2000).view is replica.view  # nothing has changed
    desk.beat(node("b", at="h:2"))
    replica = tick(desk, replica, 2, 500)  # the clock was set back
    assert replica.view is not None
    assert replica.view.revision == 1001


def test_a_view_that_etcd_has_lost_is_put_back() -> None:
    desk = Desk()
    desk.beat(node("a"))
    replica = tick(desk, Replica.fresh(0.0), 0, 1000)
    told = replica.view
    assert told is not None
    desk.etcd.view, desk.etcd.view_revision = None, 0
    replica = tick(desk, replica, 1, 2000)
    assert desk.etcd.view is not None
    assert desk.etcd.view.cluster_id == told.cluster_id
    # Past what another replica may have told before.
    assert desk.etcd.view.revision >= told.revision + 1000


def test_after_an_outage_revisions_leap() -> None:
    """etcd may come from a backup, and another replica may have told views that it does not have."""
    desk = Desk()
    desk.beat(node("a"))
    replica = tick(desk, Replica.fresh(0.0), 0, 1000)
    replica = tick(desk, replica, 60, 1001)  # a minute without etcd
    desk.beat(node("b", at="h:2"))
    replica = tick(desk, replica, 61, 1002)
    assert replica.view is not None
    assert replica.view.revision >= 1000 + 1000
    desk.beat(node("c", at="h:3"))
    after = tick(desk, replica, 62, 1003).view
    assert after is not None
    assert after.revision == replica.view.revision + 1


def test_a_revision_of_unknown_fate_is_not_given_again() -> None:
    """The write was done and lost: etcd goes back before anybody hears of it."""
    desk = Desk()
    desk.beat(node("a"))
    replica = tick(desk, Replica.fresh(0.0), 0, 1000)
    desk.beat(node("b", at="h:2"))
    steps = registry.tick(replica, Moment(1, 1000, bytes([1] * 16)), POLICY, 5.0)
    steps.send(desk.etcd.apply(next(steps)))
    with pytest.raises(StopIteration) as end:
        steps.throw(StoreError("late"))
    view = tick(desk, end.value.value, 2, 1000).view
    assert view is not None
    assert view.revision >= 1000 + 1000


def test_a_restored_etcd_is_met_with_care() -> None:
    """Even where it was away for less than the silence: revisions leap, and nothing goes for a TTL."""
    desk = Desk()
    for index in range(4):
        desk.beat(node(f"n{index}", at=f"h:{index + 1}"))
    replica = tick(desk, Replica.fresh(0.0), 0, 1000)
    for now_s in range(1, 40):
        replica = tick(desk, replica, now_s, 1000)
    desk.etcd.back_up()
    desk.etcd.stop()
    desk.etcd.start(from_backup=True)
    desk.etcd.lose_key("n3")
    desk.beat(node("n4", at="h:5"))
    replica = tick(desk, replica, 41, 1000)
    assert replica.view is not None
    assert len(replica.view.nodes) == 5
    assert replica.view.revision >= 1000 + 1000
    for now_s in range(42, 72):
        replica = tick(desk, replica, now_s, 1000)
    assert replica.view is not None
    assert [entry.id for entry in replica.view.nodes] == ["n0", "n1", "n2", "n4"]


def test_replicas_count_what_the_others_publish() -> None:
    """A loss that one has believed leaves the other less to believe."""
    desk = Desk()
    for index in range(8):
        desk.beat(node(f"n{index}", at=f"h:{index + 1}"))
    one = tick(desk, Replica.fresh(0.0), 0, 1000)
    other = tick(desk, Replica.fresh(0.0), 0, 1000)
    for now_s in range(1, 40):
        one, other = tick(desk, one, now_s, 1000), tick(desk, other, now_s, 1000)
    for index in (0, 1, 2, 3):
        desk.etcd.lose_key(f"n{index}")
    one = tick(desk, one, 40, 1000)
    other = tick(desk, other, 41, 1000)
    assert [len(replica.view.nodes) for replica in (one, other) if replica.view is not None] == [6, 6]


def test_a_wish_to_drain_goes_with_the_start_it_was_for() -> None:
    desk = Desk()
    desk.beat(node("a", 1))
    desk.run(registry.drain("a", False))
    desk.beat(node("a", 2))
    steps = registry.tick(Replica.fresh(0.0), Moment(0, 1000, bytes([1] * 16)), POLICY, 5.0)
    written = steps.send(desk.etcd.apply(next(steps)))
    drop = steps.send(desk.etcd.apply(written))
    # Between the look at etcd and this, an operator asks again: for the present start.
    desk.run(registry.drain("a", False))
    desk.etcd.apply(drop)
    assert desk.etcd.drained == {"a": 2}


def test_a_tick_whose_write_fails_decides_nothing() -> None:
    desk = Desk()
    desk.beat(node("a"))
    steps = registry.tick(Replica.fresh(0.0), Moment(0, 1000, bytes(16)), POLICY, 5.0)
    snapshot = desk.etcd.apply(next(steps))
    assert isinstance(steps.send(snapshot), store.PutView)
    with pytest.raises(StopIteration) as end:
        steps.throw(StoreError("late"))
    assert end.value.value.view is None


def test_keys_cannot_escape_their_prefix() -> None:
    keys = Keys("g")
    for name in ("a/b", "../view", "a:b c", "ü" * 64, "x" * 200, "%2F", ""):
        key = keys.consumer("mds-1", name)
        assert key.startswith("/dfkv/1/g/consumer/mds-1/")
        assert key.count("/") == keys.consumer("mds-1", "x").count("/")
        assert key.isascii()
    names = {keys.consumer("m", name) for name in ("a/b", "a%2Fb", "a b", "a+b", "A b")}
    assert len(names) == 5


@pytest.mark.parametrize("node_id", ["a/b", "a:b", "a b", "ä", "x" * 129, "", "a\n"])
def test_ids_of_another_form_are_refused(node_id: str) -> None:
    with pytest.raises(ValueError, match="id"):
        View(bytes(16), 1, (node(node_id),)).encode()


def test_beats() -> None:
    beat = Beat(endpoints=2)
    beat = beats.accepted(beat, 100.0, lease=7, lease_s=30.0)
    assert (beat.due_s, beat.lease, beat.failures) == (110.0, 7, 0)
    beat = beats.failed(beat, 110.0)
    assert (beat.endpoint, beat.lease) == (1, 7)
    assert beat.due_s - 110.0 < 1
    pauses = []
    for _ in range(20):
        beat = beats.failed(beat, 200.0)
        pauses.append(beat.due_s - 200.0)
    assert max(pauses) == beats.MAX_RETRY_S  # less than a third of a lease
    assert beats.accepted(beat, 1.0, 8, 30.0).failures == 0
    assert beats.refused(beat).ended


@pytest.mark.parametrize("endpoints", [1, 3])
def test_beats_go_on_after_an_outage_of_days(endpoints: int) -> None:
    beat = Beat(endpoints)
    for _ in range(100_000):
        beat = beats.failed(beat, 200.0)
    assert 0 < beat.due_s - 200.0 <= beats.MAX_RETRY_S
    assert beats.accepted(beat, 1.0, 8, 0.0).due_s > 1.0  # a service that says nonsense is not asked all the time


def test_packing() -> None:
    msgpack = pytest.importorskip("msgpack")
    for value in (
        *(0, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**64 - 1, True, False),
        *("", "ü" * 20, "x" * 300, b"", b"x" * 300, b"y" * 70000, [], [1, [2, ["a"]]], list(range(20))),
        *({}, {1: 2}, {131: "why", 4: b"x"}, {i: i for i in range(20)}, {"text": 1}),
    ):
        assert unpack(pack(value)) == value
        assert unpack(bytes(msgpack.packb(value, use_bin_type=True))) == value
        assert msgpack.unpackb(pack(value), strict_map_key=False) == value


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc0", b"\x81\x01", b"\x82\x01\x01\x01\x02", b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\x01\x01",
     b"\xa1\xff", b"\x91" * 40 + b"\x01", b"\xff", b"\x81\x90\x01"],
)  # fmt: skip
def test_what_is_malformed_is_refused(data: bytes) -> None:
    with pytest.raises(PackingError):
        unpack(data)
