"""Loads, stores and removals of LMCache's classic mode, between its memory objects and the wire.

Coroutines run on LMCache's event loop. A task that is cancelled leaves nothing under way and no memory behind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from dfkv_connectors.counters import Counters
from dfkv_core.client import Client
from dfkv_core.keys import pack_items
from dfkv_core.results import Statuses

from .classic_keys import FULL, TAIL, TAIL_TOKENS, part
from .classic_layout import ChunkLayout
from .classic_names import Named, Names
from .faults import Faults
from .locks import LockBook

if TYPE_CHECKING:
    from dfkv_core import _native

LOAD, STORE, DELETE = "load", "store", "delete"
GRACE_MS = 2000.0  # beyond the native deadline, for a machine that is out of breath
MOST_KEYS = 4096  # at once
_TOKENS_BYTES = 8
_MOST_TOKENS = 1 << 24


class _Row(NamedTuple):
    """One object of a batch and where it lies."""

    key: Named
    component: int
    address: int
    length: int


class Transfers:
    """memory: LMCache's LocalCPUBackend, from which objects are taken."""

    def __init__(
        self,
        client: Client,
        names: Names,
        layout: ChunkLayout,
        locks: LockBook,
        counters: Counters,
        faults: Faults,
        *,
        memory: Any,
        load_ms: float,
        save_ms: float,
    ) -> None:
        self._client = client
        self._native = client.native
        self._names = names
        self._layout = layout
        self._locks = locks
        self._counters = counters
        self._faults = faults
        self._memory = memory
        self._load_ms = load_ms
        self._save_ms = save_ms

    async def load(self, keys: Sequence[Any], found: list[Any]) -> None:
        """Puts a MemoryObj into `found` for each key that is there; it is the caller's."""
        until_s = time.monotonic() + self._load_ms / 1e3
        await self._names.wait_async(self._load_ms)
        known = self._names.of(LOAD, keys)
        for first in range(0, len(known), MOST_KEYS):
            full = [(each, self._layout.chunk_tokens) for each in known[first : first + MOST_KEYS]]
            await self._receive(full, FULL, found, until_s)
        ends = [each for each in self._names.ends(known) if found[each.index] is None]
        if ends:
            await self._receive(await self._tail_tokens(ends, until_s), TAIL, found, until_s)
        # The layers of a chunk are loaded one after another.
        last = self._layout.layers - 1
        loaded = [each.block for each in known if each.layer is None or each.layer == last]
        self._native.release(self._locks.unlock(loaded, time.monotonic()))

    async def store(self, keys: Sequence[Any], memory_objs: Sequence[Any]) -> None:
        """The objects are read until this returns."""
        await self._names.wait_async(self._save_ms)
        chunks: list[tuple[Named, Any, int]] = []
        for each in self._names.of(STORE, keys):
            memory = memory_objs[each.index]
            tokens = self._layout.tokens_of(memory)
            if tokens is None:
                self._counters.add("refused", 1, STORE, "layout")
                self._faults.tell(f"dfkv: not stored: an object of {self._layout.describe(memory)}")
                continue
            chunks.append((each, memory, tokens))
        for first in range(0, len(chunks), MOST_KEYS):
            await self._store(chunks[first : first + MOST_KEYS])

    def remove(self, key: Any) -> bool:
        """Removes a chunk, or a layer of it, from every node. Whether it is gone. Waits."""
        self._names.wait(self._save_ms)
        gone = False
        for each in self._names.of(DELETE, [key]):
            parts = [part(component, each.layer) for component in (FULL, TAIL_TOKENS, TAIL)]
            items = pack_items(each.block * len(parts), parts, 0)
            operation = self._native.remove(each.namespace, items, self._save_ms)
            try:
                operation.wait(self._save_ms + GRACE_MS)
            finally:
                operation.cancel()
            gone = any(self._counted(DELETE, operation))
        return gone

    async def _receive(
        self, wanted: Sequence[tuple[Named, int]], component: int, found: list[Any], until_s: float
    ) -> None:
        """Receives objects of so many tokens into memory of LMCache's own, in `found` where that went well."""
        taken: dict[int, Any] = {}
        rows: list[_Row] = []
        try:
            for each, tokens in wanted:
                shapes = [torch.Size(shape) for shape in self._layout.shapes_of(tokens)]
                # Without waiting for room: this is the thread on which LMCache makes it.
                memory = self._memory.allocate(shapes, list(self._layout.dtypes), self._layout.format, True, False)
                if memory is None:
                    self._counters.add("refused", 1, LOAD, "memory")
                    continue
                taken[each.index] = memory
                rows.append(_Row(each, component, int(memory.data_ptr), int(memory.get_size())))
            for row, done in zip(rows, await self._get(rows, until_s), strict=True):
                if done:
                    found[row.key.index] = taken.pop(row.key.index)
        finally:
            give_back(taken.values())

    async def _tail_tokens(self, keys: Sequence[Named], until_s: float) -> Sequence[tuple[Named, int]]:
        """How many tokens there are in each chunk that is not full."""
        tokens = np.zeros(len(keys), dtype="<u8")
        rows = [_token_row(each, tokens, at) for at, each in enumerate(keys)]
        done = await self._get(rows, until_s)
        return [
            (each, int(size))
            for each, size, ok in zip(keys, tokens, done, strict=True)
            if ok and 0 < size < _MOST_TOKENS and size != self._layout.chunk_tokens
        ]

    async def _store(self, chunks: Sequence[tuple[Named, Any, int]]) -> None:
        full = self._layout.chunk_tokens
        rows = [
            _Row(each, FULL if tokens == full else TAIL, int(memory.data_ptr), int(memory.get_size()))
            for each, memory, tokens in chunks
        ]
        ends = [(each, tokens) for each, _, tokens in chunks if tokens != full]
        sizes = np.array([tokens for _, tokens in ends], dtype="<u8")
        rows += [_token_row(each, sizes, at) for at, (each, _) in enumerate(ends)]
        for namespace, positions in _by_namespace(rows).items():
            some = [rows[at] for at in positions]
            items, segments, counts = _tables(some)
            await self._ended(self._native.put(namespace, items, segments.data, counts.data, self._save_ms), STORE)

    async def _get(self, rows: Sequence[_Row], until_s: float) -> Sequence[bool]:
        """For each whether all of its bytes have arrived."""
        done = [False] * len(rows)
        for namespace, positions in _by_namespace(rows).items():
            items, segments, counts = _tables([rows[at] for at in positions])
            left_ms = max(0.0, (until_s - time.monotonic()) * 1e3)
            operation = self._native.get(namespace, items, segments.data, counts.data, left_ms)
            for at, ok in zip(positions, await self._ended(operation, LOAD), strict=True):
                done[at] = ok
        return done

    async def _ended(self, operation: _native.Operation, kind: str) -> Sequence[bool]:
        await ended(self._client, operation)
        self._counters.add("bytes", operation.payload_bytes, kind)
        return self._counted(kind, operation)

    def _counted(self, kind: str, operation: _native.Operation) -> Sequence[bool]:
        statuses = Statuses(operation.statuses())
        for status, count in statuses.reasons().items():
            self._counters.add("keys", count, kind, status)
        return statuses.done()


