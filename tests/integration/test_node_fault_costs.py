"""What a node that is stopped, slow, dropping, half-closed or sending garbage costs: its caller at most the deadline, the keys
of other nodes in the same batch nothing, and for two seconds after its return."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import statistics
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dfkv_core import _native
from dfkv_core.client import Client, Item
from dfkv_core.keys import Status, route_of
from tests.integration.broken_wire import Break, BrokenWire
from tests.integration.serve_process import ServeProcess, serving
from tests.soak.lateness import Sleeper

pytestmark = pytest.mark.slow

DESCRIPTOR = struct.pack("<HI", 1, 6) + b"client"
NODES = 3
BAD = 2  # the node behind the wire
KEYS_EACH = 8
OBJECT_BYTES = 64 << 10
DEADLINE_S = 0.15
ROUNDS = 12
P50_S, WORST_S, AGAIN_S = 0.010, 0.100, 2.0
MISSES = {
    *(Status.MISS_DEADLINE, Status.MISS_NODE_DOWN, Status.MISS_CANCELLED, Status.AGAIN_BUSY, Status.MISS_CORRUPT),
    *(Status.MISS_NAMESPACE_UNKNOWN, Status.MISS_LENGTH),
}


@dataclass
class Cluster:
    client: Client
    namespace: bytes
    wire: BrokenWire
    bad: ServeProcess
    sleeper: Sleeper
    rng: random.Random
    ring: _native.Ring

    def blocks(self, count_each: int) -> list[list[bytes]]:
        """New block ids, per node."""
        found: list[list[bytes]] = [[] for _ in range(NODES)]
        while any(len(each) < count_each for each in found):
            block = self.rng.randbytes(16)
            owner = found[self.ring.owner(route_of(block))]
            if len(owner) < count_each:
                owner.append(block)
        return found


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    with contextlib.ExitStack() as stack:
        wire = BrokenWire(seed=seed)
        stack.callback(wire.close)
        ports = _free_ports(NODES)
        wire.node_port = ports[BAD]
        addresses = [wire.address if i == BAD else f"127.0.0.1:{port}" for i, port in enumerate(ports)]
        peers = ",".join(f"node{i}={address}" for i, address in enumerate(addresses))
        nodes = [
            stack.enter_context(
                serving(
                    tmp_path / f"node{i}.log",
                    *("--port", str(ports[i]), "--ram", "256MiB", "--node-id", f"node{i}"),
                    DFKV_NODE__PEERS=peers,
                    DFKV_NODE__ADVERTISE=addresses[i],
                )
            )
            for i in range(NODES)
        ]
        client = stack.enter_context(Client.open(addresses, connect_timeout_ms=300))
        assert client.wait_ready(10_000)
        sleeper = Sleeper()
        stack.callback(sleeper.stop)
        ring = _native.Ring([f"node{i}" for i in range(NODES)], [1] * NODES)
        yield Cluster(client, client.add_namespace(DESCRIPTOR), wire, nodes[BAD], sleeper, random.Random(seed), ring)


def breaks(cluster: Cluster, how: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """(break, heal)."""
    if how == "stopped":
        return lambda: os.kill(cluster.bad.pid, signal.SIGSTOP), lambda: os.kill(cluster.bad.pid, signal.SIGCONT)
    kind = Break(how)
    return lambda: cluster.wire.become(kind), lambda: cluster.wire.become(Break.NONE)


@pytest.mark.parametrize("how", ["stopped", *(kind.value for kind in Break if kind is not Break.NONE)])
def test_a_bad_node_costs_its_caller_the_deadline_and_the_others_nothing(cluster: Cluster, how: str) -> None:
    client, namespace = cluster.client, cluster.namespace
    blocks = cluster.blocks(KEYS_EACH)
    mixed = [block for each in zip(*blocks, strict=True) for block in each]
    good = [block for block in mixed if block not in blocks[BAD]]
    stored = {block: os.urandom(OBJECT_BYTES) for block in mixed}
    assert client.put(namespace, [Item(b, 0, d) for b, d in stored.items()], deadline_ms=10_000).ok
    break_it, heal = breaks(cluster, how)
    overs: list[float] = []
    alone: list[float] = []
    at_once = 0
    reasons: Counter[str] = Counter()

    def get(wanted: list[bytes]) -> list[Status]:
        memories = [bytearray(OBJECT_BYTES) for _ in wanted]
        items = [Item(block, 0, memory) for block, memory in zip(wanted, memories, strict=True)]
        statuses = list(client.get(namespace, items, deadline_ms=DEADLINE_S * 1000).statuses)
        for block, memory, status in zip(wanted, memories, statuses, strict=True):
            assert status is not Status.OK or memory == stored[block]
        return statuses

    def put(wanted: list[bytes]) -> list[Status]:
        """Of new objects, on the same nodes."""
        new = {owner: iter(fresh) for owner, fresh in enumerate(cluster.blocks(KEYS_EACH))}
        owner_of = {block: owner for owner, each in enumerate(blocks) for block in each}
        items = [Item(next(new[owner_of[block]]), 0, stored[block]) for block in wanted]
        return list(client.put(namespace, items, deadline_ms=DEADLINE_S * 1000).statuses)

    def lookup(wanted: list[bytes]) -> list[Status]:
        return list(client.lookup(namespace, wanted, [0], deadline_ms=DEADLINE_S * 1000).statuses)

    break_it()
    try:
        for number in range(ROUNDS * 3):
            ask = (get, put, lookup)[number % 3]
            started = time.monotonic()
            statuses = dict(zip(mixed, ask(mixed), strict=True))
            took_s = time.monotonic() - started
            if took_s < DEADLINE_S:  # as where the node is known to be down
                at_once += 1
            else:
                overs.append(took_s - DEADLINE_S)
            assert all(statuses[block] is Status.OK for block in good), (ask.__name__, Counter(statuses.values()))
            spoiled = [statuses[block] for block in blocks[BAD]]
            reasons.update(status.label for status in spoiled)
            assert all(status in MISSES or (status is Status.OK and how == "slow") for status in spoiled), spoiled
            started = time.monotonic()
            assert all(status is Status.OK for status in ask(good))
            alone.append(time.monotonic() - started)
    finally:
        heal()
    started = time.monotonic()
    (probe,) = cluster.blocks(1)[BAD]
    while not client.put(namespace, [Item(probe, 0, b"x")], deadline_ms=200).ok:
        assert time.monotonic() - started < 10
        time.sleep(0.01)
    again_s = time.monotonic() - started
    late_s = cluster.sleeper.worst_s
    p50_s, worst_s = (statistics.median(overs), max(overs)) if overs else (0.0, 0.0)
    print(
        f"{how}: {at_once} of {at_once + len(overs)} before the deadline; the others beyond it by p50 {p50_s * 1000:.1f} ms, worst "
        f"{worst_s * 1000:.1f} ms; {dict(reasons)}; keys of the others alone: p50 {statistics.median(alone) * 1000:.1f} ms; in use "
        f"again after {again_s:.2f} s; a thread that only sleeps woke {late_s * 1000:.0f} ms late at worst"
    )
    assert p50_s <= P50_S + late_s
    assert worst_s <= WORST_S + 2 * late_s
    assert statistics.median(alone) < DEADLINE_S / 2 + late_s
    assert again_s <= AGAIN_S + 0.5 + 2 * late_s
    # What was stored is read again, from every node.
    memories = {block: bytearray(OBJECT_BYTES) for block in mixed}
    assert client.get(namespace, [Item(b, 0, m) for b, m in memories.items()], deadline_ms=10_000).ok
    assert memories == stored


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
