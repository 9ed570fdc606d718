"""The packed tables of native batches, made with numpy: for connectors that move many objects of one size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Segments = npt.NDArray[np.uint64]  # shape [n, 2]: address, length in bytes

_ITEM = np.dtype([("block", "V16"), ("part", "<u8"), ("route", "V8"), ("length", "<u4"), ("zero", "<u4")])
_CHUNK = np.dtype([("block", "V16"), ("route", "V8")])


def item_table(chunk_ids: bytes, parts: Sequence[int], part_bytes: int | npt.NDArray[np.uint32]) -> bytes:
    """Items of GET and PUT: every part of every chunk, parts of a chunk together, routed by placement rule 1.

    chunk_ids: 16 bytes each, joined. part_bytes: of every part, or an array [chunks, parts].
    """
    table = np.zeros((len(chunk_ids) // 16, len(parts)), dtype=_ITEM)
    table["block"] = np.frombuffer(chunk_ids, dtype="V16")[:, None]
    table["route"] = np.frombuffer(chunk_ids, dtype="V8")[::2, None]
    table["part"] = np.array(parts, dtype=np.uint64)[None, :]
    table["length"] = part_bytes
    return table.tobytes()


def chunk_table(chunk_ids: bytes) -> bytes:
    """Chunks of EXISTS, routed by placement rule 1. chunk_ids: 16 bytes each, joined."""
    table = np.empty(len(chunk_ids) // 16, dtype=_CHUNK)
    table["block"] = np.frombuffer(chunk_ids, dtype="V16")
    table["route"] = np.frombuffer(chunk_ids, dtype="V8")[::2]
    return table.tobytes()
