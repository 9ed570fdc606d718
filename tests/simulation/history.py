"""One history: a cluster, a few faults drawn from a seed, and rest at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from dfkv_core.membership.view import NodeEntry, View
from tests.simulation.actors import ETCD_CALL_S, POLICY, POLL_S, SILENCE_S, Client, Node, Service
from tests.simulation.checks import SAMPLE_S, Checks, InvariantError
from tests.simulation.world import TTL_S, Etcd, Network, World, describe

FAULTS_S = 120.0
REST_S = 4 * TTL_S + POLICY.max_wait_s


class History:
    """Seeds that leave 0 when divided by 4 have faults of nodes only, so that tight bounds can be checked. Those that leave 1
    may lose what etcd holds, while every service keeps its memory and sees it: whoever has seen nothing else can only
    believe what a restored etcd says.

    only: names of the faults to draw from, instead of all."""

    def __init__(self, seed: int, only: Sequence[str] = ()) -> None:
        self.seed = seed
        self._only = only
        self.world = world = World(seed)
        self.network = Network(world)
        self.etcd = Etcd(world)
        self.checks = Checks(self)
        self.etcd.on_view = self._view_written
        self.etcd.on_node = self.checks.registered
        self.only_nodes_fail = seed % 4 == 0 and not only
        self.data_loss = seed % 4 == 1
        self.mass_loss = False
        self.mended = False
        self._doomed = False
        """etcd stops after the next view."""
        self._eventful_until_s = 0.0
        self.services_stay = True
        """No service was restarted or cut off so far: each has seen every view."""
        self.etcd_stopped_s = self.etcd_back_s = -1000.0
        """etcd_back_s: the end of the last outage that no service could overlook."""
        self.services = [Service(self, f"mds-{i}") for i in range(world.random.choice((1, 2, 2, 3)))]
        self.nodes = [Node(self, f"node-{i}", f"10.0.0.{i}:7440") for i in range(world.random.randint(1, 8))]
        self.clients = [Client(self, f"client-{i}") for i in range(2)]

    def run(self) -> None:
        """Raises InvariantError."""
        world = self.world
        world.trace(*(service.name for service in self.services), *(client.name for client in self.clients))
        world.trace(describe(node.entry for node in self.nodes))
        for at in range(10, int(FAULTS_S + REST_S), SAMPLE_S):
            world.after(at, self.checks.steady)
        world.after(15, self.etcd.back_up)
        for _ in range(world.random.randint(1, 6)):
            at_s, fault = 20 + (FAULTS_S - 20) * world.random.random(), self._fault()
            world.trace(f"at {at_s:.3f}:", getattr(fault, "__name__", ""))
            world.after(at_s, fault)
        world.run_until(FAULTS_S)
        self._mend()
        # Rest is what holds a TTL later, too.
        at_rest_since_s = inf
        while world.now_s < FAULTS_S + REST_S and world.now_s - at_rest_since_s < TTL_S:
            world.run_until(world.now_s + TTL_S / 2)
            try:
                self.checks.at_rest()
                at_rest_since_s = max(min(at_rest_since_s, world.now_s), self._eventful_until_s)
            except InvariantError:
                at_rest_since_s = inf
        self.checks.at_rest()

    # ---- looking at it

    def alive(self, node_id: str) -> list[Node]:
        return [node for node in self.nodes if node.id == node_id and node.up]

    def node_of(self, entry: NodeEntry) -> Node | None:
        for node in self.nodes:
            if node.id == entry.id and node.entry.incarnation == entry.incarnation:
                return node
        return None

    # ---- breaking it

    def _fault(self) -> Callable[[], None]:
        faults = [
            self._kill,
            self._restart,
            self._leave,
            self._grow,
            self._double,
            self._flap,
            self._drain,
            self._replace_client,
            self._freeze,
            self._twin,
        ]
        if not self.only_nodes_fail:
            faults += [self._kill_many, self._kill_slowly, self._etcd_outage, self._etcd_outage, self._etcd_slow]
            faults += [self._cut_node, self._cut_client, self._lose_lease, self._lose_key, self._lossy, self._rack]
            faults += [self._etcd_reads_stall]
            if self.data_loss:
                faults += [self._etcd_rolls_back] * 6
            else:
                faults += [self._cut_service, self._crash_service, self._crash_all]
        if self._only:
            faults = [getattr(self, f"_{name}") for name in self._only]
        return self.world.random.choice(faults)

    def _pick(self) -> Node | None:
        up = [node for node in self.nodes if node.up]
        return self.world.random.choice(up) if up else None

    def _kill(self) -> None:
        node = self._pick()
        if node is not None and not self.mended:
            self._note_loss()
            node.kill()

    def _stop_node(self, node: Node) -> None:
        if node.up and not self.mended:
            node.kill()

    def _note_loss(self) -> None:
        """Losses close to one another are more than the guard believes at once."""
        recent = [node for node in self.nodes if not node.up and self.world.now_s - node.died_s < 2 * TTL_S]
        self.mass_loss = self.mass_loss or bool(recent)

    def _restart(self) -> None:
        node = self._pick()
        if node is not None:
            node.kill()
            self._start_later(node, 0.5 + 50 * self.world.random.random())
            self._note_loss()

    def _leave(self) -> None:
        node = self._pick()
        if node is not None:
            self._note_loss()
            node.leave()

    def _grow(self) -> None:
        for _ in range(self.world.random.choice((1, 2, 10))):
            number = len(self.nodes)
            self.nodes.append(Node(self, f"node-{number}", f"10.0.0.{number}:7440"))

    def _double(self) -> None:
        """A second process under the name of one that lives or has just died."""
        node = self.world.random.choice(self.nodes)
        number = len(self.nodes)
        self.nodes.append(Node(self, node.id, f"10.0.1.{number}:7440"))
        self.mass_loss = True

    def _twin(self) -> None:
        """The same node started again, while its first process still runs: the later one takes over."""
        node = self._pick()
        if node is not None and not node.beat.ended:
            self.nodes.append(Node(self, node.id, node.address))

    def _freeze(self) -> None:
        """A virtual machine is stopped for a while."""
        node = self._pick()
        if node is not None:
            self.mass_loss = True
            node.freeze(60 * self.world.random.random())

    def _flap(self) -> None:
        node = self._pick()
        if node is None:
            return
        self.mass_loss = True
        for turn in range(4):
            self.world.after(45.0 * turn, lambda: self._stop_node(node))
            self._start_later(node, 45.0 * turn + 40)

    def _drain(self) -> None:
        node = self._pick()
        if node is not None:
            node_id, service = node.id, self.world.random.choice(self.services)
            service.drain(node_id, False)
            if self.world.random.random() < 0.5:
                self.world.after(20, lambda: service.drain(node_id, True))

    def _replace_client(self) -> None:
        self.world.random.choice(self.clients).restart()

    def _kill_many(self) -> None:
        self.mass_loss = True
        for node in self.nodes:
            if node.up and self.world.random.random() < 0.6:
                node.kill()
                if self.world.random.random() < 0.5:
                    self._start_later(node, 60 * self.world.random.random())

    def _start_later(self, node: Node, delay_s: float) -> None:
        self._eventful_until_s = max(self._eventful_until_s, self.world.now_s + delay_s)
        self.world.after(delay_s, lambda: None if node.up else node.start())

    def _kill_slowly(self) -> None:
        self.mass_loss = True
        for index in range(len(self.nodes) - 1):
            self.world.after(7.0 * index, self._kill)

    def _etcd_outage(self) -> None:
        if not self.etcd.up:
            return
        chance = self.world.random
        if chance.random() < 0.3:
            self.etcd.back_up()
        kind = chance.random()
        self.world.after(chance.random() * 5, self._stop_etcd)
        self.world.after(
            10 + 70 * chance.random(),
            lambda: self._start_etcd(self.data_loss and kind < 0.3, self.data_loss and kind > 0.5),
        )

    def _etcd_rolls_back(self) -> None:
        """It is restored from a backup made just before a change, which one service alone has told."""
        if self.etcd.up:
            self.etcd.back_up()
            self._doomed = True
            self._grow()

    def _view_written(self, view: View) -> None:
        self.checks.published(view)
        if self._doomed:
            self._doomed = False
            chance = self.world.random
            stop_s = chance.choice((0.004, 0.1)) * chance.random()  # before its answer is back, or after
            self.world.after(stop_s, self._stop_etcd)
            away_s = chance.choice((3.0, 40.0)) * chance.random()
            self.world.after(stop_s + away_s, lambda: self._start_etcd(from_backup=True))

    def _stop_etcd(self) -> None:
        if self.etcd.up and not self.mended:
            self.services_stay = False
            self.etcd.stop()
            self.etcd_stopped_s = self.world.now_s

    def _start_etcd(self, lost_everything: bool = False, from_backup: bool = False) -> None:
        if self.etcd.up:
            return
        if self.world.now_s - self.etcd_stopped_s > SILENCE_S + POLL_S + ETCD_CALL_S:
            self.etcd_back_s = self.world.now_s
        self.etcd.start(lost_everything=lost_everything, from_backup=from_backup)
        if lost_everything or from_backup:
            self.checks.restored()

    def _etcd_slow(self) -> None:
        self.etcd.slow_down(self.world.random.choice((0.5, 2.0, 4.0)))
        self.world.after(40 * self.world.random.random(), self._etcd_quick)

    def _etcd_quick(self) -> None:
        self.etcd.slow_down(0.0)

    def _etcd_reads_stall(self) -> None:
        self.etcd.stall_reads(True)
        self.services_stay = False
        if self.world.random.random() < 0.5:
            self.world.after(10 * self.world.random.random(), self._lose_key)
        self.world.after(60 * self.world.random.random(), lambda: self.etcd.stall_reads(False))

    def _cut_service(self) -> None:
        self.services_stay = False
        self._cut(self.world.random.choice(self.services).name, "etcd")

    def _cut_node(self) -> None:
        node = self._pick()
        if node is not None:
            for service in self.services:
                if self.world.random.random() < 0.7:
                    self._cut(node.name, service.name)

    def _cut_client(self) -> None:
        for service in self.services:
            if self.world.random.random() < 0.7:
                self._cut(self.world.random.choice(self.clients).name, service.name)

    def _rack(self) -> None:
        """Some nodes lose sight of every service, while clients still reach them."""
        for node in self.nodes:
            if self.world.random.random() < 0.5:
                for service in self.services:
                    self._cut(node.name, service.name)

    def _cut(self, a: str, b: str) -> None:
        self.network.cut(a, b)
        self.world.disturb()

        def mend() -> None:
            self.network.mend(a, b)
            self.world.disturb()

        self.world.after(5 + 80 * self.world.random.random(), mend)

    def _crash_service(self, service: Service | None = None) -> None:
        crashed = service or self.world.random.choice(self.services)
        crashed.crash()
        self.services_stay = False
        self.world.after(1 + 40 * self.world.random.random(), lambda: None if crashed.up else crashed.start())

    def _crash_all(self) -> None:
        for service in self.services:
            self._crash_service(service)

    def _lose_lease(self) -> None:
        node = self._pick()
        if node is not None and self.etcd.up:
            self.etcd.revoke(node.id)
            self.world.disturb()

    def _lose_key(self) -> None:
        node = self._pick()
        if node is not None and self.etcd.up:
            self.etcd.lose_key(node.id)
            self.world.disturb()

    def _lossy(self) -> None:
        self.network.lose(self.world.random.choice((0.02, 0.2)))
        self.world.after(30, lambda: self.network.lose(0.0))

    def _mend(self) -> None:
        self.world.trace("everything is mended")
        self.mended = True
        self.network.mend_all()
        self._etcd_quick()
        self.etcd.stall_reads(False)
        self._start_etcd()
        for service in self.services:
            if not service.up:
                service.start()
        self.world.disturb()
