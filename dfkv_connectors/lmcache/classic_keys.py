"""The keys of LMCache's classic mode as block ids and parts, and which of them name KV at all. Any thread."""

from __future__ import annotations

import functools
import struct
from typing import Any

from dfkv_core import _native
from dfkv_core.keys import PartFields
from dfkv_core.namespace import HashAlgorithm

# What is kept of a chunk, or of each of its layers: all its tokens, or, of a prompt's last one, how many and those.
FULL, TAIL_TOKENS, TAIL = 0, 1, 2

_MIN_HASH_BITS = 128
_SHORT_HASH_BITS = 64
_SHA256 = frozenset({"sha256", "sha256_cbor", "sha256_cbor_64bit"})
_U32 = struct.Struct("<I")
_RANK = struct.Struct("<QQ")  # world size, worker; then the data type and the tags

_BUILTIN = (
    "LMCache names chunks by Python's builtin hash, which has 64 bits, differs between processes and can be made to "
    "collide; set pre_caching_hash_algorithm to sha256_cbor and PYTHONHASHSEED to the same value for every engine. "
)
_SHORT = (
    "LMCache's classic mode keeps 64 bits of whatever hash it uses, few enough that somebody can make two prompts collide: "
    "use LMCache's server, which keeps them all, or set accept_short_hashes where every user is trusted"
)


def block_id(key: Any) -> bytes:
    """16 bytes: the chunk's hash with everything of the key that is neither in the namespace nor the layer."""
    extras = [_RANK.pack(key.world_size, key.worker_id), _framed(str(key.dtype))]
    for name, value in sorted((str(name), str(value)) for name, value in key.tags or ()):
        extras += [_framed(name), _framed(value)]
    return _native.opaque_block_id(HashAlgorithm.LMCACHE_CLASSIC, hash_bytes(key.chunk_hash), b"".join(extras))


@functools.cache
def part(component: int, layer: int | None) -> int:
    """Layers of a chunk are its stages, counted from 1."""
    return PartFields(component=component, stage=0 if layer is None else layer + 1).encode()


def layer_of(key: Any) -> int | None:
    """None: the key of a whole chunk."""
    layer = getattr(key, "layer_id", None)
    return None if layer is None else int(layer)


def hash_bytes(chunk_hash: int | bytes) -> bytes:
    if isinstance(chunk_hash, bytes):
        return chunk_hash
    return chunk_hash.to_bytes((chunk_hash.bit_length() + 8) // 8, "big", signed=True)


class HashRule:
    """Which chunk hashes name KV.

    algorithm: LMCache's pre_caching_hash_algorithm. accept_short: take 64 bits of SHA-256.
    """

    def __init__(self, algorithm: str, *, accept_short: bool) -> None:
        self._algorithm = algorithm
        self._accept_short = accept_short
        self._is_builtin: bool | None = None if algorithm in _SHA256 else True

    def refusal(self, chunk_hash: int | bytes) -> str:
        """Why it cannot name KV and what to set, empty where it can."""
        if isinstance(chunk_hash, bytes):
            bits, negative = 8 * len(chunk_hash), False
        else:
            bits, negative = chunk_hash.bit_length(), chunk_hash < 0
        if bits >= _MIN_HASH_BITS and not negative:
            return ""
        if self._is_builtin is None:
            self._is_builtin = not _vllm_has(self._algorithm)
        # SHA-256 is never negative: LMCache must have fallen back to the builtin hash.
        self._is_builtin |= negative
        if self._is_builtin:
            return _BUILTIN + _SHORT
        return "" if self._accept_short and bits <= _SHORT_HASH_BITS else _SHORT


def _vllm_has(algorithm: str) -> bool:
    """Whether LMCache finds the algorithm in vLLM. Where it does not, it takes the builtin hash and goes on."""
    try:
        from vllm.utils.hashing import get_hash_fn_by_name

        return callable(get_hash_fn_by_name(algorithm.removesuffix("_64bit")))
    except Exception:
        return False


def _framed(text: str) -> bytes:
    data = text.encode()
    return _U32.pack(len(data)) + data
