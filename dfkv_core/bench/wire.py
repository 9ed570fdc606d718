"""The measurement of `dfkv bench`: cases in turns with their ceilings, medians of the repeats."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dfkv_core.bench.ceilings import StreamServer, copy_gb_per_s
from dfkv_core.bench.cold import cold_rows
from dfkv_core.bench.contention import PingPong, repeated
from dfkv_core.bench.nodes import LocalNodes
from dfkv_core.bench.rows import Row, percentiles
from dfkv_core.bench.workload import DESCRIPTOR, Batch, Lookup
from dfkv_core.config_values import split_address

if TYPE_CHECKING:
    from dfkv_core import _native

RUN_S = 0.4  # of one repeat, at least
READY_DEADLINE_MS = 10_000.0
# Held by the nodes: what one batch of the largest case takes several times, so that puts into it evict, as in a full cache.
NODE_RAM_BATCHES = 3
LEAST_NODE_RAM_BYTES = 512 << 20
WARM_ROUNDS = 64
EXISTS_CHUNKS = (64, 256, 6000)
LOOKED_UP_BYTES = 4096
BUSY_CHUNKS, BUSY_BYTES = 256, 1 << 20
# Lookups come as an engine's scheduler sends them, or one right after the other: these then keep a processor busy themselves.
BUSY_PAUSES_S = {"beside gets": 0.001, "beside gets, no pause": 0.0}

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    sizes_bytes: tuple[int, ...] = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
    batch: int = 64
    threads: tuple[int, ...] = (1, 4)
    nodes: tuple[int, ...] = (1, 3)
    repeats: int = 5
    connections: int = 2
    cold: bool = True
    directory: Path | None = None  # for what is cold; None: the temporary directory
    addresses: tuple[str, ...] = ()  # of nodes that run already, in place of nodes of its own
    secret: bytes | None = None

    @classmethod
    def quick(cls) -> Plan:
        """64 KiB and 1 MiB, one node, one thread: under a minute."""
        return cls(sizes_bytes=(64 << 10, 1 << 20), threads=(1,), nodes=(1,), cold=False)


@dataclass(frozen=True)
class Report:
    memcpy_gb_per_s: float
    rows: list[Row]
    gil_acquisitions_per_batch: float
    gil_held_us_per_batch: float
    client_copied_bytes: int
    node_copied_bytes: int
    payload_bytes: int
    left_out: list[str]  # what was not measured, and why

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "rows": [row.as_dict() for row in self.rows]}


def measure(plan: Plan, tell: Progress) -> Report:
    """Raises CeilingError, NodeStartError, OperationFailedError."""
    tell("memcpy")
    memcpy = statistics.median(copy_gb_per_s() for _ in range(3))
    rows: list[Row] = []
    sums = {"operations": 0, "gil": 0, "gil_ns": 0, "copied": 0, "node_copied": 0, "payload": 0}
    with StreamServer() as streams:
        for count in (0,) if plan.addresses else plan.nodes:
            with _cluster(plan, count) as (addresses, nodes):
                for threads in plan.threads:
                    rows += _on_cluster(plan, addresses, nodes, threads, streams, tell, sums)
    left_out = []
    if plan.cold and shutil.which("fio") is None:
        left_out.append("cold: fio is not installed; install it, for example with: apt-get install fio")
    elif plan.cold and not plan.addresses:
        for size_bytes in plan.sizes_bytes:
            tell(f"cold, {size_bytes >> 10} KiB")
            rows += cold_rows(size_bytes, plan.batch, plan.repeats, plan.connections, plan.directory)
    return Report(
        round(memcpy, 3),
        rows,
        round(sums["gil"] / max(1, sums["operations"]), 3),
        round(sums["gil_ns"] / 1000 / max(1, sums["operations"]), 2),
        sums["copied"],
        sums["node_copied"],
        sums["payload"],
        left_out,
    )


@contextlib.contextmanager
def _cluster(plan: Plan, count: int) -> Iterator[tuple[Sequence[str], LocalNodes | None]]:
    if plan.addresses:
        yield plan.addresses, None
        return
    with LocalNodes(count, _ram_bytes(plan, count)) as nodes:
        yield nodes.addresses, nodes


def _ram_bytes(plan: Plan, nodes: int) -> int:
    """Of each of `nodes`."""
    largest = plan.batch * max(plan.sizes_bytes) * max(plan.threads)
    return max(NODE_RAM_BATCHES * largest // nodes, LEAST_NODE_RAM_BYTES)


def _on_cluster(
    plan: Plan,
    addresses: Sequence[str],
    nodes: LocalNodes | None,
    threads: int,
    streams: StreamServer,
    tell: Progress,
    sums: dict[str, int],
) -> Iterator[Row]:
    from dfkv_core import _native

    seeds = [split_address(address) for address in addresses]
    client = _native.Client(seeds, name="dfkv bench", secret=plan.secret, connections_per_node=plan.connections)
    try:
        if not client.wait_ready(READY_DEADLINE_MS):
            raise ConnectionError(f"no node answers at {', '.join(addresses)}")
        namespace = client.add_namespace(DESCRIPTOR.encode(), "dfkv bench")
        cluster = _Cluster(plan, client, namespace, nodes, len(addresses), threads, streams)
        try:
            for size_bytes in plan.sizes_bytes:
                tell(f"{size_bytes >> 10} KiB, {threads} threads, {len(addresses)} nodes")
                yield from cluster.transfers(size_bytes)
            if threads == 1:
                for chunks in EXISTS_CHUNKS:
                    tell(f"lookup of {chunks} chunks, {len(addresses)} nodes")
                    yield cluster.lookups(chunks)
                for case, pause_s in BUSY_PAUSES_S.items():
                    tell(f"lookups {case}")
                    yield cluster.lookups_beside_gets(BUSY_CHUNKS, case, pause_s)
        finally:
            client.erase(namespace, READY_DEADLINE_MS).wait(READY_DEADLINE_MS)
        counted = client.stats()
        sums["operations"] += sum(counted["operations"].values())
        sums["gil"] += counted["gil_acquisitions"]
        sums["gil_ns"] += counted["gil_held_ns"]
        sums["copied"] += counted["user_copied_bytes"]
        answers = client.stat(READY_DEADLINE_MS)
        answers.wait(READY_DEADLINE_MS)
        for answer in answers.result.values():
            if answer is not None:
                sums["node_copied"] += answer["payload_copied_bytes"]
                sums["payload"] += answer["payload_bytes_in"] + answer["payload_bytes_out"]
    finally:
        client.close(READY_DEADLINE_MS)


class _Cluster:
    """One client of one cluster with a number of threads that use it."""

    def __init__(
        self,
        plan: Plan,
        client: _native.Client,
        namespace: bytes,
        nodes: LocalNodes | None,
        node_count: int,
        threads: int,
        streams: StreamServer,
    ) -> None:
        self._plan = plan
        self._client = client
        self._namespace = namespace
        self._nodes = nodes
        self._node_count = node_count
        self._threads = threads
        self._streams = streams
        self._ram_bytes = _ram_bytes(plan, node_count) * node_count

    def transfers(self, size_bytes: int) -> Iterator[Row]:
        batches = [Batch(self._plan.batch, size_bytes) for _ in range(self._threads)]
        with ThreadPoolExecutor(self._threads) as pool:

            def put(batch: Batch) -> float:
                return batch.put(self._client, self._namespace)

            def get(batch: Batch) -> float:
                return batch.get(self._client, self._namespace)

            for op, work in (("put", put), ("get", get)):
                if op == "get":
                    for batch in batches:
                        batch.blank()
                else:
                    self._warm(put, batches, pool)
                yield self._repeated(op, work, batches, pool)
                if op == "get" and not all(batch.marks_are_right() for batch in batches):
                    raise RuntimeError("an object came back in another one's place")

    def _warm(self, put: Callable[[Batch], float], batches: list[Batch], pool: ThreadPoolExecutor) -> None:
        """Until the nodes are full once: the pages of their arenas come with the first write, and from then on puts evict."""
        each = sum(batch.total_bytes for batch in batches)
        for _ in range(min(WARM_ROUNDS, -(-self._ram_bytes // each))):
            list(pool.map(put, batches))
            for batch in batches:
                batch.rename()

    def _repeated(self, op: str, work: Callable[[Batch], float], batches: list[Batch], pool: ThreadPoolExecutor) -> Row:
        total_bytes = sum(batch.total_bytes for batch in batches)
        rates, ceilings, ratios, latencies = [], [], [], []
        client_cpu = node_cpu = moved = 0.0
        for _ in range(self._plan.repeats):
            ceiling = self._streams.gb_per_s(self._plan.connections, receive=op == "get")
            rounds = 0
            node_before = self._nodes.cpu_s() if self._nodes is not None else 0.0
            began, cpu_before = time.perf_counter(), time.process_time()
            in_operations = 0.0
            while rounds == 0 or time.perf_counter() - began < RUN_S:
                if op == "put":
                    for batch in batches:
                        batch.rename()
                started = time.perf_counter()
                latencies += list(pool.map(work, batches))
                in_operations += time.perf_counter() - started
                rounds += 1
            client_cpu += time.process_time() - cpu_before
            node_cpu += (self._nodes.cpu_s() if self._nodes is not None else 0.0) - node_before
            moved += rounds * total_bytes / 1e9
            rates.append(rounds * total_bytes / in_operations / 1e9)
            ceilings.append(ceiling)
            ratios.append(rates[-1] / ceiling)
        return Row(
            case="hot",
            op=op,
            transport="tcp",
            size_bytes=batches[0].size_bytes,
            batch=batches[0].count,
            threads=self._threads,
            nodes=self._node_count,
            gb_per_s=round(statistics.median(rates), 3),
            ceiling_gb_per_s=round(statistics.median(ceilings), 3),
            ceiling=f"iperf3 -P {self._plan.connections}",
            ratio=round(statistics.median(ratios), 3),
            **percentiles(latencies),
            repeats=self._plan.repeats,
            client_cpu_s_per_gb=round(client_cpu / moved, 3),
            node_cpu_s_per_gb=round(node_cpu / moved, 3) if self._nodes is not None else None,
        )

    def lookups(self, chunks: int) -> Row:
        lookup = self._stored(chunks)
        latencies = []
        for _ in range(self._plan.repeats):
            latencies += _for_a_while(lambda: lookup.run(self._client, self._namespace))
        return self._lookup_row("hot", chunks, latencies)

    def lookups_beside_gets(self, chunks: int, case: str, pause_s: float) -> Row:
        """ratio: the 99th percentile over that of a TCP ping-pong with the same pauses under the same load, both of all repeats."""
        lookup = self._stored(chunks)
        load = Batch(self._plan.batch, BUSY_BYTES)
        load.put(self._client, self._namespace)
        latencies, pings = [], []
        with PingPong() as peer, repeated(lambda: load.get(self._client, self._namespace)):
            for _ in range(self._plan.repeats):
                pings += _for_a_while(peer.round_trip, pause_s)
                latencies += _for_a_while(lambda: lookup.run(self._client, self._namespace), pause_s)
        ceiling = percentiles(pings)["p99_us"]
        row = self._lookup_row(case, chunks, latencies)
        return replace(row, ceiling=f"TCP ping-pong, p99 {ceiling:.0f} us", ratio=round(row.p99_us / ceiling, 2))

    def _stored(self, chunks: int) -> Lookup:
        ids = b""
        for first in range(0, chunks, 1000):
            batch = Batch(min(1000, chunks - first), LOOKED_UP_BYTES)
            batch.put(self._client, self._namespace)
            ids += batch.ids
        lookup = Lookup(ids)
        lookup.run(self._client, self._namespace)
        return lookup

    def _lookup_row(self, case: str, chunks: int, latencies: list[float]) -> Row:
        return Row(
            case=case,
            op="exists",
            transport="tcp",
            size_bytes=LOOKED_UP_BYTES,
            batch=chunks,
            threads=1,
            nodes=self._node_count,
            gb_per_s=None,
            ceiling_gb_per_s=None,
            ceiling="",
            ratio=None,
            **percentiles(latencies),
            repeats=self._plan.repeats,
        )


def _for_a_while(work: Callable[[], float], pause_s: float = 0.0) -> list[float]:
    began = time.perf_counter()
    seconds = []
    while time.perf_counter() - began < RUN_S:
        seconds.append(work())
        if pause_s:
            time.sleep(pause_s)
    return seconds
