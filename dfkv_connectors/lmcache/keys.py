"""LMCache's object keys as block ids. Pure; any thread."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Protocol

from dfkv_core import _native
from dfkv_core.namespace import HashAlgorithm

BUILTIN_HASH_BYTES = 8
MIN_HASH_BYTES = 16

_EXTRAS = struct.Struct("<QI")  # rank, object group; then the salt


class ObjectKey(Protocol):
    """What is read of LMCache's ObjectKey."""

    @property
    def chunk_hash(self) -> bytes: ...
    @property
    def model_name(self) -> str: ...
    @property
    def kv_rank(self) -> int: ...
    @property
    def object_group_id(self) -> int: ...
    @property
    def cache_salt(self) -> str: ...


def block_id(key: ObjectKey) -> bytes:
    """16 bytes: the chunk's hash with everything of the key that is not in the namespace."""
    extras = _EXTRAS.pack(key.kv_rank, key.object_group_id) + key.cache_salt.encode()
    return _native.opaque_block_id(HashAlgorithm.LMCACHE_BLAKE3, key.chunk_hash, extras)


def block_ids(keys: Sequence[ObjectKey]) -> bytes:
    """Joined ids, 16 bytes each."""
    return b"".join([block_id(key) for key in keys])


def serves_engine(key: ObjectKey) -> bool:
    """Whether an engine's KV is behind this key. Keys of LMCache's own checks and benchmarks have a world of no ranks."""
    return bool(key.kv_rank >> 24 & 0xFF)


def refusal(key: ObjectKey) -> str:
    """Why a key cannot name KV, empty where it can: its hash is one that two processes or two prompts may disagree on."""
    size = len(key.chunk_hash)
    if size == BUILTIN_HASH_BYTES:
        return (
            "its chunk hash has 64 bits, as Python's builtin hash, which differs between processes and is short enough "
            "for two prompts to collide; start lmcache server with --hash-algorithm blake3"
        )
    if size < MIN_HASH_BYTES and serves_engine(key):
        return (
            f"its chunk hash has {8 * size} bits, too few to name KV in a shared cache; start lmcache server with "
            "--hash-algorithm blake3"
        )
    return ""
