"""Who owns a route, written from the description of placement rule 1 in docs/formats.md."""

from __future__ import annotations

from collections.abc import Mapping

import xxhash

SLOT_BITS = 20
MASK = (1 << 64) - 1


def mix(x: int) -> int:
    """The finalizer that every hash here goes through."""
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & MASK
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def _log_table() -> list[int]:
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


_LOGS = _log_table()


def cost(h: int) -> int:
    """-log2(h / 2^64) with 32 fractional bits."""
    top = h.bit_length() - 1
    m = h << (63 - top)
    i = m >> 53 & 1023
    f = m >> 21 & 0xFFFFFFFF
    return (64 << 32) - ((top << 32) + _LOGS[i] + ((_LOGS[i + 1] - _LOGS[i]) * f >> 32))


def owner(route: int, weights: Mapping[str, int]) -> str | None:
    """The node that owns a route; None where no node has weight."""
    slot = mix(route) >> (64 - SLOT_BITS)
    best = None
    best_hash = best_cost = 0
    for node, weight in weights.items():
        if weight == 0:
            continue
        h = mix(xxhash.xxh3_64_intdigest(node.encode()) ^ mix(slot)) or 1
        c = cost(h)
        if best is not None:
            mine, other = c * weights[best], best_cost * weight
            if not (mine < other or (mine == other and (h > best_hash or (h == best_hash and node < best)))):
                continue
        best, best_hash, best_cost = node, h, c
    return best
