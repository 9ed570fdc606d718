"""Lookups of LMCache's classic mode: started, and then read. Any thread; nothing waits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dfkv_connectors.counters import Counters
from dfkv_core.keys import MAX_CHUNKS_PER_REQUEST, pack_chunks, pack_parts
from dfkv_core.results import Statuses

from .classic_keys import FULL, TAIL, TAIL_TOKENS, part
from .classic_names import Named, Names
from .locks import LockBook

if TYPE_CHECKING:
    from dfkv_core import _native

LOOKUP = "lookup"


@dataclass(frozen=True)
class _Asked:
    """One EXISTS: its chunks, and the positions in the call that each answers for."""

    operation: _native.Operation
    blocks: Sequence[bytes]
    indices: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Lookup:
    """What one call asks. Its operations are waited for, and cancelled, by the caller."""

    asked: Sequence[_Asked]
    key_count: int
    started_s: float
    lease_ms: int

    @property
    def operations(self) -> Sequence[_native.Operation]:
        return [each.operation for each in self.asked]

    def cancel(self) -> None:
        for each in self.asked:
            each.operation.cancel()


class Lookups:
    """Leases of what was found are kept in `locks` until the load."""

    def __init__(
        self, native: _native.Client, names: Names, locks: LockBook, counters: Counters, limit_ms: float
    ) -> None:
        self._native = native
        self._names = names
        self._locks = locks
        self._counters = counters
        self._limit_ms = limit_ms

    def start(self, keys: Sequence[Any], lease_ms: int) -> Lookup:
        """Asks for full chunks, and, at the same time, whether the last is one that is not full."""
        known = self._names.of(LOOKUP, keys)
        asked = [
            *self._ask(known, (FULL,), lease_ms),
            *self._ask(self._names.ends(known), (TAIL_TOKENS, TAIL), lease_ms),
        ]
        return Lookup(asked, len(keys), time.monotonic(), lease_ms)

    def prefix(self, lookup: Lookup) -> int:
        """How many of the keys, from the first on, are there."""
        there = [False] * lookup.key_count
        for each in lookup.asked:
            statuses = Statuses(each.operation.statuses())
            for status, count in statuses.reasons().items():
                self._counters.add("keys", count, LOOKUP, status)
            for indices, done in zip(each.indices, statuses.done(), strict=True):
                for index in indices if done else ():
                    there[index] = True
            prefix, leases = each.operation.prefix, each.operation.leases()
            if prefix and leases:
                self._locks.lock(each.blocks[:prefix], leases, lookup.started_s, lookup.lease_ms / 1e3)
            elif leases:
                self._native.release(leases)
        return next((index for index, found in enumerate(there) if not found), len(there))

    def _ask(self, known: Sequence[Named], components: Sequence[int], lease_ms: int) -> Sequence[_Asked]:
        chunks: dict[tuple[bytes, bytes], list[Named]] = {}
        for each in known:
            chunks.setdefault((each.namespace, each.block), []).append(each)
        alike: dict[tuple[bytes, tuple[int, ...]], list[list[Named]]] = {}
        for (namespace, _), layers in chunks.items():
            parts = tuple(part(component, each.layer) for each in layers for component in components)
            alike.setdefault((namespace, parts), []).append(layers)
        asked = []
        for (namespace, parts), of_chunks in alike.items():
            for first in range(0, len(of_chunks), MAX_CHUNKS_PER_REQUEST):
                some = of_chunks[first : first + MAX_CHUNKS_PER_REQUEST]
                blocks = [layers[0].block for layers in some]
                table = pack_chunks(b"".join(blocks))
                operation = self._native.exists(namespace, table, pack_parts(parts), self._limit_ms, lease_ms)
                asked.append(_Asked(operation, blocks, [[each.index for each in layers] for layers in some]))
        return asked
