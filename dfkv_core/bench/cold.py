"""Objects that are on a disk only, read over the wire; and objects stored on a disk that is full."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dfkv_core.bench.ceilings import DiskSpeed, disk_speed
from dfkv_core.bench.nodes import LocalNodes
from dfkv_core.bench.rows import Row, percentiles
from dfkv_core.bench.workload import DESCRIPTOR, Batch, block_ids
from dfkv_core.config_values import split_address

if TYPE_CHECKING:
    from dfkv_core import _native

READY_DEADLINE_MS = 10_000.0
SYNC_DEADLINE_MS = 60_000.0
DISK_DEPTH = 4  # readers and writers of a directory
RAM_BATCHES = 2
LEAST_RAM_BYTES = 128 << 20
SET_OVER_RAM = 4  # how much more is stored than memory holds
SLOT_WASTE = 1.2  # at most, with what else a directory holds


def cold_rows(size_bytes: int, batch: int, repeats: int, connections: int, directory: Path | None) -> list[Row]:
    """get: in an order in which memory has none of what is asked for next. put: onto a full disk, for longer than memory
    takes it in. Raises CeilingError, NodeStartError, OperationFailedError."""
    ram_bytes = max(RAM_BATCHES * batch * size_bytes, LEAST_RAM_BYTES)
    stored_bytes = SET_OVER_RAM * ram_bytes
    with tempfile.TemporaryDirectory(prefix="dfkv-bench-", dir=directory) as folder:
        home = Path(folder) / "store"
        home.mkdir()
        block = Path(folder) / "fio.dat"
        with LocalNodes(1, ram_bytes, (home, int(stored_bytes * SLOT_WASTE))) as nodes:
            client = _client(nodes.addresses[0], connections)
            try:
                cold = _Cold(client, Batch(batch, size_bytes), stored_bytes)
                disk_speed(block, size_bytes, stored_bytes, 1, "write")
                return [
                    cold.row(nodes, op, partial(disk_speed, block, size_bytes, ram_bytes, DISK_DEPTH, kind), repeats)
                    for op, kind in (("get", "randread"), ("put", "randwrite"))
                ]
            finally:
                client.close(READY_DEADLINE_MS)


def _client(address: str, connections: int) -> _native.Client:
    from dfkv_core import _native

    client = _native.Client([split_address(address)], name="dfkv bench", connections_per_node=connections)
    if not client.wait_ready(READY_DEADLINE_MS):
        client.close(READY_DEADLINE_MS)
        raise ConnectionError(f"no node answers at {address}")
    return client


class _Cold:
    """One batch's memory, and many names under which its bytes are stored."""

    def __init__(self, client: _native.Client, batch: Batch, stored_bytes: int) -> None:
        self._client = client
        self._batch = batch
        self._namespace = client.add_namespace(DESCRIPTOR.encode(), "dfkv bench")
        self._names = [block_ids(batch.count) for _ in range(max(2, stored_bytes // batch.total_bytes))]
        self._next = 0
        for ids in self._names:
            batch.use(ids)
            batch.put(client, self._namespace)
        self._sync()

    def row(self, nodes: LocalNodes, op: str, ceiling: Callable[[], DiskSpeed], repeats: int) -> Row:
        rates, ceilings, latencies = [], [], []
        client_cpu = node_cpu = moved = 0.0
        rounds = max(1, len(self._names) // 2)
        for _ in range(repeats):
            ceilings.append(ceiling().gb_per_s)
            node_before, cpu_before, began = nodes.cpu_s(), time.process_time(), time.perf_counter()
            for _ in range(rounds):
                latencies.append(self._get() if op == "get" else self._put())
            if op == "put":
                self._sync()
            rates.append(rounds * self._batch.total_bytes / (time.perf_counter() - began) / 1e9)
            client_cpu += time.process_time() - cpu_before
            node_cpu += nodes.cpu_s() - node_before
            moved += rounds * self._batch.total_bytes / 1e9
        return Row(
            case="cold",
            op=op,
            transport="tcp",
            size_bytes=self._batch.size_bytes,
            batch=self._batch.count,
            threads=1,
            nodes=1,
            gb_per_s=round(statistics.median(rates), 3),
            ceiling_gb_per_s=round(statistics.median(ceilings), 3),
            ceiling=f"fio, {DISK_DEPTH} at a time",
            ratio=round(statistics.median(rate / limit for rate, limit in zip(rates, ceilings, strict=True)), 3),
            **percentiles(latencies),
            repeats=repeats,
            client_cpu_s_per_gb=round(client_cpu / moved, 3),
            node_cpu_s_per_gb=round(node_cpu / moved, 3),
        )

    def _get(self) -> float:
        """The batch stored longest ago of those not asked for since."""
        self._batch.use(self._names[self._next])
        self._next = (self._next + 1) % len(self._names)
        return self._batch.get(self._client, self._namespace)

    def _put(self) -> float:
        self._batch.rename()
        return self._batch.put(self._client, self._namespace)

    def _sync(self) -> None:
        self._client.sync(SYNC_DEADLINE_MS).wait(SYNC_DEADLINE_MS)
