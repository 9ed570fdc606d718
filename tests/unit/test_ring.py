"""Placement rule 1: against a second implementation, its bounds at a thousand nodes, and what a lookup costs."""

from __future__ import annotations

import hashlib
import random
import struct
import time

import numpy as np
import pytest

from dfkv_core import _native
from tests.golden.generate import GOLDEN_DIR
from tests.reference import ring as reference

SLOTS = 1 << reference.SLOT_BITS


def owners_of(weights: dict[str, int], routes: np.ndarray) -> np.ndarray:
    """Positions of the owners."""
    ring = _native.Ring(list(weights), list(weights.values()))
    return np.frombuffer(ring.owners(routes.astype("<u8").tobytes()), "<u2")


def unmix(x: np.ndarray) -> np.ndarray:
    """The inverse of mix(): a route for every slot."""
    x = x ^ (x >> np.uint64(31)) ^ (x >> np.uint64(62))
    x = x * np.uint64(pow(0x94D049BB133111EB, -1, 1 << 64))
    x = x ^ (x >> np.uint64(27)) ^ (x >> np.uint64(54))
    x = x * np.uint64(pow(0xBF58476D1CE4E5B9, -1, 1 << 64))
    return np.asarray(x ^ (x >> np.uint64(30)) ^ (x >> np.uint64(60)))


EVERY_SLOT = unmix(np.arange(SLOTS, dtype=np.uint64) << np.uint64(64 - reference.SLOT_BITS))


def test_golden_owners() -> None:
    lines = [line.split(" ") for line in (GOLDEN_DIR / "ring.txt").read_text().splitlines() if line[0] != "#"]
    assert len(lines) == 4
    for name, nodes, owners in lines:
        weights = {node: int(weight) for node, _, weight in (entry.partition(":") for entry in nodes.split(","))}
        routes = np.arange(256, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        assert owners_of(weights, routes).tolist() == [int(position) for position in owners.split(",")], name


def test_owners_are_those_of_the_description() -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(5):
        nodes = {f"n{chance.getrandbits(40)}": chance.choice((0, 1, 50, 100, 2**32 - 1)) for _ in range(30)}
        nodes["always"] = 100
        routes = np.array([chance.getrandbits(64) for _ in range(300)], dtype=np.uint64)
        found = owners_of(nodes, routes)
        assert [list(nodes)[position] for position in found] == [reference.owner(int(r), nodes) for r in routes]


def test_the_table_never_changes() -> None:
    """Another table would make every cache cold: this digest is part of placement rule 1."""
    nodes = dict(zip([f"node-{i}" for i in range(8)], [100, 100, 100, 100, 50, 200, 100, 100], strict=True))
    digest = hashlib.sha256(owners_of(nodes, EVERY_SLOT).tobytes()).hexdigest()
    assert digest == "f7162f137f1aa9eaf5a2c1ba2d7cf79e3711aee26e5a9a8d62436c658997a9ae"


def test_a_thousand_nodes_are_within_15_percent_and_move_little() -> None:
    nodes = {f"cache-{i}": 100 for i in range(1000)}
    before = owners_of(nodes, EVERY_SLOT)
    counts = np.bincount(before, minlength=1000) * (1000 / SLOTS)
    assert counts.max() < 1.15
    assert counts.min() > 0.85
    # One node goes: only its slots move.
    after = owners_of({node: weight for node, weight in nodes.items() if node != "cache-999"}, EVERY_SLOT)
    moved = int((before != after).sum())
    assert moved == int((before == 999).sum())
    assert moved < 1.2 * SLOTS / 1000


def test_a_lookup_takes_less_than_200_ns() -> None:
    ring = _native.Ring([f"cache-{i}" for i in range(1000)], [100] * 1000)
    routes = struct.pack("<1000000Q", *range(1_000_000))
    best = min(_seconds(ring, routes) for _ in range(5))
    assert best / 1_000_000 < 200e-9


def _seconds(ring: _native.Ring, routes: bytes) -> float:
    started = time.perf_counter()
    ring.owners(routes)
    return time.perf_counter() - started


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="weight"):
        _native.Ring(["a"], [0])
    with pytest.raises(ValueError, match="weights"):
        _native.Ring(["a", "b"], [1])
    with pytest.raises(ValueError, match="8 bytes"):
        _native.Ring(["a"], [1]).owners(b"1234567")
