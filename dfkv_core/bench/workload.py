"""Batches of objects for a measurement, and the operations on them. Bytes are checked: what is read is what was written."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dfkv_core.keys import pack_chunks, pack_items, pack_parts, route_of
from dfkv_core.memory import pack_segments
from dfkv_core.namespace import Group, GroupKind, NamespaceDescriptor

if TYPE_CHECKING:
    from dfkv_core import _native

DEADLINE_MS = 30_000.0
DESCRIPTOR = NamespaceDescriptor(
    engine_family="dfkv bench",
    kv_format=1,
    weights_digest=bytes(32),
    config_digest=bytes(32),
    compute_dtype="bfloat16",
    kv_dtype="bfloat16",
    block_tokens=128,
    chunk_tokens=128,
    groups=(Group(kind=GroupKind.FULL_ATTENTION, heads=4, head_size=64),),
)
_numbers = itertools.count()
_run = os.urandom(8)


class OperationFailedError(RuntimeError):
    """An operation of a measurement did not do all of its keys: the figure would mean nothing."""


def block_ids(count: int) -> list[bytes]:
    """Ids that nobody has used, in this process or another."""
    return [_run + struct.pack("<Q", next(_numbers) * 0x9E3779B97F4A7C15 & (1 << 64) - 1) for _ in range(count)]


class Batch:
    """`count` objects of `size_bytes`, each in memory of its own."""

    def __init__(self, count: int, size_bytes: int) -> None:
        self.count = count
        self.size_bytes = size_bytes
        self._memory = mmap.mmap(-1, count * size_bytes)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        pattern = os.urandom(min(1 << 20, size_bytes))
        for offset in range(0, count * size_bytes, len(pattern)):
            self._memory[offset : offset + len(pattern)] = pattern[: count * size_bytes - offset]
        for index in range(count):  # no two objects are the same
            self._memory[index * size_bytes : index * size_bytes + 8] = struct.pack("<Q", index)
        self._segments = pack_segments([(self._base + i * size_bytes, size_bytes) for i in range(count)])
        self._counts = struct.pack(f"<{count}I", *[1] * count)
        self.rename()

    @property
    def total_bytes(self) -> int:
        return self.count * self.size_bytes

    def rename(self) -> None:
        """The same bytes under keys that nobody has stored."""
        self.use(block_ids(self.count))

    def use(self, ids: list[bytes]) -> None:
        """The same bytes under these keys."""
        self.ids = b"".join(ids)
        self._items = pack_items(self.ids, [0] * self.count, [self.size_bytes] * self.count, [route_of(i) for i in ids])

    def put(self, client: _native.Client, namespace: bytes) -> float:
        return _timed(lambda: client.put(namespace, self._items, self._segments, self._counts, DEADLINE_MS))

    def get(self, client: _native.Client, namespace: bytes) -> float:
        return _timed(lambda: client.get(namespace, self._items, self._segments, self._counts, DEADLINE_MS))

    def blank(self) -> None:
        ctypes.memset(self._base, 0, self.total_bytes)

    def marks_are_right(self) -> bool:
        """Whether each object is in its place; that its bytes are right, its checksum has shown."""
        return all(
            self._memory[i * self.size_bytes : i * self.size_bytes + 8] == struct.pack("<Q", i)
            for i in range(self.count)
        )


class Lookup:
    """A lookup of chunks that are stored."""

    def __init__(self, ids: bytes) -> None:
        self._chunks = pack_chunks(ids)
        self._parts = pack_parts([0])

    def run(self, client: _native.Client, namespace: bytes) -> float:
        return _timed(lambda: client.exists(namespace, self._chunks, self._parts, DEADLINE_MS, 0, DEADLINE_MS))


def _timed(start: Callable[[], _native.Operation]) -> float:
    """Seconds from the call until every key is done."""
    began = time.perf_counter()
    operation = start()
    ended = operation.wait(DEADLINE_MS + 1000)
    seconds = time.perf_counter() - began
    if not ended or any(operation.statuses()):
        codes = struct.unpack(f"<{len(operation.statuses()) // 2}H", operation.statuses())
        raise OperationFailedError(f"{operation.kind} ended with statuses {sorted(set(codes) - {0})} for some keys")
    return seconds
