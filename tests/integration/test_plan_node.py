"""The real node, fed a trace through the client, has the hits that the simulator says."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import struct
from array import array
from collections.abc import Sequence

import pytest

from dfkv_core import _native
from dfkv_core.client import Client, Item
from dfkv_core.config import NodeConfig
from dfkv_core.node import CacheNode
from dfkv_core.plan.economics import unpack_hits
from dfkv_core.plan.synthetic import Traffic, requests
from tests.public_traces import public_trace

# One slot of the smallest class: an extent of any size is full of them, so a capacity is a whole number of objects.
OBJECT_BYTES = 4096
EXTENT_BYTES = 256 * 1024
DEADLINE_MS = 20_000.0
DESCRIPTOR = struct.pack("<HI", 1, 6) + b"replay"


def name_of(block: int) -> bytes:
    return hashlib.sha256(b"%d" % block).digest()[:16]


def node_config(ram_bytes: int) -> NodeConfig:
    return NodeConfig.model_validate({"port": 0, "ram_bytes": ram_bytes})


def replay_on_node(blocks: Sequence[Sequence[int]], capacity_blocks: int) -> list[int]:
    """Hits per request: what is held is read, all behind the first miss is written, as an engine does it."""
    payload = bytes(range(256)) * (OBJECT_BYTES // 256)
    landing = bytearray(OBJECT_BYTES)
    hits = []
    with CacheNode(node_config(capacity_blocks * OBJECT_BYTES)) as node:
        assert node.stats()["capacity_bytes"] == capacity_blocks * OBJECT_BYTES
        # One connection: a large batch over two of them is two batches to the node, which end in any order.
        with Client.open([node.address], connections_per_node=1) as client:
            assert client.wait_ready(DEADLINE_MS)
            namespace = client.add_namespace(DESCRIPTOR)
            for request in blocks:
                names = [name_of(block) for block in request]
                found = client.lookup(namespace, names, [0], deadline_ms=DEADLINE_MS, lease_ms=0).prefix
                if found:
                    read = client.get(namespace, [Item(n, 0, landing) for n in names[:found]], deadline_ms=DEADLINE_MS)
                    assert read.ok
                    assert landing == payload
                if found < len(names):
                    wanted = [Item(n, 0, payload) for n in names[found:]]
                    assert client.put(namespace, wanted, deadline_ms=DEADLINE_MS).ok
                hits.append(found)
        assert node.stats()["used_bytes"] <= capacity_blocks * OBJECT_BYTES
    return hits


def simulated(blocks: Sequence[Sequence[int]], capacity_blocks: int) -> list[int]:
    trace = _native.Trace()
    trace.append(array("I", map(len, blocks)), array("Q", itertools.chain.from_iterable(blocks)))
    return list(unpack_hits(_native.replay(trace, _native.DEFAULT_EVICTION_POLICY, capacity_blocks)["hits"]))


def compare(blocks: Sequence[Sequence[int]], capacity_blocks: int) -> None:
    asked = sum(map(len, blocks))
    on_node = replay_on_node(blocks, capacity_blocks)
    expected = simulated(blocks, capacity_blocks)
    print(f"node {100 * sum(on_node) / asked:.2f} %, simulator {100 * sum(expected) / asked:.2f} %")
    assert 100 * sum(on_node) / asked == pytest.approx(100 * sum(expected) / asked, abs=1.0)
    # The totals could agree by chance; request by request they hardly can.
    assert sum(abs(a - b) for a, b in zip(on_node, expected, strict=True)) <= 0.01 * asked


@pytest.mark.parametrize("extents", [4, 16])
def test_node_agrees_with_simulator_on_made_up_traffic(extents: int) -> None:
    traffic = Traffic(system_prompts=4, first_blocks=6, turn_blocks=3)
    blocks = [request["hash_ids"] for request in requests(1200, seed=7, traffic=traffic)]
    compare(blocks, extents * EXTENT_BYTES // OBJECT_BYTES)


@pytest.mark.parametrize("name", ["conversation", "agentic"])
def test_node_agrees_with_simulator_on_public_traffic(name: str) -> None:
    blocks = first_requests(name, 40_000)
    unique = len(set(itertools.chain.from_iterable(blocks)))
    # A tenth of what there is, and room for the longest prompt.
    wanted = max(unique // 10, *map(len, blocks))
    extents = -(-wanted * OBJECT_BYTES // EXTENT_BYTES)
    compare(blocks, extents * EXTENT_BYTES // OBJECT_BYTES)


def first_requests(name: str, blocks: int) -> list[list[int]]:
    """The first requests of a public trace that have about so many blocks together."""
    path = public_trace(name)
    out: list[list[int]] = []
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
        for line in lines:
            out.append(json.loads(line)["hash_ids"])
            blocks -= len(out[-1])
            if blocks <= 0:
                break
    return out
