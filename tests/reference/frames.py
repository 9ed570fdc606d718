"""Frames, meta and packed tables, written from docs/formats.md on the msgpack package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from tests.reference.crc import crc32c
from tests.reference.identity import little

WHOLE_REQUEST = 0xFFFFFFFF
REPLY, LAST_OF_ITEM, END_OF_REQUEST, ERROR = 1, 2, 4, 8
OPCODES = {
    "HELLO": 1,
    "AUTH": 2,
    "PING": 3,
    "PUT_NS": 4,
    "EXISTS": 5,
    "GET": 6,
    "PUT": 7,
    "REMOVE": 8,
    "ERASE": 9,
    "LIST": 10,
    "STAT": 11,
    "SYNC": 12,
    "LEASE": 13,
    "RELEASE": 14,
    "CANCEL": 15,
    "OPEN_REGION": 16,
    "PREFETCH": 17,
    "SUBSCRIBE": 18,
    "ANNOUNCE": 19,
    "CONSUMERS": 20,
    "DRAIN": 21,
}
HELLO_KEYS = {
    "features_offered": 1,
    "features_required": 2,
    "lane": 3,
    "max_meta_bytes": 4,
    "max_fragment_bytes": 5,
    "auth_methods": 6,
    "nonce": 7,
    "node_id": 8,
    "incarnation": 9,
    "boot_id": 10,
    "software": 128,
    "client_name": 129,
    "group": 130,
}
REQUEST_KEYS = {
    "ns": 1,
    "deadline_us": 2,
    "lease_ms": 3,
    "ack": 4,
    "replace": 5,
    "lease_id": 6,
    "target_request": 7,
    "cursor": 8,
    "limit": 9,
    "known_revision": 10,
    "wait_ms": 11,
    "descriptor": 12,
    "mac": 13,
    "checksum": 14,
    "aborted": 15,
    "trace_id": 128,
    "priority": 129,
    "recompute_us": 130,
    "label": 131,
}
REPLY_KEYS = {
    "status": 1,
    "length": 2,
    "checksum": 3,
    "lease_id": 4,
    "prefix": 5,
    "cursor": 6,
    "mac": 7,
    "queue_us": 128,
    "disk_us": 129,
    "retry_after_ms": 130,
    "reason": 131,
    "nearest_differs_in": 132,
    "lease_ms": 133,
}
KEYS = {"hello": HELLO_KEYS, "request": REQUEST_KEYS, "reply": REPLY_KEYS}


class FrameError(Exception):
    """A header that closes the connection. The message is the name of the fault."""


@dataclass
class Frame:
    """One frame. `meta` is None where the frame has none, otherwise a mapping of names to values."""

    opcode: int
    flags: int = 0
    request_id: int = 0
    item: int = WHOLE_REQUEST
    meta: dict[str, Any] | None = None
    payload: bytes = b""
    raw_meta: bytes = field(default=b"", repr=False)


def pack_meta(kind: str, values: dict[str, Any]) -> bytes:
    """Msgpack of a meta map: integer keys, ascending."""
    keys = KEYS[kind]
    ordered = sorted((keys[name], value) for name, value in values.items())
    return bytes(msgpack.packb(dict(ordered), use_bin_type=True))


def unpack_meta(kind: str, data: bytes) -> dict[str, Any]:
    """The reverse of pack_meta; unknown keys from 128 on are dropped, below they raise KeyError."""
    names = {number: name for name, number in KEYS[kind].items()}
    found = msgpack.unpackb(data, strict_map_key=False, raw=False)
    return {names[key]: value for key, value in found.items() if key < 128 or key in names}


def kind_of(frame: Frame) -> str:
    """Which meta table a frame uses."""
    if frame.opcode == OPCODES["HELLO"]:
        return "hello"
    return "reply" if frame.flags & REPLY else "request"


def header(opcode: int, flags: int, request_id: int, item: int, meta_bytes: int, payload_bytes: int) -> bytes:
    """The 32 bytes in front of every frame."""
    data = b"DFK1" + little(1, 1) + little(opcode, 1) + little(flags, 2) + little(request_id, 8)
    data += little(item, 4) + little(meta_bytes, 4) + little(payload_bytes, 4)
    return data + little(crc32c(data), 4)


def encode(frame: Frame) -> bytes:
    """One frame, whole."""
    meta = b"" if frame.meta is None else pack_meta(kind_of(frame), frame.meta)
    head = header(frame.opcode, frame.flags, frame.request_id, frame.item, len(meta), len(frame.payload))
    return head + meta + frame.payload


def decode_header(data: bytes, max_meta_bytes: int = 262144, max_fragment_bytes: int = 1048576) -> dict[str, int]:
    """Fields of a header. Raises FrameError with the fault's name."""
    if data[:4] != b"DFK1":
        raise FrameError("magic")
    if int.from_bytes(data[28:32], "little") != crc32c(data[:28]):
        raise FrameError("crc")
    if data[4] != 1:
        raise FrameError("major")
    names = (("opcode", 5, 1), ("flags", 6, 2), ("request_id", 8, 8), ("item", 16, 4))
    lengths = (("meta_bytes", 20, 4), ("payload_bytes", 24, 4))
    fields = {name: int.from_bytes(data[at : at + size], "little") for name, at, size in names + lengths}
    if fields["flags"] & 0xF0:
        raise FrameError("flags")
    if fields["meta_bytes"] > max_meta_bytes:
        raise FrameError("meta_limit")
    if fields["payload_bytes"] > max_fragment_bytes:
        raise FrameError("payload_limit")
    return fields


def decode_stream(data: bytes) -> Iterator[Frame]:
    """Every frame of a recorded direction of a connection."""
    at = 0
    while at < len(data):
        fields = decode_header(data[at : at + 32])
        at += 32
        raw_meta = data[at : at + fields["meta_bytes"]]
        at += fields["meta_bytes"]
        payload = data[at : at + fields["payload_bytes"]]
        at += fields["payload_bytes"]
        frame = Frame(fields["opcode"], fields["flags"], fields["request_id"], fields["item"], None, payload, raw_meta)
        if raw_meta:
            frame.meta = unpack_meta(kind_of(frame), raw_meta)
        yield frame


# ---- tables --------------------------------------------------------------------------------------


def exists_table(parts: Sequence[int], chunks: Sequence[tuple[bytes, int]]) -> bytes:
    """u32 chunks, u32 parts, parts x u64, chunks x {block 16, route 8}."""
    data = little(len(chunks), 4) + little(len(parts), 4) + b"".join(little(part, 8) for part in parts)
    return data + b"".join(block + little(route, 8) for block, route in chunks)


def item_table(items: Sequence[tuple[bytes, int, int, int]]) -> bytes:
    """u32 items, u32 zero, items x {block 16, part 8, route 8, u32 length, u32 zero}."""
    data = little(len(items), 4) + little(0, 4)
    for block, part, route, length in items:
        data += block + little(part, 8) + little(route, 8) + little(length, 4) + little(0, 4)
    return data


def statuses(values: Sequence[int]) -> bytes:
    """One u16 for each item or chunk."""
    return b"".join(little(value, 2) for value in values)