async def ended(client: Client, operation: _native.Operation) -> None:
    """Waits for the end. A task that is cancelled ends the operation before this returns."""
    try:
        await asyncio.wrap_future(client.future_of(operation, lambda _: None))
    finally:
        operation.cancel()


def give_back(memory: Iterable[Any]) -> None:
    for each in memory:
        if each is not None:
            each.ref_count_down()


def _token_row(key: Named, tokens: Any, at: int) -> _Row:
    return _Row(key, TAIL_TOKENS, int(tokens.ctypes.data) + _TOKENS_BYTES * at, _TOKENS_BYTES)


def _by_namespace(rows: Sequence[_Row]) -> dict[bytes, list[int]]:
    positions: dict[bytes, list[int]] = {}
    for at, row in enumerate(rows):
        positions.setdefault(row.key.namespace, []).append(at)
    return positions


def _tables(rows: Sequence[_Row]) -> tuple[bytes, Any, Any]:
    """Items, segments and counts as the native client takes them."""
    parts = [part(row.component, row.key.layer) for row in rows]
    items = pack_items(b"".join([row.key.block for row in rows]), parts, [row.length for row in rows])
    segments = np.array([(row.address, row.length) for row in rows], dtype=np.uint64)
    return items, segments, np.ones(len(rows), dtype=np.uint32)
