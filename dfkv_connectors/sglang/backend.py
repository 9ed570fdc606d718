"""DfkvHiCache: SGLang's HiCacheStorage over dfkv.

A fault of ours never becomes a fault of the engine: every call catches, counts, logs once per kind and answers with a
miss. Only a wrong configuration raises, from the constructor, before anything is served.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult

from dfkv_core.config import SglangConnectorConfig, load_config

from . import hits
from .pools import KV, PagePool, PoolError, Ranks, is_logical
from .sharing import Sharing
from .stats import Counters

logger = logging.getLogger("sglang.dfkv")
T = TypeVar("T")

# What SGLang reads out of the same JSON; everything else in it is ours.
_SGLANG_KEYS = frozenset(
    {
        "backend_name",
        "module_path",
        "class_name",
        "interface_v1",
        "allocator",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_max",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
        "tp_lcm_size",
    }
)


class DfkvHiCache(HiCacheStorage):
    """The L3 of one SGLang rank. Pages go straight between the host pool and the wire.

    Threads: SGLang calls lookups, loads and saves from threads of its own, several at once, and changes those threads at
    will; registration, get_stats() and close() come from its scheduler's thread.
    """

    def __init__(self, storage_config: Any = None, kwargs: Any = None) -> None:
        extra = dict(getattr(storage_config, "extra_config", None) or {})
        zero_copy = bool(extra.get("interface_v1", 0))
        loaded = load_config(
            SglangConnectorConfig,
            flags={key: value for key, value in extra.items() if key not in _SGLANG_KEYS},
            flags_source="hicache_storage_backend_extra_config",
        )
        config = loaded.value
        logger.setLevel(config.log_level.upper())
        self._ranks = Ranks.of(storage_config)
        self._faulted: set[str] = set()
        self._lock = threading.Lock()
        self.counters = Counters(
            exported=bool(getattr(storage_config, "enable_storage_metrics", False)),
            ranks={"tp_rank": self._ranks.tp_rank, "pp_rank": self._ranks.pp_rank},
        )
        logger.info("dfkv: %s", loaded.summary())
        label = str(getattr(storage_config, "model_name", None) or "sglang")
        self._sharing = Sharing.open(config, self._ranks, self.counters, label)
        # The generic interface moves flat copies, whose bytes stand in another order than the pool's buffers.
        self._zero_copy = zero_copy
        self._pools: dict[str, PagePool] = {}
        self._flat: PagePool | None = None
        self._logical_kv = False

    # ---- registration

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(KV, getattr(getattr(mem_pool_host, "anchor_entry", None), "host_pool", mem_pool_host))

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = _name(host_pool_name)
        known = self._pools.get(name)
        if known is None or known.pool is not host_pool:
            self._register(name, host_pool)

    def _register(self, name: str, pool: Any) -> None:
        if is_logical(pool):
            self._logical_kv = self._logical_kv or name == KV
            return

        def register() -> None:
            self._pools[name] = PagePool.of(name, pool, self._ranks)
            if name == KV:
                self._flat = PagePool.of(name, pool, self._ranks, flat=True)

        try:
            register()
        except PoolError as error:
            logger.warning("dfkv: pool %s is not shared: %s", name, error)
        except Exception:
            self._fault("register")

    # ---- one page after the other, through flat copies

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        found = self.batch_get([key], None if target_location is None else [target_location])
        return found[0]

    def batch_get(self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """The tensors of target_locations, filled; None for what is not there."""
        if not keys or not _are_tensors(target_locations, len(keys)):
            return [None] * len(keys)
        if self._logical_kv:  # whose pages have no bytes: what is there is for the pools beside it to say
            return list(target_locations)
        filled = self._call("batch_get", lambda: self._sharing.load_flat(self._flat_pool(), keys, target_locations))
        done = filled or [False] * len(keys)
        return [target if ok else None for target, ok in zip(target_locations, done, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], None if value is None else [value])

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Whether all of them are stored."""
        if not keys or not _are_tensors(values, len(keys)):
            return not keys
        if self._logical_kv:
            return True
        stored = self._call("batch_set", lambda: self._sharing.save_flat(self._flat_pool(), keys, values))
        return bool(stored) and all(stored or ())

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """Pages that are there, from the first on without a gap."""
        if not keys:
            return 0
        # A logical pool alone stores nothing.
        return self._call("batch_exists", lambda: self._sharing.prefix(self._kv_pool(), keys)) or 0

    # ---- zero copy

    def batch_get_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Per page whether the pool now holds it. host_indices: page size slots for each key."""
        return self._pages("batch_get_v1", KV, keys, host_indices, save=False)

    def batch_set_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Per page whether it is stored."""
        return self._pages("batch_set_v1", KV, keys, host_indices, save=True)

    def batch_exists_v2(self, keys: Sequence[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """The longest prefix that every pool can restore, what each pool has, and every restorable length."""
        found = self._call("batch_exists_v2", lambda: self._exists_v2(keys, list(pool_transfers or ())))
        return PoolTransferResult.empty() if found is None else found

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        return self._transfers("batch_get_v2", transfers, save=False)

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        return self._transfers("batch_set_v2", transfers, save=True)

    # ---- the rest

    def clear(self) -> None:
        """Removes this engine's namespaces from every node, for everyone who shares them."""
        self._call("clear", self._sharing.erase)

    def get_stats(self) -> Any:
        """Samples for SGLang's histograms since the last call, None for nothing. Constant time, no I/O."""
        return self.counters.take_samples()

    def close(self) -> None:
        """Ends every call under way. Idempotent; later calls are misses."""
        self._sharing.close()

    # ---- inside

    def _kv_pool(self) -> PagePool | None:
        return self._pools.get(KV) if self._zero_copy else self._flat

    def _flat_pool(self) -> PagePool | None:
        return self._flat

    def _pages(self, call: str, name: str, keys: Sequence[str], host_indices: Any, *, save: bool) -> list[bool]:
        if name == KV and self._logical_kv:
            return [True] * len(keys)
        if not keys:
            return []
        request = [(self._pools.get(name), keys, host_indices)]
        done = self._call(call, lambda: self._sharing.move(request, save=save))
        return done[0] if done else [False] * len(keys)

    def _transfers(self, call: str, transfers: Any, *, save: bool) -> dict[Any, list[bool]]:
        listed = [transfer for transfer in transfers if transfer.keys]
        requests = [(self._pools.get(_name(each.name)), each.keys, each.host_indices) for each in listed]
        done = self._call(call, lambda: self._sharing.move(requests, save=save)) if requests else []
        out: dict[Any, list[bool]] = {transfer.name: [] for transfer in transfers}
        for index, transfer in enumerate(listed):
            # Several transfers of one pool are one span.
            out[transfer.name] += done[index] if done else [False] * len(transfer.keys)
        return out

    def _exists_v2(self, keys: Sequence[str], transfers: Sequence[Any]) -> Any:
        wanted: list[tuple[PagePool | None, Sequence[str]]] = []
        if not self._logical_kv:
            wanted.append((self._kv_pool(), keys))
        for transfer in transfers:
            grouped = getattr(transfer.hit_policy, "value", "") == "block_groups"
            wanted.append((self._pools.get(_name(transfer.name)), (transfer.keys or ()) if grouped else keys))
        found = self._sharing.lookup(wanted)
        kv: hits.Found = [bool(transfers)] * len(keys) if self._logical_kv else found.pop(0)
        prefix = hits.fold(kv, transfers, found)
        if "restorable_prefix_pages" in PoolTransferResult.__dataclass_fields__:
            return PoolTransferResult(prefix.pages, prefix.boundaries, prefix.restorable)
        return PoolTransferResult(prefix.pages, prefix.boundaries)

    def _call(self, name: str, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except Exception:
            self._fault(name)
            return None

    def _fault(self, name: str) -> None:
        self.counters.add("faults", 1, name)
        with self._lock:
            first = name not in self._faulted
            self._faulted.add(name)
        if first:
            logger.exception("dfkv: fault in %s; it counts as a miss", name)


def _name(pool_name: Any) -> str:
    return str(getattr(pool_name, "value", pool_name))


def _are_tensors(values: Any, count: int) -> bool:
    return (
        isinstance(values, (list, tuple)) and len(values) == count and all(isinstance(v, torch.Tensor) for v in values)
    )
