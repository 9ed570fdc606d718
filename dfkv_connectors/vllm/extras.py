"""What a request adds to a block's identity beyond its tokens: adapter content, cache salt, multimodal inputs."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dfkv_core.weights import WeightsError, adapter_digest, adapter_fingerprint

# Tags of block extras (docs/formats.md). Append only.
EXTRA_ADAPTER = 1
EXTRA_CACHE_SALT = 2
EXTRA_MULTIMODAL = 3

Extra = tuple[int, int, bytes]  # block index, tag, value


class NotShareableError(Exception):
    """This request's KV depends on something that has no content identity. Its reason is the message."""


class AdapterDigests:
    """Content digests of the adapters this engine serves. One thread at a time.

    The digest is taken when an adapter is first seen, about when the engine loads it. When its files change later
    nobody knows which content the engine has in memory: from then on requests with it are not shared.
    """

    def __init__(self, digest: Callable[[Path], bytes] = adapter_digest) -> None:
        self._digest = digest
        self._known: dict[tuple[int, str], tuple[tuple[Any, ...], bytes]] = {}

    def of(self, lora_request: Any) -> bytes:
        """Raises NotShareableError."""
        if getattr(lora_request, "load_inplace", False):
            raise NotShareableError("adapter_loaded_in_place")
        path = str(lora_request.lora_path)
        key = (int(lora_request.lora_int_id), path)
        fingerprint = adapter_fingerprint(Path(path))
        known = self._known.get(key)
        if known is None:
            try:
                known = (fingerprint, self._digest(Path(path)))
            except (WeightsError, OSError):
                raise NotShareableError("adapter_unreadable") from None
            if adapter_fingerprint(Path(path)) != fingerprint:
                raise NotShareableError("adapter_changed")
            self._known[key] = known
        if known[0] != fingerprint:
            raise NotShareableError("adapter_changed")
        return known[1]


def request_extras(request: Any, block_tokens: int, adapters: AdapterDigests) -> list[Extra]:
    """Extras of each block of `request`, in no particular order.

    Adapter and salt enter the first block, and through the chain every later one. A multimodal input enters each block
    it overlaps, as (offset from the block's start, its content identifier). Raises NotShareableError.
    """
    if getattr(request, "prompt_embeds", None) is not None:
        raise NotShareableError("prompt_embeds")
    if getattr(request, "resumable", False):
        raise NotShareableError("resumable")
    if getattr(request, "pooling_params", None) is not None:
        raise NotShareableError("pooling")
    extras: list[Extra] = []
    lora_request = getattr(request, "lora_request", None)
    if lora_request is not None:
        extras.append((0, EXTRA_ADAPTER, adapters.of(lora_request)))
    salt = getattr(request, "cache_salt", None)
    if salt:
        extras.append((0, EXTRA_CACHE_SALT, salt.encode()))
    for feature in getattr(request, "mm_features", None) or ():
        identifier, position = feature.identifier, feature.mm_position
        if not identifier:
            raise NotShareableError("multimodal_without_identifier")
        first = position.offset // block_tokens
        last = (position.offset + max(position.length, 1) - 1) // block_tokens
        for block in range(first, last + 1):
            relative = position.offset - block * block_tokens
            extras.append((block, EXTRA_MULTIMODAL, struct.pack("<q", relative) + identifier.encode()))
    return extras
