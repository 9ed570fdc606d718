"""dfkv: one node, one client, batches of the native client. Checksums are made and compared, end to end."""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable

import dfkv_core
from bench_peers.objects import Objects
from bench_peers.store import CONNECTIONS, DEADLINE_S, StoreFailedError
from dfkv_core import _native
from dfkv_core.bench.nodes import LocalNodes
from dfkv_core.bench.workload import DESCRIPTOR
from dfkv_core.config_values import split_address
from dfkv_core.keys import pack_items, route_of
from dfkv_core.memory import pack_segments


class DfkvStore:
    name = "dfkv"
    how = f"batches of the native client, {CONNECTIONS} connections, checksums from end to end"

    def __init__(self, ram_bytes: int) -> None:
        self.version = dfkv_core.__version__
        with contextlib.ExitStack() as stack:
            nodes = stack.enter_context(LocalNodes(1, ram_bytes))
            seeds = [split_address(address) for address in nodes.addresses]
            self._client = _native.Client(seeds, name="bench-peers", connections_per_node=CONNECTIONS)
            stack.callback(self._client.close, DEADLINE_S * 1000)
            if not self._client.wait_ready(DEADLINE_S * 1000):
                raise StoreFailedError("the node does not answer")
            self._namespace = self._client.add_namespace(DESCRIPTOR.encode(), "bench-peers")
            self._stack = stack.pop_all()

    def put(self, objects: Objects) -> float:
        tables = _tables(objects)
        return _timed(lambda: self._client.put(self._namespace, *tables, DEADLINE_S * 1000))

    def get(self, objects: Objects) -> float:
        tables = _tables(objects)
        return _timed(lambda: self._client.get(self._namespace, *tables, DEADLINE_S * 1000))

    def forget(self, objects: Objects) -> None:
        pass  # it evicts

    def close(self) -> None:
        self._stack.close()


def _tables(objects: Objects) -> tuple[bytes, bytes, bytes]:
    count, size_bytes = objects.count, objects.size_bytes
    items = pack_items(
        b"".join(objects.ids), [0] * count, [size_bytes] * count, [route_of(block_id) for block_id in objects.ids]
    )
    segments = pack_segments([(objects.base + i * size_bytes, size_bytes) for i in range(count)])
    return items, segments, struct.pack(f"<{count}I", *[1] * count)


def _timed(start: Callable[[], _native.Operation]) -> float:
    began = time.perf_counter()
    operation = start()
    ended = operation.wait(DEADLINE_S * 1000 + 1000)
    seconds = time.perf_counter() - began
    if not ended or any(operation.statuses()):
        raise StoreFailedError(f"{operation.kind} did not do all of its objects")
    return seconds
