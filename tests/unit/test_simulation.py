"""Membership in virtual time: random histories keep every invariant, and each checker finds the fault it is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from dfkv_core.mds import guard, registry, store
from dfkv_core.mds.guard import Decision
from dfkv_core.mds.registry import Accepted, Replica
from dfkv_core.mds.store import Held, KeepAlive, Steps
from dfkv_core.membership import beat as beats
from dfkv_core.membership.view import NodeEntry, NodeState, View
from tests.simulation import actors, world
from tests.simulation.__main__ import run
from tests.simulation.checks import InvariantError
from tests.simulation.history import History

HISTORIES = 2000
MOST_TO_FIND = 400


@pytest.mark.slow
def test_random_histories() -> None:
    """The same histories every time; `make torture` draws others. A failure names its seed: History(SEED).run()."""
    views, failures = run(0, HISTORIES)
    assert not failures, "\n".join(failures[:5])
    assert views > HISTORIES  # something did happen


def _no_settling(memory: guard.Memory, now_s: float, policy: guard.GuardPolicy) -> guard.Memory:
    return memory


def _views_are_what_is_registered(
    published: Any, registered: Mapping[str, NodeEntry], drained: Any, now_s: float, memory: Any, policy: Any
) -> Decision:
    return Decision(tuple(registered[node_id] for node_id in sorted(registered)), memory)


def _any_lease_will_do(known: Mapping[str, Held], entry: NodeEntry, lease: int, ttl_s: int) -> Steps[Any]:
    if lease and (yield KeepAlive(lease)) > 0:
        return Accepted(lease)
    return (yield from _heartbeat(known, entry, lease, ttl_s))


_heartbeat = registry.heartbeat
_next_view = registry.next_view
_accepted = beats.accepted
_apply = world.Etcd.apply


def _last_writer_wins(self: world.Etcd, command: store.Command) -> Any:
    if isinstance(command, store.PutView):
        command = replace(command, revision=self.view_revision)
    return _apply(self, command)


def _revision_of_the_clock(published: Any, nodes: Any, moment: registry.Moment, *, leap: bool = False) -> Any:
    cluster_id = published.cluster_id if published else moment.new_cluster_id
    return View(cluster_id, moment.wall_ms, nodes)


def _start_without_the_disk(self: actors.Client) -> None:
    self.life += 1
    self.view, self.confirmed = None, False


def _dead_stay(before: Mapping[str, NodeEntry], registered: Any, now_s: Any, memory: Any, policy: Any) -> Any:
    return {node_id: node for node_id, node in before.items() if node_id not in registered}, memory


def _next_to_the_published(published: Any, nodes: Any, moment: registry.Moment, *, leap: bool = False) -> Any:
    return _next_view(published, nodes, moment)


def _renewed_late(beat: beats.Beat, now_s: float, lease: int, lease_s: float) -> beats.Beat:
    return replace(_accepted(beat, now_s, lease, lease_s), due_s=now_s + lease_s)


def _whoever_came_last(told: Any, stored: Any) -> Any:
    return stored or told


# What is put back; the invariant that must break; the changes; and, where it takes rare luck, the faults to draw from.
FAULTS: dict[str, tuple[str, list[tuple[Any, str, Any]], tuple[str, ...]]] = {
    "an outage is not waited out": (
        "nothing shrinks within a TTL of an outage",
        [(registry, "contact_regained", _no_settling)],
        ("kill", "etcd_outage"),
    ),
    "views follow the keys": (
        "no empty view",
        [(registry, "decide", _views_are_what_is_registered), (registry, "usable", lambda nodes: True)],
        (),
    ),
    "a lease is taken for a registration": (
        "an answered heartbeat has a key",
        [(registry, "heartbeat", _any_lease_will_do)],
        (),
    ),
    "any process may take an id": (
        "one process holds an id",
        [(registry, "judge_beat", lambda held, entry: None)],
        (),
    ),
    "views are written without comparing": (
        "one owner per view revision",
        [(world.Etcd, "apply", _last_writer_wins)],
        ("grow", "etcd_slow", "flap"),
    ),
    "revisions follow the clock": ("views never go back", [(registry, "next_view", _revision_of_the_clock)], ()),
    "a restored etcd is believed": (
        "views never go back",
        [(registry, "newest", _whoever_came_last)],
        ("etcd_rolls_back",),
    ),
    "revisions that only others have seen are given again": (
        "one owner per view revision",
        [(registry, "next_view", _next_to_the_published)],
        ("etcd_rolls_back", "grow"),
    ),
    "clients take any view": (
        "views never go back",
        [(actors.Client, "_judge", lambda self, known, view: True)],
        ("grow", "cut_client"),
    ),
    "nodes take any view": ("views never go back", [(View, "follows", lambda self, known: True)], ("grow", "cut_node")),
    "each replica believes losses of its own": (
        "losses of many at once wait",
        [(registry, "noticed", lambda memory, *_: memory)],
        ("kill_slowly", "kill_many"),
    ),
    "a flapping node is counted by nobody": (
        "a node that comes and goes waits",
        [(guard, "_wait_s", lambda *_, **__: 0.0)],
        ("flap",),
    ),
    "an old look vouches for heartbeats": (
        "an answered heartbeat has a key",
        [(Replica, "known", lambda self, now_s, silence_s: self.snapshot.nodes)],
        ("etcd_reads_stall",),
    ),
    "an earlier start takes its id back": (
        "an id goes to later starts",
        [(registry, "judge_beat", lambda held, entry: None)],
        ("twin",),
    ),
    "leases are renewed when they end": ("no live node is lost", [(beats, "accepted", _renewed_late)], ()),
    "drains are ignored": (
        "who shall drain drains",
        [(guard, "_wanted", lambda entry, drained: entry.state)],
        ("drain",),
    ),
    "a service starts without the view": (
        "a cluster keeps its id",
        [(registry, "newest", lambda told, stored: told)],
        ("crash_service",),
    ),
    "who leaves is not believed": (
        "who says that it goes is gone at once",
        [(guard, "_wanted", lambda entry, drained: NodeState.SERVING)],
        (),
    ),
    "clients forget": (
        "no client without a view that once had one",
        [(actors.Client, "restart", _start_without_the_disk)],
        (),
    ),
    "the dead stay": ("the dead are gone within TTL and poll", [(guard, "_losses", _dead_stay)], ()),
    "nodes that join are never used": ("no live node is lost", [(guard, "_wait_s", lambda *a, **k: 1e9)], ()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_checkers_find(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    invariant, changes, only = FAULTS[fault]
    for target, name, replacement in changes:
        monkeypatch.setattr(target, name, replacement)
    assert _first_violation(invariant, only) == invariant


def _first_violation(wanted: str, only: tuple[str, ...]) -> str:
    found = set()
    for seed in range(MOST_TO_FIND):
        try:
            History(seed, only).run()
        except InvariantError as error:
            found.add(error.invariant)
            if error.invariant == wanted:
                return error.invariant
    raise AssertionError(f"no such violation in {MOST_TO_FIND} histories; others: {sorted(found) or 'none'}")


def test_a_history_follows_from_its_seed() -> None:
    def record(seed: int) -> list[Any]:
        history = History(seed)
        history.run()
        return [history.etcd.view, [client.view for client in history.clients], history.etcd.revision]

    assert record(11) == record(11)
    assert record(11) != record(12)
