"""The connector's two halves under a toy engine that keeps vLLM's promises, against a real node in another process.

The oracle knows every byte: pages after a load, and every object that was ever stored, must be exactly right.
"""

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
import pytest

from dfkv_core import _native
from dfkv_core.config import VllmConnectorConfig
from dfkv_core.keys import Status, pack_items
from dfkv_core.namespace import Group, GroupKind, NamespaceDescriptor
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

    def __init__(self, port: int = 0, ram: str = "64MiB") -> None:
        self.ram = ram
        self.port = port
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
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
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


@pytest.fixture
def node() -> Iterator[NodeProcess]:
    process = NodeProcess()
    yield process
    process.stop()


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
    try:
        yield engine
    finally:
        engine.close()


def run_until_idle(engine: ToyEngine, timeout_s: float = 30.0) -> None:
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


def check_at_rest(node: NodeProcess) -> None:
    """No pins, leases or half-filled slots once nobody does anything."""
    client = _native.Client([("127.0.0.1", node.port)], name="rest")
    try:
        end = time.monotonic() + 5
        while True:
            operation = client.stat(1000)
            assert operation.wait(2000)
            stats = dict(operation.result)
            left = {k: stats[k] for k in ("pins", "leases", "filling", "condemned") if stats.get(k)}
            if not left:
                return
            assert time.monotonic() < end, f"left behind: {left}"
            time.sleep(0.05)
    finally:
        client.close()


def make_request(name: str, rng: random.Random, prefixes: list[list[int]]) -> ToyRequest:
    prefix = rng.choice(prefixes)
    tokens = prefix[: rng.randrange(1, len(prefix) + 1)] + [rng.randrange(1000) for _ in range(rng.randrange(1, 40))]
    salt = rng.choice([None, None, "salt"])
    return ToyRequest(name, tokens, len(tokens), cache_salt=salt, max_new_tokens=rng.randrange(1, 60))


def test_second_engine_restores_every_full_chunk(node: NodeProcess) -> None:
    tokens = list(range(300))
    with engine_for(node, 1) as first:
        first.add(ToyRequest("a", list(tokens), 300, max_new_tokens=1))
        run_until_idle(first)
        assert check_stored(node, first) >= (300 // CHUNK_TOKENS) * 4
    with engine_for(node, 2) as second:
        request = ToyRequest("b", [*tokens[:290], 7, 8, 9], 293, max_new_tokens=1)
        second.add(request)
        local = second.local_hit(request)
        run_until_idle(second)
        assert second.tokens_loaded == (290 // CHUNK_TOKENS) * CHUNK_TOKENS - local
        assert second.tokens_failed == 0
    check_at_rest(node)


def test_salt_and_one_token_keep_requests_apart(node: NodeProcess) -> None:
    tokens = list(range(200))
    with engine_for(node, 1) as first:
        first.add(ToyRequest("a", list(tokens), 200, max_new_tokens=1))
        run_until_idle(first)
    with engine_for(node, 2) as second:
        for name, salt, changed in (("salted", "x", 0), ("first", None, 0), ("middle", None, CHUNK_TOKENS * 2 + 5)):
            other = list(tokens)
            if salt is None:
                other[changed] = 999
            second.add(ToyRequest(name, other, 200, cache_salt=salt, max_new_tokens=1))
        run_until_idle(second)
        counted = second.scheduler.counters.take()
        assert counted is not None
        # Only "middle" shares: its two chunks before the changed token, less what its engine has itself.
        assert counted.get("tokens:found", 0) <= 2 * CHUNK_TOKENS


@pytest.mark.parametrize("seed", range(4))
def test_random_requests_with_aborts_and_preemptions(node: NodeProcess, seed: int) -> None:
    """Few pages force preemptions; requests are aborted in every state. Nothing wrong is loaded or stored."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    prefixes = [[rng.randrange(1000) for _ in range(rng.randrange(60, 260))] for _ in range(4)]
    with engine_for(node, seed, pages=40) as engine:
        for index in range(250):
            engine.add(make_request(f"r{index}", rng, prefixes))
            for _ in range(rng.randrange(6)):
                engine.step(budget=rng.choice([16, 48, 96]))
                if rng.random() < 0.3:
                    time.sleep(rng.random() * 0.002)
            if rng.random() < 0.35:
                alive = [r for r in engine.requests.values() if r.status != "finished"]
                if alive:
                    engine.abort(rng.choice(alive))
            if len(engine.requests) > 12:
                run_until_idle(engine)
        run_until_idle(engine)
        assert len(engine.free) == 39, "pages leaked"
        assert engine.loads_checked > 10
        assert engine.preemptions > 5
        assert check_stored(node, engine) > 50
    check_at_rest(node)


def test_node_killed_stopped_and_restarted_under_traffic(node: NodeProcess) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    prefixes = [[rng.randrange(1000) for _ in range(200)] for _ in range(3)]
    with engine_for(node, seed) as engine:
        for round_ in range(6):
            for index in range(10):
                engine.add(make_request(f"{round_}.{index}", rng, prefixes))
                engine.step()
                if index == 4:
                    node.signal(signal.SIGKILL if round_ % 2 else signal.SIGSTOP)
            run_until_idle(engine)
            if round_ % 2:
                node.process.wait(10)
                node.start()
            else:
                node.signal(signal.SIGCONT)
        # The node is used again, without touching the engine.
        time.sleep(2)
        loaded = engine.tokens_loaded
        for index in range(20):
            engine.add(make_request(f"end.{index}", rng, prefixes))
            run_until_idle(engine)
        assert engine.tokens_loaded > loaded
        assert len(engine.free) == 63
        check_stored(node, engine)
    check_at_rest(node)


def test_failed_load_is_not_tried_again_for_its_request(node: NodeProcess) -> None:
    tokens = list(range(300))
    with engine_for(node, 1) as first:
        first.add(ToyRequest("a", list(tokens), 300, max_new_tokens=1))
        run_until_idle(first)
    with engine_for(node, 2) as second:
        request = ToyRequest("b", list(tokens), 300, max_new_tokens=1)
        second.add(request)
        while second.scheduler.matched_tokens(request, 0) is None:
            time.sleep(0.001)
        node.signal(signal.SIGKILL)
        node.process.wait(10)
        run_until_idle(second)
        counted = second.scheduler.counters.take()
        assert counted is not None
        assert counted["tokens:taken"] == counted["tokens:failed"]
        assert counted.get("tokens:loaded", 0) == 0
    node.start()


def test_without_a_node_requests_run_and_cost_no_wait() -> None:
    absent = NodeProcess()
    absent.stop()
    with engine_for(absent, 1) as engine:
        for index in range(5):
            engine.add(ToyRequest(f"r{index}", list(range(100)), 100, max_new_tokens=2))
            run_until_idle(engine, timeout_s=2.0)
        assert engine.tokens_loaded == 0
