"""Nodes, membership services and clients in virtual time. What they decide is the code of dfkv_core; this is the plumbing."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any

from dfkv_core.mds import registry, store
from dfkv_core.mds.guard import GuardPolicy
from dfkv_core.mds.registry import Accepted, Busy, Moment, Replica
from dfkv_core.mds.store import Steps, StoreError
from dfkv_core.membership import beat as beats
from dfkv_core.membership.beat import Beat
from dfkv_core.membership.view import USED_STATES, NodeEntry, NodeState, View, usable
from tests.simulation.world import TTL_S, describe

if TYPE_CHECKING:
    from tests.simulation.history import History

POLL_S = 4.0
SILENCE_S = 5.0
CALL_S = 3.0
ETCD_CALL_S = 1.5
FOLLOW_S = 10.0
POLICY = GuardPolicy(ttl_s=TTL_S, max_wait_s=60.0)


class Service:
    """One replica of the membership service."""

    def __init__(self, history: History, name: str) -> None:
        self.history = history
        self.world = history.world
        self.name = name
        self.life = 0
        self.up = False
        self.changed_s = 0.0
        self.replica = Replica.fresh(0.0)
        self.followers: set[Follower] = set()
        self._ticking = self._nudged = False
        self._polls = 0
        # Clocks of machines differ, and are set right: then views have revisions from the future.
        self.clock_ahead_s = self.world.random.choice((0.0, -2.0, 0.3, 3600.0, 3600.0))
        self.clock_right_s = self.world.random.choice((25.0, 1e9))
        self.start()

    def start(self) -> None:
        self.world.trace(self.name, "starts")
        self.life += 1
        self.up = True
        self.replica = Replica.fresh(self.world.now_s)
        self.changed_s = self.world.now_s
        self.world.disturb()
        self._ticking = self._nudged = False
        self._polls = 0
        self._poll(self.life)

    def crash(self) -> None:
        self.world.trace(self.name, "crashes")
        self.up = False
        self.life += 1
        self.followers.clear()
        self.world.disturb()

    def healthy_since_s(self) -> float:
        """Since when it runs and is close to an etcd that is quick; infinite while it is not."""
        network, etcd = self.history.network, self.history.etcd
        if not self.up or not etcd.up or etcd.slow_s or etcd.reads_stall:
            return inf
        return max(self.changed_s, etcd.changed_s, network.linked_since_s(self.name, "etcd"))

    def _nudge(self) -> None:
        """Looks at etcd now, or as soon as the present look is over."""
        if self._ticking:
            self._nudged = True
        else:
            self._poll(self.life)

    def _poll_later(self, life: int) -> None:
        self._polls += 1
        mine = self._polls
        self.world.after(POLL_S, lambda: self._poll(life) if mine == self._polls and not self._ticking else None)

    def _poll(self, life: int) -> None:
        if life != self.life:
            return
        self._ticking, self._nudged = True, False
        cluster_id = struct.pack(">Q", self._wall_ms()) + self.world.random.randbytes(8)
        moment = Moment(self.world.now_s, self._wall_ms(), cluster_id)

        def done(replica: Replica | None) -> None:
            if replica is not None:
                before = self.replica.view
                self.replica = replica
                if replica.view is not None and replica.view != before:
                    self.world.trace(self.name, "tells", replica.view.revision, describe(replica.view.nodes))
                    self.history.checks.told(self.name, life, replica.view)
                    for follower in list(self.followers):
                        self._tell(follower)
            self._ticking = False
            if self._nudged:
                self._poll(life)
            else:
                self._poll_later(life)

        self._run(registry.tick(self.replica, moment, POLICY, SILENCE_S), life, done)

    def _wall_ms(self) -> int:
        ahead_s = self.clock_ahead_s if self.world.now_s < self.clock_right_s else 0.0
        return 1_700_000_000_000 + int((self.world.now_s + ahead_s) * 1000)

    def _run(self, steps: Steps[Any], life: int, done: Callable[[Any], None]) -> None:
        """Drives steps over the modelled etcd. done(None): etcd failed."""

        def send(value: Any, error: StoreError | None) -> None:
            if life != self.life:
                return
            try:
                command = steps.throw(error) if error is not None else steps.send(value)
            except StopIteration as end:
                done(end.value)
            except StoreError:
                done(None)
            else:
                self._call(command, send)

        send(None, None)

    def _call(self, command: store.Command, send: Callable[[Any, StoreError | None], None]) -> None:
        etcd, world = self.history.etcd, self.world
        started_s = world.now_s

        def reached() -> bool:
            return self.history.network.passes(self.name, "etcd") and etcd.up

        def late() -> None:
            world.after(max(0.0, started_s + ETCD_CALL_S - world.now_s), lambda: send(None, StoreError("no answer")))

        def apply() -> None:
            if not reached() or (etcd.reads_stall and isinstance(command, store.Read)):
                return late()
            value = etcd.apply(command)
            if world.now_s > started_s + ETCD_CALL_S or not reached():
                return late()  # it was done all the same
            world.after(0.002, lambda: send(value, None) if reached() else late())
            return None

        world.after(0.002 + etcd.slow_s * world.random.random(), apply)

    def announce(self, entry: NodeEntry, lease: int, reply: Callable[[Any], None]) -> None:
        if not self.up:
            return
        held = self.replica.snapshot.nodes.get(entry.id)

        def done(answer: Any) -> None:
            if isinstance(answer, Accepted) and (held is None or held.entry != entry):
                self._nudge()
            reply(answer or Busy("etcd"))

        known = self.replica.known(self.world.now_s, SILENCE_S)
        self._run(registry.heartbeat(known, entry, lease, TTL_S), self.life, done)

    def drain(self, node_id: str, undo: bool) -> None:
        if self.up:
            self._run(registry.drain(node_id, undo), self.life, lambda _: None)

    def follow(self, follower: Follower) -> None:
        if self.up:
            self.followers.add(follower)
            self._tell(follower)

    def _tell(self, follower: Follower) -> None:
        view = self.replica.view
        if view is not None:
            self.history.network.send(self.name, follower.name, lambda: follower.offered(view, self))


class Follower(ABC):
    """What nodes and clients share: a view from one service after the other."""

    def __init__(self, history: History, name: str) -> None:
        self.history = history
        self.world = history.world
        self.name = name
        self.up = True
        self.life = 0
        self.view: View | None = None
        self._service = self.world.random.randrange(len(history.services))
        self._heard_s = 0.0

    def keep_following(self, life: int) -> None:
        """Every few seconds, as the long poll does: asks the service again, or the next one where it is silent."""
        if life != self.life:
            return
        services = self.history.services
        if self.world.now_s - self._heard_s > FOLLOW_S:
            self._service = (self._service + 1) % len(services)
        service = services[self._service]

        def asked() -> None:
            service.follow(self)
            if service.up:
                self.history.network.send(service.name, self.name, self._heard)

        self.history.network.send(self.name, service.name, asked)
        self.world.after(FOLLOW_S, lambda: self.keep_following(life))

    def _heard(self) -> None:
        self._heard_s = self.world.now_s

    @abstractmethod
    def offered(self, view: View, service: Service) -> None: ...


class Node(Follower):
    """A cache node: alive or not, announced by heartbeats."""

    def __init__(self, history: History, node_id: str, address: str) -> None:
        super().__init__(history, f"{node_id}@{address}")
        self.id = node_id
        self.address = address
        self.up = False
        self.entry = NodeEntry(node_id, (address,))
        self.beat = Beat(len(history.services))
        self.died_s = 0.0
        self.left_s: float | None = None
        """When a service heard that it goes."""
        self.started_s = 0.0
        self.frozen_until_s = 0.0
        self.accepted_s = -1000.0
        self.start()

    def start(self) -> None:
        self.up = True
        self.life += 1
        self.started_s, self.left_s = self.world.now_s, None
        self.accepted_s, self.view = -1000.0, None
        incarnation = 1 + int(self.world.now_s * 1000)
        self.entry = NodeEntry(self.id, (self.address,), incarnation)
        self.world.trace(self.name, "starts", incarnation)
        self.beat = Beat(len(self.history.services), self.world.random.randrange(len(self.history.services)))
        self._beat_now(self.life)
        self.keep_following(self.life)

    def kill(self) -> None:
        self.world.trace(self.name, "dies")
        self.up = False
        self.life += 1
        self.died_s = self.world.now_s

    def leave(self) -> None:
        """A clean stop: one last announcement, then nothing."""
        self.world.trace(self.name, "leaves")
        self.entry = replace(self.entry, state=NodeState.GONE)
        service = self.history.services[self.beat.endpoint]
        entry, lease = self.entry, self.beat.lease

        def reply(answer: Any) -> None:
            if isinstance(answer, Accepted) and not self.up:
                self.left_s = self.world.now_s

        if lease:
            self.history.network.send(self.name, service.name, lambda: service.announce(entry, lease, reply))
        self.kill()

    def freeze(self, duration_s: float) -> None:
        """Nothing of it runs for a while; then it goes on as if no time had passed."""
        self.world.trace(self.name, "freezes for", duration_s)
        self.frozen_until_s = max(self.frozen_until_s, self.world.now_s + duration_s)

    def served_since_s(self) -> float:
        """Since when it runs and reaches a service that can do its work; infinite while it does not."""
        network = self.history.network
        if not self.up or self.beat.ended or self.world.now_s < self.frozen_until_s:
            return inf
        services = (
            max(service.healthy_since_s(), network.linked_since_s(self.name, service.name))
            for service in self.history.services
        )
        return max(min(services), self.started_s, self.frozen_until_s)

    def _awake(self, event: Callable[[], None]) -> None:
        """Now, or when it is no longer frozen."""
        if self.world.now_s < self.frozen_until_s:
            self.world.after(self.frozen_until_s - self.world.now_s, lambda: self._awake(event))
        else:
            event()

    def _beat_now(self, life: int) -> None:
        if life != self.life or self.beat.ended:
            return
        service = self.history.services[self.beat.endpoint]
        entry, lease, answered = self.entry, self.beat.lease, [False]

        def reply(answer: Any) -> None:
            self.history.network.send(service.name, self.name, lambda: self._awake(lambda: finish(answer)))

        def finish(answer: Any) -> None:
            if answered[0] or life != self.life:
                return
            answered[0] = True
            now = self.world.now_s
            self.world.trace(self.name, "is answered by", service.name, answer)
            if isinstance(answer, Accepted):
                self.accepted_s = now
                self.beat = beats.accepted(self.beat, now, answer.lease, TTL_S)
                self.history.checks.accepted(self)
            elif answer is None:
                self.beat = beats.failed(self.beat, now)
            elif isinstance(answer, Busy):
                self.beat = beats.busy(self.beat, now)
            else:
                self.beat = beats.refused(self.beat)
                if self.accepted_s < 0:
                    self.kill()  # it ends with an error
                return
            pause_s = max(0.0, self.beat.due_s - now)
            self.world.after(pause_s, lambda: self._awake(lambda: self._beat_now(life)))

        self.history.network.send(self.name, service.name, lambda: service.announce(entry, lease, reply))
        self.world.after(CALL_S, lambda: self._awake(lambda: finish(None)))

    def offered(self, view: View, service: Service) -> None:
        if self.up and self.world.now_s >= self.frozen_until_s and view.follows(self.view):
            self.history.checks.took(self.name, self.life, self.view, view)
            self.view = view


class Client(Follower):
    """An engine: the native client's rules for views (native/net/client_view.cpp), and what it keeps on disk."""

    def __init__(self, history: History, name: str) -> None:
        super().__init__(history, name)
        self.confirmed = False
        self.disk: View | None = None
        self.kept: dict[str, NodeEntry] = {}
        self.keep_following(self.life)

    def restart(self) -> None:
        """With nobody to ask it begins with what is on disk."""
        self.world.trace(self.name, "restarts")
        self.life += 1
        self.view, self.confirmed, self.kept = self.disk, False, {}
        self.keep_following(self.life)

    def uses(self) -> set[str]:
        """Ids of the nodes it reads from."""
        listed = {node.id for node in self.view.nodes if node.state in USED_STATES} if self.view else set()
        return listed | {entry.id for entry in self.kept.values() if self.reaches(entry)}

    def reaches(self, entry: NodeEntry) -> bool:
        """Whether its own connection to that node answers."""
        now_s, network = self.world.now_s, self.history.network
        nodes = [node for node in self.history.alive(entry.id) if node.address in entry.tcp]
        return any(now_s >= node.frozen_until_s and network.linked(self.name, node.name) for node in nodes)

    def offered(self, view: View, service: Service) -> None:
        known = self.view
        if not usable(view.nodes) or (known is not None and not self._judge(known, view)):
            return
        same_cluster = known is not None and view.cluster_id == known.cluster_id
        if known is not None and self.confirmed and same_cluster:
            listed = {node.id for node in view.nodes}
            missing = {node.id: node for node in known.nodes if node.state in USED_STATES}
            candidates = {**self.kept, **missing}
            self.kept = {
                node_id: node for node_id, node in candidates.items() if node_id not in listed and self.reaches(node)
            }
        else:
            self.kept = {}
        self.world.trace(self.name, "takes", view.revision, "of", service.name, "and keeps", *self.kept)
        self.history.checks.took(self.name, self.life, known, view)
        self.view, self.confirmed, self.disk = view, True, view

    def _judge(self, known: View, view: View) -> bool:
        """judge_view() of the native client."""
        if view.cluster_id == known.cluster_id:
            return view.revision > known.revision or (view.revision == known.revision and not self.confirmed)
        if not self.confirmed or not any(self.reaches(node) for node in known.nodes):
            return True
        return view.cluster_id > known.cluster_id
