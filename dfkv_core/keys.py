"""Parts, routes, packed tables and statuses: what travels beside a namespace id (docs/formats.md).

Pure and free of native code. Any thread.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from enum import Enum, IntEnum
from typing import Final

BLOCK_ID_BYTES: Final = 16
CHUNK_REF_BYTES: Final = 24
ITEM_REF_BYTES: Final = 40
MAX_CHUNKS_PER_REQUEST: Final = 32768
MAX_ITEMS_PER_REQUEST: Final = 16384
MAX_PARTS_PER_REQUEST: Final = 1024

ALL_PARTS: Final = 0xFFFFFFFFFFFFFFFF
"""remove: every part of the chunk. Never the part of a stored object."""

_ITEM: Final = struct.Struct("<16sQQII")
_PART: Final = struct.Struct("<BBHBBBB")
_PART_LIMITS: Final = {
    "group": 0xFF,
    "component": 0xFF,
    "stage": 0xFFFF,
    "cp_index": 0xFF,
    "shard_index": 0xFF,
    "shard_count": 0xFF,
}


@dataclass(frozen=True, slots=True)
class PartFields:
    """Which part of a chunk an object is. shard_count 0: replicated, and then shard_index is 0.

    stage counts pipeline stages or layers, cp_index context-parallel ranks, shards granules of KV heads.
    Raises ValueError for a field that is out of range.
    """

    group: int = 0
    component: int = 0
    stage: int = 0
    cp_index: int = 0
    shard_index: int = 0
    shard_count: int = 0

    def __post_init__(self) -> None:
        for name, limit in _PART_LIMITS.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= limit:
                raise ValueError(f"part field {name}: expected an int from 0 to {limit}, found {value!r}")
        if self.shard_index >= max(self.shard_count, 1):
            raise ValueError(
                f"part field shard_index: expected less than shard_count ({self.shard_count}; 0 for a replicated "
                f"part), found {self.shard_index}"
            )

    def encode(self) -> int:
        """The 64-bit part."""
        return int.from_bytes(_PART.pack(*astuple(self), 0), "little")

    @classmethod
    def decode(cls, part: int) -> PartFields:
        """Reads a 64-bit part. Raises ValueError where its zero bits are set or a field is out of range."""
        if not 0 <= part < 1 << 56:
            raise ValueError(f"part {part:#x}: expected the upper 8 of 64 bits to be zero")
        return cls(*_PART.unpack(part.to_bytes(8, "little"))[:6])


def route_of(block_id: bytes) -> int:
    """Route of a chunk under placement rule 1: the first 8 bytes of its block id."""
    if len(block_id) != BLOCK_ID_BYTES:
        raise ValueError(f"block id: expected {BLOCK_ID_BYTES} bytes, found {len(block_id)}")
    return int.from_bytes(block_id[:8], "little")


def split_ids(block_ids: bytes) -> list[bytes]:
    """Joined 16-byte block ids, one by one. Raises ValueError where the length is no multiple of 16."""
    if len(block_ids) % BLOCK_ID_BYTES:
        raise ValueError(f"block ids: expected a multiple of {BLOCK_ID_BYTES} bytes, found {len(block_ids)}")
    return [block_ids[at : at + BLOCK_ID_BYTES] for at in range(0, len(block_ids), BLOCK_ID_BYTES)]


def pack_chunks(block_ids: bytes, routes: Sequence[int] | None = None) -> bytes:
    """Chunk entries of EXISTS, 24 bytes each. block_ids: n x 16 bytes, joined. routes: n, or None for rule 1."""
    ids = split_ids(block_ids)
    if routes is None:
        return b"".join([block + block[:8] for block in ids])
    _check_count("routes", len(routes), len(ids))
    return b"".join([block + route.to_bytes(8, "little") for block, route in zip(ids, routes, strict=True)])


def pack_items(
    block_ids: bytes,
    parts: Sequence[int] | int,
    lengths: Sequence[int] | int,
    routes: Sequence[int] | None = None,
) -> bytes:
    """Item entries of GET, PUT and REMOVE, 40 bytes each.

    block_ids: n x 16 bytes, joined. parts and lengths (bytes of payload; 0 in GET: any): n of them, or one for all.
    routes: n, or None for rule 1. Raises ValueError for counts that do not agree, struct.error for values out of range.
    """
    ids = split_ids(block_ids)
    each_part = [parts] * len(ids) if isinstance(parts, int) else parts
    each_length = [lengths] * len(ids) if isinstance(lengths, int) else lengths
    each_route = [int.from_bytes(block[:8], "little") for block in ids] if routes is None else routes
    _check_count("parts", len(each_part), len(ids))
    _check_count("lengths", len(each_length), len(ids))
    _check_count("routes", len(each_route), len(ids))
    columns = zip(ids, each_part, each_route, each_length, strict=True)
    return b"".join([_ITEM.pack(block, part, route, length, 0) for block, part, route, length in columns])


def pack_parts(parts: Sequence[int]) -> bytes:
    """Required parts of EXISTS, 8 bytes each."""
    return struct.pack(f"<{len(parts)}Q", *parts)


def _check_count(what: str, found: int, expected: int) -> None:
    if found != expected:
        raise ValueError(f"{what}: expected one for each of {expected} block ids, found {found}")


class StatusRange(Enum):
    """What kind of result a status is. A reader that does not know a status acts on its range."""

    DONE = "done"
    MISS = "miss"
    AGAIN = "again"
    REFUSED = "refused"


class Status(IntEnum):
    """Result for one key or for a whole request. Status(n) of an unknown n gives a member named after its range."""

    OK = 0
    ALREADY = 1
    MISS_NOT_FOUND = 100
    MISS_EVICTED = 101
    MISS_CORRUPT = 102
    MISS_NAMESPACE_UNKNOWN = 103
    MISS_PART_MISSING = 104
    MISS_NODE_DOWN = 105
    MISS_DEADLINE = 106
    MISS_NOT_TAKEN = 107
    MISS_LENGTH = 108
    MISS_CANCELLED = 109
    MISS_EXPIRED = 110
    AGAIN_BUSY = 200
    AGAIN_NO_MEMORY = 201
    AGAIN_DRAINING = 202
    AGAIN_DISK = 203
    REFUSED_UNSUPPORTED = 300
    REFUSED_BAD_REQUEST = 301
    REFUSED_TOO_LARGE = 302
    REFUSED_OVER_QUOTA = 303
    REFUSED_UNAUTHENTICATED = 304
    REFUSED_CHECKSUM = 305
    REFUSED_ABORTED = 306
    REFUSED_NAMESPACE = 307
    REFUSED_LIMIT = 308

    @classmethod
    def _missing_(cls, value: object) -> Status | None:
        if not isinstance(value, int) or not 0 <= value <= 0xFFFF:
            return None
        unknown = int.__new__(cls, value)
        unknown._name_ = f"{status_range(value).name}_OTHER"
        unknown._value_ = value
        return unknown

    @property
    def range(self) -> StatusRange:
        """What kind of result this is."""
        return status_range(self)

    @property
    def label(self) -> str:
        """Stable lower-case name, used as the label of metrics: "ok", "not_found", "miss_other"."""
        name = self.name.lower()
        if name.endswith("_other"):
            return name
        for prefix in ("miss_", "again_", "refused_"):
            name = name.removeprefix(prefix)
        return name


def status_range(value: int) -> StatusRange:
    """The range of a status, known or not."""
    if value < 100:
        return StatusRange.DONE
    if value < 200:
        return StatusRange.MISS
    return StatusRange.AGAIN if value < 300 else StatusRange.REFUSED


def unpack_statuses(data: bytes) -> list[int]:
    """Little-endian u16 statuses, as an operation returns them. Wrap one in Status() for its name."""
    if len(data) % 2:
        raise ValueError(f"statuses: expected 2 bytes each, found {len(data)} bytes")
    return list(struct.unpack(f"<{len(data) // 2}H", data))
