"""DfkvLinker: SGLang's UnifiedCacheLinker over dfkv, from the device pools to the nodes without a host tier.

SGLang ends a request whose queued load fails. So a load here is over before it is queued: load() waits for the bytes, and
refuses what did not arrive, which is then computed. That wait and the lookup's are the scheduler's: both are bounded,
and after a lookup that ran into its deadline there is none for a while.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import resolve_hybrid_device_pool_group
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker

from dfkv_core.config import SglangConnectorConfig, load_config

from . import hits
from .pools import KV, PagePool, PoolError, Ranks
from .sharing import Sharing
from .stats import Counters

logger = logging.getLogger("sglang.dfkv")
T = TypeVar("T")

LOOKUP_MS = 50.0  # the scheduler's wait for a lookup
REST_S = 1.0  # without lookups after one that got no answer in time


class DfkvLinker(UnifiedCacheLinker):
    """The store of one SGLang rank. All methods are called by its scheduler's thread."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: Any = None,
        forward_stream: Any = None,
    ) -> None:
        loaded = load_config(
            SglangConnectorConfig, flags=extra_config or {}, flags_source="unified_cache_external_linker_config"
        )
        logger.setLevel(loaded.value.log_level.upper())
        logger.info("dfkv: %s", loaded.summary())
        self.forward_stream = forward_stream
        self._config = loaded.value
        self._group = resolve_hybrid_device_pool_group(
            kvcache=params.token_to_kv_pool_allocator.get_kvcache(),
            page_size=params.page_size,
            params=params,
            components=components,
        )
        self.pools = self._group.entry_map
        self.layer_done_counter = LayerWiseLoadCounter(self._group.num_layers)
        if "mamba" in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._verdict_groups = _verdict_groups(params)
        ranks = _ranks(params, replicated=bool(self._group.rank_replicated))
        self._stores = not ranks.replicated or ranks.tp_rank == 0
        self.counters = Counters(exported=False, ranks={})
        self._sharing = Sharing.open(
            self._config, ranks, self.counters, str(getattr(server_args, "model_path", "sglang"))
        )
        self._pools = {
            str(name): pool for name, entry in self.pools.items() if (pool := _page_pool(name, entry, ranks))
        }
        self._loaded: set[str] = set()
        self._rest_until_s = 0.0
        self._offloads: queue.Queue[tuple[list[Any], list[Any]] | None] = queue.Queue()
        self._results: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread: threading.Thread | None = threading.Thread(
            target=self._offload_all, name="dfkv-offload", daemon=True
        )
        self._thread.start()

    # ---- lookups and loads

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        return self._safely("lookup", lambda: self._lookup(transfers), [])

    def _lookup(self, transfers: list[Any]) -> list[int]:
        expanded = self._group.resolve_transfers(transfers)
        keys = next((transfer.keys for transfer in transfers if transfer.name == KV), None)
        if not expanded or not keys or time.monotonic() < self._rest_until_s:
            return []
        started_s = time.monotonic()
        found = self._sharing.lookup([(self._pools.get(str(each.name)), keys) for each in expanded], LOOKUP_MS)
        if time.monotonic() - started_s >= LOOKUP_MS / 1e3:
            self._rest_until_s = time.monotonic() + REST_S
        # Without a pool of KV its indices are an anchor for the others.
        kv: hits.Found = [True] * len(keys)
        sides = []
        for transfer, there in zip(expanded, found, strict=True):
            if transfer.name == KV:
                kv = there
            else:
                sides.append((transfer, there))
        return hits.fold(kv, [transfer for transfer, _ in sides], [there for _, there in sides]).restorable

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Receives the pages. Every rank gives the same answer."""
        verdict = torch.tensor([int(self._safely("load", lambda: self._load(transfers), False))], dtype=torch.int)
        for group in self._verdict_groups:
            torch.distributed.all_reduce(verdict, op=torch.distributed.ReduceOp.MIN, group=group)
        if not verdict.item():
            return False
        self._loaded.add(rid)
        return True

    def _load(self, transfers: list[Any]) -> bool:
        expanded = self._group.resolve_transfers(transfers, allow_partial=True, allow_missing_kv=True)
        return bool(expanded) and self._move(expanded, save=False)

    def start_layer_wise_loading(self) -> int:
        if not self._loaded:
            return -1
        self._loaded.clear()
        index: int = self.layer_done_counter.update_producer()
        for layer in range(self._group.num_layers):
            self.layer_done_counter.complete(index, layer)
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return bool(self.layer_done_counter.finish(counter_index))

    def cancel_queued_load(self, rid: str) -> bool:
        there = rid in self._loaded
        self._loaded.discard(rid)
        return there

    # ---- offloads

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        # Not caught: what is queued depends on the transfers alone, on every rank alike.
        expanded = self._group.resolve_transfers(transfers, allow_partial=True)
        if not expanded:
            return False
        self._offloads.put((expanded if self._stores else [], self.record_offload_ready()))
        return True

    def num_completed_offloads(self) -> int:
        return self._results.qsize()

    def pop_completed_offload(self) -> bool:
        return self._results.get_nowait()

    def _offload_all(self) -> None:
        while (offload := self._offloads.get()) is not None:
            self._results.put(self._safely("offload", functools.partial(self._offload, *offload), False))
            self._offloads.task_done()

    def _offload(self, transfers: list[Any], ready: list[Any]) -> bool:
        for event in ready:
            event.synchronize()
        return self._move(transfers, save=True)

    # ---- the rest

    def reset(self) -> None:
        self._offloads.join()
        while self._results.qsize():
            self._results.get_nowait()
        self._loaded.clear()
        self.layer_done_counter.reset()

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._offloads.put(None)
            thread.join()
        self._sharing.close()

    def _move(self, transfers: Sequence[Any], *, save: bool) -> bool:
        """Whether every page of every pool was moved."""
        requests = [(self._pools.get(str(each.name)), each.keys, each.host_indices) for each in transfers]
        return all(all(moved) for moved in self._sharing.move(requests, save=save))

    def _safely(self, name: str, call: Callable[[], T], otherwise: T) -> T:
        try:
            return call()
        except Exception:
            if not self.counters.total("faults", name):
                logger.exception("dfkv: fault in %s of the linker; it counts as a miss", name)
            self.counters.add("faults", 1, name)
            return otherwise


class _DevicePages:
    """A linker's view of a device pool, described as PagePool wants it."""

    def __init__(self, entry: Any) -> None:
        pool = entry.device_pool
        self._entry = entry
        self.layout = f"device {type(pool).__name__}"
        self.page_size = entry.page_size
        self.size = 1 << 62  # the entry checks its own rows
        self.dtype = entry.kv_buffer[0].dtype
        self.head_num = getattr(pool, "head_num", 0)
        self.head_dim = getattr(pool, "head_dim", 0)
        self.kv_cache_dim = getattr(pool, "kv_cache_dim", 0)
        self.start_layer = getattr(pool, "start_layer", 0)
        self.layer_num = len(entry.layer_mapping)

    def get_page_buffer_meta(self, indices: Any) -> Any:
        return self._entry.get_page_buffer_meta(indices)


