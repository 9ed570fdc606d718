"""DfkvL2Adapter: an L2 of LMCache's multiprocess server over dfkv.

Objects go straight between LMCache's L1 arena and the wire. A fault of ours never becomes a fault of the server: every
call catches, counts, logs once per kind, and its task ends as a miss. Only a wrong configuration raises, from the
constructor, before anything is served.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier, torch_device_type

from dfkv_connectors.counters import Counters
from dfkv_connectors.tables import chunk_table, item_table
from dfkv_core.client import Client
from dfkv_core.config import LmcacheConnectorConfig, load_config
from dfkv_core.keys import MAX_CHUNKS_PER_REQUEST, MAX_ITEMS_PER_REQUEST, Status, pack_items, pack_parts
from dfkv_core.namespace import HashAlgorithm
from dfkv_core.results import Statuses

from .arena import Arena
from .faults import Faults
from .identity import Layout, ObjectKind, describe_device, layout_refusal
from .keys import block_ids, refusal, serves_engine
from .locks import LockBook
from .namespaces import Namespaces
from .stats import FAMILIES, PREFIX

if TYPE_CHECKING:
    from dfkv_core import _native

logger = logging.getLogger("lmcache.dfkv")

PART = 0  # an object is the only part of its chunk
LOOKUP, LOAD, STORE, DELETE = "lookup", "load", "store", "delete"


@dataclass(eq=False)
class _Task:
    """One submitted call, until all its operations have ended."""

    kind: str
    number: int
    keys: Sequence[Any]
    layouts: Sequence[Layout | None]
    objects: Sequence[Any] = ()
    done: set[int] = field(default_factory=set)  # positions that ended well
    stored: list[int] = field(default_factory=list)  # of those, the ones that were not there already
    payload_bytes: int = 0
    left: int = 1  # operations under way, and the one that starts them


class DfkvL2Adapter(L2AdapterInterface):
    """Any thread. No call blocks but close()."""

    def __init__(self, params: Mapping[str, Any], *, l1_memory_desc: Any = None) -> None:
        """params: "adapter_params" of the adapter's JSON, keys of LmcacheConnectorConfig. Raises ConfigError, ValueError."""
        super().__init__()
        loaded = load_config(LmcacheConnectorConfig, flags=dict(params), flags_source="adapter_params")
        config = self._config = loaded.value
        logger.setLevel(config.log_level.upper())
        self._arena = Arena.of(l1_memory_desc)
        self._counters = Counters(FAMILIES, prefix=PREFIX, constant={})
        self._faults = Faults(self._counters, logger)
        self._lock = threading.Lock()
        self._closed = False
        self._numbers = itertools.count()
        self._learned: dict[tuple[str, int], Layout] = {}
        self._results: dict[str, dict[int, Any]] = {LOOKUP: {}, LOAD: {}, STORE: {}}
        self._limits_ms = {
            LOOKUP: config.lookup_deadline_ms,
            LOAD: config.load_deadline_ms,
            STORE: config.save_deadline_ms,
            DELETE: config.save_deadline_ms,
        }
        self._locks = LockBook()
        self._client = Client.open(config)
        self._native = self._client.native
        device = describe_device(torch_device_type)
        objects = ObjectKind("mp", HashAlgorithm.LMCACHE_BLAKE3, version("lmcache"), device)
        self._namespaces = Namespaces(config, self._client.add_namespace, objects)
        self._notifiers = {kind: create_event_notifier() for kind in self._results}
        logger.info("dfkv: %s", loaded.summary())

    # ---- event descriptors

    def get_store_event_fd(self) -> int:
        return int(self._notifiers[STORE].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._notifiers[LOOKUP].fileno())

    def get_load_event_fd(self) -> int:
        return int(self._notifiers[LOAD].fileno())

    # ---- store

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._submit(STORE, keys, [Layout.of_object(each.metadata) for each in objects], objects)

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        with self._lock:
            completed, self._results[STORE] = self._results[STORE], {}
        return completed

    # ---- lookup and lock

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: dict[int, Any]) -> int:
        """What is found is leased on its node until the last of its keys is unlocked, at most lease_ms."""
        given = {group: Layout.of(desc.shapes, desc.dtypes) for group, desc in group_layout_descs.items()}
        layouts = [given.get(key.object_group_id) or self._learned_layout(key) for key in keys]
        return self._submit(LOOKUP, keys, layouts)

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        with self._lock:
            return self._results[LOOKUP].pop(task_id, None)

    def submit_unlock(self, keys: list[Any]) -> None:
        self._faults.succeeds("unlock", lambda: self._native.release(self._locks.unlock(keys, time.monotonic())))

    # ---- load

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._submit(LOAD, keys, [Layout.of_object(each.metadata) for each in objects], objects)

    def query_load_result(self, task_id: int) -> Any:
        with self._lock:
            return self._results[LOAD].pop(task_id, None)

    # ---- the rest

    def delete(self, keys: list[Any]) -> None:
        """Removes objects from every node, for everyone who shares them. Returns before that is done."""
        self._submit(DELETE, keys, [self._learned_layout(key) for key in keys])

    def report_status(self) -> dict[str, Any]:
        """is_healthy: the nodes are known; a cache that is away costs misses."""
        return {
            "is_healthy": not self._closed and self._native.view() is not None,
            "type": type(self).__name__,
            "addresses": list(self._config.addresses),
            "locked_key_count": self._locks.locked_keys,
            "client": self._native.stats(),
        }

    def close(self) -> None:
        """Ends every task under way; their memory is not touched any more. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._faults.succeeds("close", lambda: self._native.release(self._locks.take_all()))
        self._client.close()
        for notifier in self._notifiers.values():
            notifier.close()

    # ---- tasks

    def _submit(
        self, kind: str, keys: Sequence[Any], layouts: Sequence[Layout | None], objects: Sequence[Any] = ()
    ) -> int:
        task = _Task(kind, next(self._numbers), list(keys), layouts, list(objects))

        def start() -> None:
            self._faults.succeeds(kind, lambda: self._start(task))
            self._ended(task)

        limit_s = self._limits_ms[kind] / 1e3
        names = {key.model_name for key in keys}
        if not self._faults.succeeds(kind, lambda: self._namespaces.when_read(names, start, limit_s)):
            self._ended(task)
        return task.number

    def _start(self, task: _Task) -> None:
        """Starts one operation for each namespace of the task's keys."""
        wanted: dict[bytes, list[int]] = {}
        for index, (key, layout) in enumerate(zip(task.keys, task.layouts, strict=True)):
            namespace = self._namespace(task.kind, key, layout)
            if namespace is not None:
                wanted.setdefault(namespace, []).append(index)
        step = MAX_CHUNKS_PER_REQUEST if task.kind == LOOKUP else MAX_ITEMS_PER_REQUEST
        for namespace, indices in wanted.items():
            for first in range(0, len(indices), step):
                if task.kind == LOOKUP:
                    self._look_up(task, namespace, indices[first : first + step])
                else:
                    self._move(task, namespace, indices[first : first + step])

    def _namespace(self, kind: str, key: Any, layout: Layout | None) -> bytes | None:
        """None where the key is not shared: counted, and said once for each reason."""
        namespace, reason, detail = None, "hash", refusal(key)
        if not detail and layout is None:
            # Nothing of this kind was stored or loaded here, so that there is nothing to find.
            self._counters.add("refused", 1, kind, "unknown")
            return None
        if not detail and layout is not None and serves_engine(key):
            reason, detail = "layout", layout_refusal(layout, self._config.kv_cache_dtype)
        if not detail and layout is not None:
            reason = "model"
            namespace, detail = self._namespaces.find(key.model_name, layout)
            if namespace is not None:
                self._learned[key.model_name, key.object_group_id] = layout
                return namespace
        self._counters.add("refused", 1, kind, reason)
        self._faults.tell(f"dfkv: model {key.model_name} is not shared: {detail}")
        return None

    def _learned_layout(self, key: Any) -> Layout | None:
        return self._learned.get((key.model_name, key.object_group_id))

    def _look_up(self, task: _Task, namespace: bytes, indices: Sequence[int], *, again: bool = False) -> None:
        keys = [task.keys[index] for index in indices]
        started_s = time.monotonic()
        operation = self._native.exists(
            namespace, chunk_table(block_ids(keys)), pack_parts([PART]), self._limits_ms[LOOKUP], self._config.lease_ms
        )

        def end(ended: _native.Operation) -> None:
            # A node keeps the keys before its first gap. Those behind it are asked for again, by themselves.
            found = Statuses(ended.statuses()).done()
            prefix = ended.prefix
            if prefix:
                self._locks.lock(keys[:prefix], ended.leases(), started_s, self._config.lease_ms / 1e3)
            else:
                self._native.release(ended.leases())
            task.done.update(indices[:prefix])
            behind = [index for index, there in zip(indices[prefix:], found[prefix:], strict=True) if there]
            if behind and not again and not self._closed:
                self._look_up(task, namespace, behind, again=True)

        self._follow(task, operation, end, counted=not again)

    def _move(self, task: _Task, namespace: bytes, indices: Sequence[int]) -> None:
        """A store, a load or a removal."""
        ids = block_ids([task.keys[index] for index in indices])
        limit_ms = self._limits_ms[task.kind]
        kept: Any = None
        if task.kind == DELETE:
            operation = self._native.remove(namespace, pack_items(ids, PART, 0), limit_ms)
        else:
            segments = self._arena.segments([task.objects[index] for index in indices])
            lengths = segments[:, 1].astype(np.uint32).reshape(-1, 1)
            counts = np.ones(len(indices), dtype=np.uint32)
            call = self._native.put if task.kind == STORE else self._native.get
            operation = call(namespace, item_table(ids, [PART], lengths), segments.data, counts.data, limit_ms)
            kept = (segments, counts)

        def end(ended: _native.Operation, _kept: Any = kept) -> None:
            for index, status in zip(indices, Statuses(ended.statuses()), strict=True):
                if status < Status.MISS_NOT_FOUND:
                    task.done.add(index)
                    if status == Status.OK:
                        task.stored.append(index)
            task.payload_bytes += ended.payload_bytes

        self._follow(task, operation, end)

    def _follow(
        self,
        task: _Task,
        operation: _native.Operation,
        end: Callable[[_native.Operation], None],
        *,
        counted: bool = True,
    ) -> None:
        """Ends the task's share in the operation once that is done, on the client's dispatching thread."""
        with self._lock:
            task.left += 1

        def ended(done: _native.Operation) -> None:
            try:
                if counted:
                    for status, count in Statuses(done.statuses()).reasons().items():
                        self._counters.add("keys", count, task.kind, status)
                self._faults.succeeds(task.kind, lambda: end(done))
            finally:
                self._ended(task)

        try:
            self._client.future_of(operation, ended)
        except BaseException:
            operation.cancel()
            self._ended(task)
            raise

    def _ended(self, task: _Task) -> None:
        with self._lock:
            task.left -= 1
            if task.left:
                return
        self._faults.succeeds(task.kind, lambda: self._notify(task))
        self._counters.add("bytes", task.payload_bytes, task.kind)
        if task.kind == DELETE:
            return
        result: Any
        if task.kind == STORE:
            result = L2StoreResult(len(task.done) == len(task.keys), task.payload_bytes)
        else:
            result = Bitmap(len(task.keys))
            result.batched_set(sorted(task.done))
        with self._lock:
            if not self._closed:
                self._results[task.kind][task.number] = result
                self._notifiers[task.kind].notify()

    def _notify(self, task: _Task) -> None:
        """Tells LMCache's listeners."""
        if task.kind == LOOKUP and task.done:
            self._notify_keys_accessed([task.keys[index] for index in sorted(task.done)])
        elif task.kind in (STORE, DELETE) and task.stored:
            keys = [task.keys[index] for index in task.stored]
            sizes = [layout.object_bytes if (layout := task.layouts[index]) else 0 for index in task.stored]
            (self._notify_keys_stored if task.kind == STORE else self._notify_keys_deleted)(keys, sizes)
