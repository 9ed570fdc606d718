"""Namespace, block, part and route, written from docs/formats.md on hashlib alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any


def little(value: int, size: int) -> bytes:
    """An unsigned integer, little-endian."""
    return value.to_bytes(size, "little")


def framed(data: bytes) -> bytes:
    """u32 length, then the bytes."""
    return little(len(data), 4) + data


# ---- namespace -----------------------------------------------------------------------------------


def descriptor(fields: Iterable[tuple[int, bytes]]) -> bytes:
    """{u16 tag, u32 length, bytes} in ascending tag order."""
    return b"".join(little(tag, 2) + framed(data) for tag, data in sorted(fields))


def namespace_id(encoded: bytes) -> bytes:
    """First 16 bytes of the prefixed SHA-256."""
    return hashlib.sha256(b"dfkv.ns.1" + encoded).digest()[:16]


def _layout(axes: Sequence[Sequence[Any]]) -> bytes:
    data = little(len(axes), 1)
    for name, size in axes:
        data += little(len(name.encode()), 1) + name.encode() + little(size, 8)
    return data


def _groups(groups: Sequence[dict[str, Any]]) -> bytes:
    data = little(len(groups), 1)
    for group in groups:
        states = group.get("state_sizes", [])
        data += little(group["kind"], 1)
        data += little(group.get("window", 0), 4)
        data += little(group.get("heads", 0), 4)
        data += little(group.get("head_size", 0), 4)
        data += little(len(states), 1) + b"".join(little(size, 8) for size in states)
    return data


# tag, name, encoder, default (None: always written). Values are JSON-ready: digests and blobs in hex.
_FIELDS: list[tuple[int, str, Any, Any]] = [
    (1, "tenant", str.encode, ""),
    (2, "engine_family", str.encode, None),
    (3, "kv_format", lambda v: little(v, 4), None),
    (4, "fleet_salt", bytes.fromhex, ""),
    (5, "weights_digest", bytes.fromhex, None),
    (6, "weights_generation", lambda v: little(v, 8), 0),
    (7, "config_digest", bytes.fromhex, None),
    (8, "compute_dtype", str.encode, None),
    (9, "kv_dtype", str.encode, None),
    (10, "kv_scales_digest", bytes.fromhex, ""),
    (11, "page_layout", _layout, []),
    (12, "page_format", str.encode, ""),
    (13, "block_tokens", lambda v: little(v, 4), None),
    (14, "chunk_tokens", lambda v: little(v, 4), None),
    (15, "hash_form", lambda v: little(v["algorithm"], 1) + framed(bytes.fromhex(v["seed"])), {}),
    (16, "groups", _groups, None),
    (17, "pp_size", lambda v: little(v, 2), 1),
    (18, "pcp_size", lambda v: little(v, 2), 1),
    (19, "dcp_size", lambda v: little(v, 2), 1),
    (20, "shard_scheme", lambda v: little(v, 2), 0),
]


def descriptor_of(values: dict[str, Any]) -> bytes:
    """The descriptor of a namespace whose fields are given as JSON-ready values."""
    encoded = []
    for tag, name, encode, default in _FIELDS:
        value = values.get(name, default)
        if default is None or value != default:
            encoded.append((tag, encode(value)))
    return descriptor(encoded)


# ---- blocks --------------------------------------------------------------------------------------


def chain_start() -> bytes:
    """h0 of the own chain, all 32 bytes."""
    return hashlib.sha256(b"dfkv.block.1").digest()


def chain_next(tip: bytes, tokens: Sequence[int], extras: Iterable[tuple[int, bytes]] = ()) -> bytes:
    """The next h of the own chain, all 32 bytes; the block id is the first 16."""
    data = b"dfkv.blk.1" + tip + little(len(tokens), 4) + b"".join(little(token, 4) for token in tokens)
    ordered = sorted(extras)
    data += little(len(ordered), 2) + b"".join(little(tag, 1) + framed(value) for tag, value in ordered)
    return hashlib.sha256(data).digest()


def opaque_block_id(algorithm: int, engine_hash: bytes, extras: bytes) -> bytes:
    """Block id of a block that the engine itself hashes."""
    data = b"dfkv.opq.1" + little(algorithm, 1) + framed(engine_hash) + extras
    return hashlib.sha256(data).digest()[:16]


def part(group: int, component: int, stage: int, cp_index: int, shard_index: int, shard_count: int) -> int:
    """group 8 | component 8 | stage 16 | context-parallel index 8 | shard index 8 | shard count 8 | zero 8."""
    value = 0
    shift = 0
    for field, width in ((group, 8), (component, 8), (stage, 16), (cp_index, 8), (shard_index, 8), (shard_count, 8)):
        value |= field << shift
        shift += width
    return value


def route(block_id: bytes) -> int:
    """Placement rule 1: the first 8 bytes of the block id."""
    return int.from_bytes(block_id[:8], "little")


# ---- authentication ------------------------------------------------------------------------------


def auth_mac(secret: bytes, role: str, client_nonce: bytes, server_nonce: bytes, node_id: str) -> bytes:
    """HMAC-SHA-256 after RFC 2104, from the hash alone."""
    key = hashlib.sha256(secret).digest() if len(secret) > 64 else secret
    key = key.ljust(64, b"\0")
    message = b"dfkv.auth.1" + role.encode() + client_nonce + server_nonce + node_id.encode()
    inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in key) + message).digest()
    return hashlib.sha256(bytes(byte ^ 0x5C for byte in key) + inner).digest()
