"""A toy engine and a real node together: made, run, and checked at the end."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from dfkv_core import _native
from dfkv_core.config import VllmConnectorConfig
from dfkv_core.keys import Status, pack_items
from dfkv_core.namespace import Group, GroupKind, NamespaceDescriptor
from dfkv_core.worth import Verdict, WorthEstimator
from tests.integration.serve_process import clean_environ
from tests.integration.toy_engine import BLOCK_TOKENS, CHUNK_BLOCKS, HEAD_BYTES, LAYERS, ToyEngine, ToyRequest

DESCRIPTOR = NamespaceDescriptor(
    engine_family="toy",
    kv_format=1,
    weights_digest=bytes(32),
    config_digest=bytes(32),
    compute_dtype="uint8",
    kv_dtype="uint8",
    block_tokens=BLOCK_TOKENS,
    chunk_tokens=BLOCK_TOKENS * CHUNK_BLOCKS,
    groups=(Group(GroupKind.FULL_ATTENTION, 4, 128),),
).encode()
CHUNK_TOKENS = BLOCK_TOKENS * CHUNK_BLOCKS
PART_BYTES = CHUNK_BLOCKS * LAYERS * HEAD_BYTES


class NodeProcess:
    """`dfkv serve` in another process, so that it can be stopped and killed."""

    def __init__(self, port: int = 0, ram: str = "64MiB", advertise: str = "") -> None:
        """advertise: the address that clients are told, host:port; the node's own where empty."""
        self.ram = ram
        self.port = port
        self.advertise = advertise
        self.start()

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "dfkv_core.cli",
            "serve",
            "--port",
            str(self.port),
            "--ram",
            self.ram,
            "--json",
        ]
        environ = clean_environ(DFKV_NODE__ADVERTISE=self.advertise)
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"dfkv serve ended with {self.process.wait(10)}"
        self.port = json.loads(line)["port"]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


def config_for(node: NodeProcess, **changes: object) -> VllmConnectorConfig:
    values: dict[str, object] = {
        "addresses": [f"127.0.0.1:{node.port}"],
        "lookup_deadline_ms": 300,
        "load_deadline_ms": 1000,
        "save_deadline_ms": 1000,
        "lease_ms": 2000,
        "cooldown_ms": 50,
    }
    return VllmConnectorConfig.model_validate(values | changes)


@contextmanager
def engine_for(node: NodeProcess, seed: int, pages: int = 64, **changes: object) -> Iterator[ToyEngine]:
    engine = ToyEngine(config_for(node, **changes), seed, num_pages=pages, descriptor=DESCRIPTOR)
    engine.scheduler._worth = TakesAll()
    try:
        yield engine
    finally:
        engine.close()


class TakesAll(WorthEstimator):
    """Takes every hit: how fast this machine loads and "computes" just now is not what is tested."""

    def judge(self, tokens: int, payload_bytes: int) -> Verdict:
        return Verdict(True, None, None)


def run_until_idle(engine: ToyEngine, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while engine.requests:
        engine.step()
        time.sleep(0.0005)
        assert time.monotonic() < end, f"stuck: {[(r.request_id, r.status) for r in engine.requests.values()]}"


def check_stored(node: NodeProcess, engine: ToyEngine) -> int:
    """Reads every chunk that the oracle knows back through a client of its own. Returns how many parts are there."""
    ids = b"".join(engine.oracle)
    parts = engine.chunks.parts
    if not ids:
        return 0
    client = _native.Client([("127.0.0.1", node.port)], name="oracle")
    try:
        namespace = client.add_namespace(DESCRIPTOR)
        count = len(engine.oracle) * len(parts)
        blocks = b"".join(chunk_id for chunk_id in engine.oracle for _ in parts)
        memory = np.zeros((count, PART_BYTES), dtype=np.uint8)
        base = memory.ctypes.data
        segments = np.array([(base + i * PART_BYTES, PART_BYTES) for i in range(count)], dtype=np.uint64)
        operation = client.get(
            namespace,
            pack_items(blocks, list(parts) * len(engine.oracle), PART_BYTES),
            segments.data,
            np.ones(count, dtype=np.uint32).data,
            10000,
        )
        assert operation.wait(11000)
        codes = np.frombuffer(operation.statuses(), dtype="<u2")
        assert Status.MISS_DEADLINE not in codes, f"{np.count_nonzero(codes == Status.MISS_DEADLINE)} of {count} late"
        found = 0
        for index, code in enumerate(codes):
            if code != Status.OK:
                continue
            chunk_id, granule = blocks[16 * index : 16 * index + 16], index % len(parts)
            assert np.array_equal(memory[index], engine.oracle[chunk_id][granule]), "a stored object is poisoned"
            found += 1
        return found
    finally:
        client.close()


def node_stats(node: NodeProcess) -> dict[str, int]:
    """The node's counters, asked for over a client of its own."""
    client = _native.Client([("127.0.0.1", node.port)], name="stats")
    try:
        operation = client.stat(5000)
        assert operation.wait(6000)
        (stats,) = operation.result.values()
        assert stats is not None
        return dict(stats)
    finally:
        client.close()


def check_at_rest(node: NodeProcess) -> None:
    """No pins, leases or half-filled slots once nobody does anything."""
    end = time.monotonic() + 5
    while True:
        stats = node_stats(node)
        left = {name: stats[name] for name in ("pins", "leases", "filling", "condemned") if stats[name]}
        if not left:
            return
        assert time.monotonic() < end, f"left behind: {left}"
        time.sleep(0.05)


def make_request(name: str, rng: random.Random, prefixes: list[list[int]]) -> ToyRequest:
    prefix = rng.choice(prefixes)
    tokens = prefix[: rng.randrange(1, len(prefix) + 1)] + [rng.randrange(1000) for _ in range(rng.randrange(1, 40))]
    salt = rng.choice([None, None, "salt"])
    return ToyRequest(name, tokens, len(tokens), cache_salt=salt, max_new_tokens=rng.randrange(1, 60))
