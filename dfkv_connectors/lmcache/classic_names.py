"""Which keys of LMCache's classic mode are shared, and what the cache calls them. Any thread."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dfkv_connectors.counters import Counters

from .classic_keys import HashRule, block_id, layer_of
from .classic_layout import ChunkLayout
from .faults import Faults
from .identity import layout_refusal
from .namespaces import Namespaces


@dataclass(frozen=True)
class Named:
    """A key that names KV. index: where it stands in the call."""

    index: int
    namespace: bytes
    block: bytes
    layer: int | None


class Names:
    """has_ends: whether a prompt's last chunk may be one that is not full."""

    def __init__(
        self,
        namespaces: Namespaces,
        layout: ChunkLayout,
        hashes: HashRule,
        counters: Counters,
        faults: Faults,
        *,
        model: str,
        kv_cache_dtype: str,
        has_ends: bool,
    ) -> None:
        self._namespaces = namespaces
        self._layout = layout
        self._identity = layout.identity()
        self._refusal = layout_refusal(self._identity, kv_cache_dtype)
        self._hashes = hashes
        self._counters = counters
        self._faults = faults
        self._model = model
        self._has_ends = has_ends

    def wait(self, limit_ms: float) -> None:
        """Waits until the model's files have been read, so that a first call is not a miss for that."""
        self._namespaces.is_read(self._model, limit_ms / 1e3)

    async def wait_async(self, limit_ms: float) -> None:
        if not self._namespaces.is_read(self._model):
            await asyncio.to_thread(self.wait, limit_ms)

    def of(self, kind: str, keys: Sequence[Any]) -> Sequence[Named]:
        """Those of the keys that are shared; the others are counted, and said once for each reason."""
        known: list[Named] = []
        blocks: dict[tuple[Any, ...], bytes] = {}  # the layers of a chunk have one
        for index, key in enumerate(keys):
            namespace, reason, detail = self._namespace(key)
            if namespace is None:
                self._counters.add("refused", 1, kind, reason)
                self._faults.tell(f"dfkv: model {key.model_name} is not shared: {detail}")
                continue
            chunk = (key.chunk_hash, key.world_size, key.worker_id, key.tags, key.dtype)
            block = blocks.get(chunk)
            if block is None:
                block = blocks[chunk] = block_id(key)
            known.append(Named(index, namespace, block, layer_of(key)))
        return known

    def ends(self, known: Sequence[Named]) -> Sequence[Named]:
        """Those of a chunk that may not be full: the last."""
        return [each for each in known if each.block == known[-1].block] if self._has_ends and known else []

    def _namespace(self, key: Any) -> tuple[bytes | None, str, str]:
        """The namespace of a key, or None, the reason's label and its text."""
        if detail := self._hashes.refusal(key.chunk_hash):
            return None, "hash", detail
        layer, layers = layer_of(key), self._layout.layers
        if (layer is None) != (layers == 0) or (layer is not None and not 0 <= layer < layers):
            # LMCache drops the layer where it maps the ranks of MLA to the first: all layers would have one name.
            found = "a whole chunk" if layer is None else f"layer {layer}"
            return (
                None,
                "layout",
                f"a key of {found}, where LMCache stores {layers or 'no'} layers of a chunk by themselves",
            )
        if self._refusal:
            return None, "layout", self._refusal
        namespace, detail = self._namespaces.find(key.model_name, self._identity)
        return namespace, "model", detail