def _page_pool(name: Any, entry: Any, ranks: Ranks) -> PagePool | None:
    devices = {buffer.device.type for buffer in entry.kv_buffer}
    if devices != {"cpu"}:
        logger.warning("dfkv: pool %s is not shared: it is on %s, not in host memory", name, ", ".join(sorted(devices)))
        return None
    try:
        return PagePool.of(str(name), _DevicePages(entry), ranks)
    except PoolError as error:
        logger.warning("dfkv: pool %s is not shared: %s", name, error)
        return None


def _verdict_groups(params: Any) -> list[Any]:
    """The groups over which SGLang agrees on what was found."""
    groups = [params.attn_cp_cache_group, params.attn_tp_cache_group]
    found = [each for each in groups if each is not None and torch.distributed.get_world_size(group=each) > 1]
    whole = params.tp_cache_group
    if not found and whole is not None and torch.distributed.get_world_size(group=whole) > 1:
        found.append(whole)
    return found


def _ranks(params: Any, *, replicated: bool) -> Ranks:
    group = params.attn_tp_cache_group or params.tp_cache_group
    tp_rank, tp_size = 0, 1
    if group is not None:
        tp_rank, tp_size = torch.distributed.get_rank(group=group), torch.distributed.get_world_size(group=group)
    return Ranks(
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_rank=params.pp_rank,
        pp_size=params.pp_size,
        cp_rank=params.attn_cp_rank,
        cp_size=params.attn_cp_size,
        replicated=replicated,
    )
