"""DfkvConnector: dfkv as a remote backend of LMCache's classic mode, inside an engine.

Chunks go straight between LMCache's memory objects and the wire. A fault of ours never becomes a fault of the engine:
every call catches, counts, logs once per kind, and is a miss. Only a wrong configuration raises, from the constructor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from lmcache.v1.platform import torch_device_type
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from dfkv_connectors.counters import Counters
from dfkv_core.client import Client
from dfkv_core.config import LmcacheClassicConfig
from dfkv_core.namespace import HashAlgorithm

from .classic_keys import HashRule
from .classic_layout import ChunkLayout
from .classic_lookups import LOOKUP, Lookups
from .classic_names import Names
from .classic_transfers import DELETE, GRACE_MS, LOAD, STORE, Transfers, ended, give_back
from .faults import Faults
from .identity import ObjectKind, describe_device
from .locks import LockBook
from .namespaces import Namespaces
from .stats import FAMILIES, PREFIX

logger = logging.getLogger("lmcache.dfkv")

LMCACHE_WAITS_SHARE = 0.8  # of LMCache's own limit: past that it loses what has arrived


class RefusedError(ValueError):
    """Settings of LMCache under which nothing may be shared. The message says what to change."""


class DfkvConnector(RemoteConnector):
    """Coroutines run on LMCache's event loop, the rest on any thread. No call outlasts its deadline.

    Whoever says that he answers pings is asked by LMCache's health check, which stops using its own memory too while he
    does not. A cache that is away costs misses here, so this one does not say so.
    """

    def __init__(self, config: LmcacheClassicConfig, lmcache: Any, metadata: Any, local_cpu_backend: Any) -> None:
        """lmcache, metadata: LMCache's configuration and the engine's metadata. Raises ConfigError, RefusedError."""
        _check(lmcache)
        super().__init__(lmcache, metadata)
        logger.setLevel(config.log_level.upper())
        self._lookup_ms = float(config.lookup_deadline_ms)
        self._lease_ms = config.lease_ms
        self._closed = False
        counters = Counters(FAMILIES, prefix=PREFIX, constant={})
        self._faults = Faults(counters, logger)
        self._client = Client.open(config)
        layout = ChunkLayout.of(
            self.meta_shapes, self.meta_dtypes, mla=metadata.use_mla, layerwise=bool(lmcache.use_layerwise)
        )
        algorithm = str(lmcache.pre_caching_hash_algorithm)
        form = f"{describe_device(torch_device_type)} {layout.format.name} {algorithm}"
        objects = ObjectKind("classic", HashAlgorithm.LMCACHE_CLASSIC, version("lmcache"), form)
        hashes = HashRule(algorithm, accept_short=config.accept_short_hashes)
        locks = LockBook()
        self._names = Names(
            Namespaces(config, self._client.add_namespace, objects),
            layout,
            hashes,
            counters,
            self._faults,
            model=str(metadata.model_name),
            kv_cache_dtype=config.kv_cache_dtype,
            has_ends=bool(lmcache.save_unfull_chunk),
        )
        self._lookups = Lookups(self._client.native, self._names, locks, counters, self._lookup_ms)
        self._transfers = Transfers(
            self._client,
            self._names,
            layout,
            locks,
            counters,
            self._faults,
            memory=local_cpu_backend,
            load_ms=min(config.load_deadline_ms, LMCACHE_WAITS_SHARE * 1e3 * lmcache.blocking_timeout_secs),
            save_ms=float(config.save_deadline_ms),
        )
        self._names.wait(0)  # begins to read the model's files

    # ---- lookups

    async def exists(self, key: Any) -> bool:
        return await self._prefix([key], 0) == 1

    def exists_sync(self, key: Any) -> bool:
        return self._prefix_now([key], 0) == 1

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: Sequence[Any]) -> int:
        """How many of the keys, from the first on, are there. They are leased for the load that follows."""
        return self._prefix_now(keys, self._lease_ms)

    async def batched_async_contains(self, lookup_id: str, keys: Sequence[Any], pin: bool = False) -> int:
        return await self._prefix(keys, self._lease_ms)

    # ---- loads

    async def get(self, key: Any) -> Any:
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: Sequence[Any]) -> Sequence[Any]:
        """A MemoryObj for each key that is there, which is the caller's, or None."""
        found: list[Any] = [None] * len(keys)
        try:
            await self._faults.awaited(LOAD, self._transfers.load(keys, found))
        except BaseException:
            # Cancelled: nobody waits for them any more.
            give_back(found)
            raise
        return found

    async def batched_get_non_blocking(self, lookup_id: str, keys: Sequence[Any]) -> Sequence[Any]:
        """Those before the first that is not there."""
        found = await self.batched_get(keys)
        length = next((index for index, each in enumerate(found) if each is None), len(found))
        give_back(found[length:])
        return found[:length]

    # ---- stores

    async def put(self, key: Any, memory_obj: Any) -> None:
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: Sequence[Any], memory_objs: Sequence[Any]) -> None:
        """LMCache's wrapper gives the references back once this has returned."""
        await self._faults.awaited(STORE, self._transfers.store(keys, memory_objs))

    # ---- the rest

    def remove_sync(self, key: Any) -> bool:
        """Removes the chunk, or the layer of it, from every node, for everyone who shares it. Whether it is gone."""
        return bool(self._faults.guarded(DELETE, lambda: self._transfers.remove(key)))

    async def list(self) -> Sequence[str]:
        """Nothing: the cache knows no names."""
        return []

    async def close(self) -> None:
        """Ends every operation under way; their memory is not touched any more. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._faults.close()
        await asyncio.to_thread(self._client.close)

    # ---- inside

    async def _prefix(self, keys: Sequence[Any], lease_ms: int) -> int:
        async def look_up() -> int:
            await self._names.wait_async(self._lookup_ms)
            lookup = self._lookups.start(keys, lease_ms)
            try:
                await asyncio.gather(*(ended(self._client, each) for each in lookup.operations))
            finally:
                lookup.cancel()
            return self._lookups.prefix(lookup)

        return await self._faults.awaited(LOOKUP, look_up()) or 0

    def _prefix_now(self, keys: Sequence[Any], lease_ms: int) -> int:
        def look_up() -> int:
            self._names.wait(self._lookup_ms)
            lookup = self._lookups.start(keys, lease_ms)
            try:
                for each in lookup.operations:
                    each.wait(self._lookup_ms + GRACE_MS)
            finally:
                lookup.cancel()
            return self._lookups.prefix(lookup)

        return self._faults.guarded(LOOKUP, look_up) or 0


def _check(lmcache: Any) -> None:
    """Raises RefusedError for settings under which a key does not say what its bytes are."""
    if lmcache.remote_serde not in (None, "naive"):
        raise RefusedError(
            f"remote_serde {lmcache.remote_serde!r}: LMCache's keys do not name serializers, and its kivi gives memory back "
            'before it is sent; set remote_serde to "naive"'
        )
    if lmcache.enable_blending:
        raise RefusedError(
            "enable_blending: LMCache then names a segment without the prompt before it, on which its KV depends; "
            "set it to false, or take dfkv out of remote_storage_plugins and remote_url"
        )
