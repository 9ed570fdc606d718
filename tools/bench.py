"""Measures one node and one client on loopback, beside the ceiling of this machine in the same run.

usage: python -m tools.bench [--json] [--objects N] [--object-bytes N] [--rounds N]

Prints for put and get the best and the median of the rounds in GB/s, and what part that is of one core copying memory and of a
plain TCP stream between two processes; for lookups and pings the median and 99th percentile.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dfkv_core import _native
from dfkv_core.config import split_address
from dfkv_core.keys import route_of
from dfkv_core.namespace import Group, GroupKind, NamespaceDescriptor
from tests.integration.serve_process import serving

DEADLINE_MS = 60_000.0
DESCRIPTOR = NamespaceDescriptor(
    engine_family="bench",
    kv_format=1,
    weights_digest=bytes(32),
    config_digest=bytes(32),
    compute_dtype="bfloat16",
    kv_dtype="bfloat16",
    block_tokens=128,
    chunk_tokens=128,
    groups=(Group(kind=GroupKind.FULL_ATTENTION, heads=4, head_size=64),),
)


def memcpy_ceiling(size: int, rounds: int) -> float:
    """GB/s of one core copying memory."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    return max(size / seconds(lambda: np.copyto(target, source)) for _ in range(rounds)) / 1e9


def tcp_ceiling(size: int, rounds: int) -> float:
    """GB/s of one plain TCP stream over loopback, between two processes, without checksums."""
    server = socket.create_server(("127.0.0.1", 0))
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError), server.accept()[0] as peer:
            block = bytes(1 << 20)
            for _ in range(rounds):
                peer.recv(1)
                for _ in range(size >> 20):
                    peer.sendall(block)
        os._exit(0)
    target = memoryview(bytearray(1 << 20))
    rates = []
    try:
        with socket.create_connection(server.getsockname()) as client:
            for _ in range(rounds):
                start = time.perf_counter()
                client.sendall(b"x")
                left = (size >> 20) << 20
                while left:
                    left -= client.recv_into(target, min(left, len(target)))
                rates.append(size / (time.perf_counter() - start) / 1e9)
    finally:
        server.close()
        os.waitpid(child, 0)
    return max(rates)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def finished(operation: _native.Operation) -> _native.Operation:
    if not operation.wait(DEADLINE_MS + 1000) or any(operation.statuses()):
        raise SystemExit(f"{operation.kind} failed: statuses {sorted(set(operation.statuses()))}")
    return operation


class Batch:
    """Packed tables for `count` objects of `size` bytes, in one piece of memory."""

    def __init__(self, count: int, size: int, generation: int) -> None:
        self.memory = np.random.default_rng(1).integers(0, 255, count * size, np.uint8)
        base = self.memory.ctypes.data
        blocks = [struct.pack("<QQ", i * 0x9E3779B97F4A7C15 & (1 << 64) - 1, generation) for i in range(count)]
        self.items = b"".join(struct.pack("<16sQQII", b, 0, route_of(b), size, 0) for b in blocks)
        self.chunks = b"".join(struct.pack("<16sQ", b, route_of(b)) for b in blocks)
        self.segments = b"".join(struct.pack("<QQ", base + i * size, size) for i in range(count))
        self.counts = struct.pack(f"<{count}I", *[1] * count)


def transfer(work: Callable[..., _native.Operation], namespace: bytes, batch: Batch) -> None:
    finished(work(namespace, batch.items, batch.segments, batch.counts, DEADLINE_MS))


def measure(address: str, count: int, size: int, rounds: int) -> dict[str, Any]:
    client = _native.Client([split_address(address)], name="bench")
    try:
        client.wait_ready(DEADLINE_MS)
        namespace = client.add_namespace(DESCRIPTOR.encode(), "bench")
        total = count * size
        rates: dict[str, list[float]] = {"put": [], "get": []}
        batch = Batch(count, size, 0)
        for generation in range(rounds):
            batch = Batch(count, size, generation)
            rates["put"].append(total / seconds(partial(transfer, client.put, namespace, batch)) / 1e9)
            expected = batch.memory.copy()
            batch.memory[:] = 0
            rates["get"].append(total / seconds(partial(transfer, client.get, namespace, batch)) / 1e9)
            if not np.array_equal(batch.memory, expected):
                raise SystemExit("bytes read back differ from bytes stored")
            if generation + 1 < rounds:
                finished(client.erase(namespace, DEADLINE_MS))
        part = struct.pack("<Q", 0)
        lookup = latency(lambda: finished(client.exists(namespace, batch.chunks[: 64 * 24], part, DEADLINE_MS)))
        ping = latency(lambda: finished(client.ping(DEADLINE_MS)))
    finally:
        client.close()
    speed = {k: {"best_gb_s": max(v), "median_gb_s": statistics.median(v)} for k, v in rates.items()}
    return {**speed, "lookup_64_chunks_us": lookup, "ping_us": ping}


def latency(work: Callable[[], object], times: int = 2000) -> dict[str, float]:
    samples = sorted(seconds(work) * 1e6 for _ in range(times))
    return {"p50": samples[times // 2], "p99": samples[times * 99 // 100]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--objects", type=int, default=512)
    parser.add_argument("--object-bytes", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    total = options.objects * options.object_bytes
    if threading.active_count() > 1:
        raise SystemExit("the ceiling is measured with fork(), which needs a process without threads")
    ceiling = {"memcpy_gb_s": memcpy_ceiling(total, options.rounds), "tcp_gb_s": tcp_ceiling(total, options.rounds)}
    with tempfile.TemporaryDirectory() as folder:
        arguments = ("--ram", str(total * 2 + (256 << 20)))
        with serving(Path(folder) / "serve.log", *arguments) as server:
            found = measure(server.address, options.objects, options.object_bytes, options.rounds)
    if options.json:
        print(json.dumps({"cores": os.cpu_count(), "bytes": total, **ceiling, **found}))
        return 0
    print(
        f"{options.objects} objects of {options.object_bytes >> 10} KiB, {options.rounds} rounds, {os.cpu_count()} cores"
    )
    print(f"ceilings: memcpy {ceiling['memcpy_gb_s']:.2f} GB/s, one TCP stream {ceiling['tcp_gb_s']:.2f} GB/s")
    for name in ("put", "get"):
        best, median = found[name]["best_gb_s"], found[name]["median_gb_s"]
        share = 100 * best / ceiling["tcp_gb_s"]
        print(f"{name}:    best {best:.2f} GB/s, median {median:.2f} GB/s ({share:.0f} % of the TCP stream)")
    for name, key in (("lookup of 64 chunks", "lookup_64_chunks_us"), ("ping", "ping_us")):
        print(f"{name}: p50 {found[key]['p50']:.0f} us, p99 {found[key]['p99']:.0f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
