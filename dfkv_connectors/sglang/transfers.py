"""Batches over the native client within one deadline: several operations at once, then one wait for all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dfkv_connectors.tables import Segments, chunk_table, item_table
from dfkv_core.keys import BLOCK_ID_BYTES, MAX_CHUNKS_PER_REQUEST, MAX_ITEMS_PER_REQUEST, Status, pack_parts

if TYPE_CHECKING:
    from dfkv_core import _native

Statuses = npt.NDArray[np.uint16]

_GRACE_MS = 500.0  # the native client ends operations at their deadline; this is for a machine that is out of breath


@dataclass(frozen=True)
class Deadline:
    """When a call must be over, on time.monotonic()."""

    at_s: float

    @classmethod
    def after_ms(cls, limit_ms: float) -> Deadline:
        return cls(time.monotonic() + limit_ms / 1e3)

    @property
    def left_ms(self) -> float:
        return max(0.0, (self.at_s - time.monotonic()) * 1e3)


@dataclass
class Batch:
    """Chunks of one pool in flight. `kept` holds the memory that is read or written."""

    operations: list[_native.Operation]
    chunk_ids: bytes
    parts: int  # statuses of each chunk: 1 for lookups
    started_s: float = field(default_factory=time.monotonic)
    kept: Any = None

    def finish(self, deadline: Deadline) -> Statuses:
        """A status for each chunk: the worst of its parts. On return nothing touches the caller's memory any more."""
        try:
            for operation in self.operations:
                operation.wait(deadline.left_ms + _GRACE_MS)
        finally:
            for operation in self.operations:
                operation.cancel()
        raw = b"".join([operation.statuses() for operation in self.operations])
        worst: Statuses = np.frombuffer(raw, dtype="<u2").reshape(-1, self.parts).max(axis=1)
        return worst

    @property
    def payload_bytes(self) -> int:
        return sum(operation.payload_bytes for operation in self.operations)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started_s

    def leases(self) -> list[tuple[str, int]]:
        return [lease for operation in self.operations for lease in operation.leases()]


def done(statuses: Statuses) -> npt.NDArray[np.bool_]:
    """Per chunk whether it ended well."""
    return statuses < int(Status.MISS_NOT_FOUND)


def count(statuses: Statuses) -> dict[str, int]:
    """How often each status occurs, by its label."""
    counts = np.bincount(statuses) if len(statuses) else np.zeros(0, dtype=np.int64)
    return {Status(int(status)).label: int(counts[status]) for status in counts.nonzero()[0]}


def start_lookup(
    client: _native.Client, namespace: bytes, chunk_ids: bytes, parts: Sequence[int], deadline: Deadline, lease_ms: int
) -> Batch:
    """Whether every chunk has all `parts`."""
    step = MAX_CHUNKS_PER_REQUEST * BLOCK_ID_BYTES
    packed = pack_parts(parts)
    operations = [
        client.exists(namespace, chunk_table(chunk_ids[at : at + step]), packed, deadline.left_ms, lease_ms)
        for at in range(0, len(chunk_ids), step)
    ]
    return Batch(operations, chunk_ids, 1)


def start_transfer(
    client: _native.Client,
    namespace: bytes,
    chunk_ids: bytes,
    parts: Sequence[int],
    segments: Segments,
    deadline: Deadline,
    *,
    save: bool,
    part_bytes: int | None = None,
    kept: Any = None,
) -> Batch:
    """Every part of every chunk from or into `segments`, which have the same number of entries for each part.

    part_bytes: None where each part is one segment and chunks may differ in size.
    """
    chunks = len(chunk_ids) // BLOCK_ID_BYTES
    per_chunk = len(segments) // chunks if chunks else 0
    step = max(1, MAX_ITEMS_PER_REQUEST // len(parts))
    call = client.put if save else client.get
    operations = []
    for first in range(0, chunks, step):
        until = min(chunks, first + step)
        ids = chunk_ids[first * BLOCK_ID_BYTES : until * BLOCK_ID_BYTES]
        own = segments[first * per_chunk : until * per_chunk]
        lengths = own[:, 1].astype(np.uint32).reshape(-1, len(parts)) if part_bytes is None else part_bytes
        counts = np.full((until - first) * len(parts), per_chunk // len(parts), dtype=np.uint32)
        items = item_table(ids, parts, lengths)
        operations.append(call(namespace, items, np.ascontiguousarray(own).data, counts.data, deadline.left_ms))
    return Batch(operations, chunk_ids, len(parts), kept=(segments, kept))
