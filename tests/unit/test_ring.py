"""The ring against a second implementation, written from the description in native/net/ring.h."""

from __future__ import annotations

import hashlib
import struct

import pytest
import xxhash

from dfkv_core import _native

SLOTS = 16384
MASK = (1 << 64) - 1


def mix(x: int) -> int:
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & MASK
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def log_table() -> list[int]:
    table = []
    for i in range(1024):
        x = (1024 + i) << 21
        bits = 0
        for _ in range(32):
            x = x * x >> 31
            one = x >= 1 << 32
            if one:
                x >>= 1
            bits = bits << 1 | one
        table.append(bits)
    return [*table, 1 << 32]


LOGS = log_table()


def cost(h: int) -> int:
    top = h.bit_length() - 1
    m = h << (63 - top)
    i = m >> 53 & 1023
    f = m >> 21 & 0xFFFFFFFF
    return (64 << 32) - ((top << 32) + LOGS[i] + ((LOGS[i + 1] - LOGS[i]) * f >> 32))


def reference_slots(nodes: dict[str, int]) -> list[str]:
    seeds = {node: xxhash.xxh3_64_intdigest(node.encode()) for node in nodes}
    slots = []
    for slot in range(SLOTS):
        best = ""
        best_hash = best_cost = 0
        for node, weight in nodes.items():
            if weight == 0:
                continue
            h = mix(seeds[node] ^ mix(slot)) or 1
            c = cost(h)
            if best:
                mine, other = c * nodes[best], best_cost * weight
                if not (mine < other or (mine == other and (h > best_hash or (h == best_hash and node < best)))):
                    continue
            best, best_hash, best_cost = node, h, c
        slots.append(best)
    return slots


def routes_by_slot() -> list[int]:
    found: dict[int, int] = {}
    route = 0
    while len(found) < SLOTS:
        found.setdefault(mix(route) >> 50, route)
        route += 1
    return [found[slot] for slot in range(SLOTS)]


@pytest.mark.parametrize(
    "nodes",
    [
        {"node-a": 100},
        {"node-a": 100, "node-b": 100, "node-c": 100},
        {"n1": 1, "n2": 7, "n3": 0, "n4": 4294967295},
    ],
)
def test_slots_are_those_of_the_description(nodes: dict[str, int]) -> None:
    ring = _native.Ring(list(nodes), list(nodes.values()))
    routes = routes_by_slot()
    owners = struct.unpack(f"<{SLOTS}H", ring.owners(struct.pack(f"<{SLOTS}Q", *routes)))
    assert [list(nodes)[owner] for owner in owners] == reference_slots(nodes)
    assert ring.owner(routes[5]) == owners[5]


def test_the_table_never_changes() -> None:
    """Another table would make every cache cold: this digest is part of placement rule 1."""
    nodes = [f"node-{i}" for i in range(8)]
    ring = _native.Ring(nodes, [100, 100, 100, 100, 50, 200, 100, 100])
    owners = ring.owners(struct.pack(f"<{SLOTS}Q", *routes_by_slot()))
    assert hashlib.sha256(owners).hexdigest() == "2e666a302b766b20c0e0dd6f80dccdccabdfbb1478f9ef3f712eeebb37c68ad6"


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="weight"):
        _native.Ring(["a"], [0])
    with pytest.raises(ValueError, match="weights"):
        _native.Ring(["a", "b"], [1])
    with pytest.raises(ValueError, match="8 bytes"):
        _native.Ring(["a"], [1]).owners(b"1234567")
