"""Lookups, loads and saves of pages: pools and page hashes on one side, the client on the other.

Every method is called by SGLang's threads, several at once, waits no longer than its deadline and max_call_ms, and
answers with booleans that are exact: True means every byte is there.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from dfkv_connectors.pending import Pending
from dfkv_core import _native
from dfkv_core.client import Client
from dfkv_core.config import SglangConnectorConfig
from dfkv_core.keys import BLOCK_ID_BYTES, Status
from dfkv_core.namespace import HashAlgorithm, field_names

from . import hits
from .identity import ModelIdentity, identify_model, pool_descriptor
from .leases import LeaseBook
from .pools import Geometry, PagePool, PoolError, Ranks, tensor_segments
from .stats import Counters
from .transfers import Batch, Deadline, Statuses, count, done, start_lookup, start_transfer
from .weights_watch import updates, watch

logger = logging.getLogger("sglang.dfkv")

_HASH_BYTES = 32
Request = tuple[PagePool | None, Sequence[str], Any]  # pool, page hashes, host_indices


class Sharing:
    """One rank's pages in dfkv. Any thread."""

    def __init__(
        self,
        client: Client,
        config: SglangConnectorConfig,
        identity: Pending[ModelIdentity],
        counters: Counters,
        label: str,
    ) -> None:
        self._client = client
        self._native = client.native
        self._config = config
        self._identity = identity
        self._counters = counters
        self._label = label
        self._lock = threading.Lock()
        self._namespaces: dict[tuple[str, Geometry], bytes] = {}  # pool's name and geometry -> id
        self._told: set[Any] = set()
        self._leases = LeaseBook(self._native.release)
        self._closed = False

    @classmethod
    def open(cls, config: SglangConnectorConfig, ranks: Ranks, counters: Counters, label: str) -> Sharing:
        """With a client of its own. Call it before the engine serves anything: an update of weights must not go unseen."""
        watched = watch()
        identity = Pending(lambda: identify_model(config, watched=watched))
        client = Client.open(config, name=f"{config.effective_name()[:110]}/tp{ranks.tp_rank}")
        return cls(client, config, identity, counters, label[:256])

    # ---- lookups

    def prefix(self, pool: PagePool | None, keys: Sequence[str]) -> int:
        """Pages that are there, from the first on without a gap."""
        return hits.leading(self.lookup([(pool, keys)])[0])

    def lookup(
        self, wanted: Sequence[tuple[PagePool | None, Sequence[str]]], limit_ms: float | None = None
    ) -> list[hits.Found]:
        """For each pool and its keys, per key whether the page is there. What is found is leased for the load."""
        deadline = self._deadline(self._config.lookup_deadline_ms if limit_ms is None else limit_ms)
        started_s = time.monotonic()
        batches: list[Batch | None] = []
        for pool, keys in wanted:
            namespace = self._namespace(pool, deadline) if keys else None
            if pool is None or namespace is None:
                batches.append(None)
                continue
            ids = page_ids(keys)
            batches.append(start_lookup(self._native, namespace, ids, pool.parts, deadline, self._config.lease_ms))
        found: list[hits.Found] = []
        for (pool, keys), batch in zip(wanted, batches, strict=True):
            if pool is None or batch is None:
                found.append([False] * len(keys))
                continue
            statuses = batch.finish(deadline)
            found.append(done(statuses))
            self._looked_up(pool, batch, statuses, hits.leading(found[-1]))
        self._counters.add("seconds", time.monotonic() - started_s, "lookup")
        return found

    def _looked_up(self, pool: PagePool, batch: Batch, statuses: Statuses, pages: int) -> None:
        self._count("lookup", pool, statuses)
        self._counters.add("lookups", 1, pool.name, "hit" if pages else Status(int(statuses[0])).label)
        if pages:
            self._leases.keep(batch.chunk_ids[(pages - 1) * BLOCK_ID_BYTES : pages * BLOCK_ID_BYTES], batch.leases())
        else:
            self._native.release(batch.leases())
            self._tell_difference(pool)

    # ---- loads and saves

    def move(self, requests: Sequence[Request], *, save: bool) -> list[list[bool]]:
        """For each pool, its keys and its pages: per page whether it was moved. All within one deadline."""
        limit_ms = self._config.save_deadline_ms if save else self._config.load_deadline_ms
        deadline = self._deadline(limit_ms)
        started_s = time.monotonic()
        flat: list[list[Any]] = []
        batches: list[Batch | None] = []
        for pool, keys, host_indices in requests:
            flat.append([])
            namespace = self._namespace(pool, deadline)
            if pool is None or namespace is None:
                batches.append(None)
                continue
            ids, kept = page_ids(keys), (pool.pool, host_indices)
            if pool.runs:
                segments, part_bytes = pool.segments(host_indices, len(keys)), pool.part_bytes
            else:
                pages = pool.flat_pages(host_indices, len(keys)) if save else pool.blank_pages(len(keys))
                flat[-1], segments, part_bytes, kept = pages, tensor_segments(pages), None, (pages, pool.pool)
            batches.append(
                start_transfer(
                    self._native, namespace, ids, pool.parts, segments, deadline, save=save, part_bytes=part_bytes,
                    kept=kept,
                )
            )  # fmt: skip
        moved = []
        operation = "save" if save else "load"
        for (pool, keys, host_indices), batch, pages in zip(requests, batches, flat, strict=True):
            there = self._finish(operation, pool, batch, deadline) or [False] * len(keys)
            if pool is not None and pages and not save:
                pool.fill(host_indices, pages, there)
            moved.append(there)
        self._counters.add("seconds", time.monotonic() - started_s, operation)
        return moved

    def load_flat(self, pool: PagePool | None, keys: Sequence[str], pages: Sequence[Any]) -> list[bool]:
        """Receives pages into flat tensors."""
        return self._move_flat(pool, keys, pages, "load", self._config.load_deadline_ms)

    def save_flat(self, pool: PagePool | None, keys: Sequence[str], pages: Sequence[Any]) -> list[bool]:
        """Stores flat tensors."""
        pages = [page.detach().contiguous() for page in pages]
        return self._move_flat(pool, keys, pages, "save", self._config.save_deadline_ms)

    def _move_flat(
        self, pool: PagePool | None, keys: Sequence[str], pages: Sequence[Any], operation: str, limit_ms: float
    ) -> list[bool]:
        deadline = self._deadline(limit_ms)
        namespace = self._namespace(pool, deadline)
        if pool is None or namespace is None:
            return [False] * len(keys)
        batch = start_transfer(
            self._native, namespace, page_ids(keys), pool.parts, tensor_segments(pages), deadline,
            save=operation == "save", kept=pages,
        )  # fmt: skip
        return self._finish(operation, pool, batch, deadline) or [False] * len(keys)

    def _finish(
        self, operation: str, pool: PagePool | None, batch: Batch | None, deadline: Deadline
    ) -> list[bool] | None:
        if pool is None or batch is None:
            return None
        statuses = batch.finish(deadline)
        self._count(operation, pool, statuses)
        self._counters.add("bytes", batch.payload_bytes, operation, pool.name)
        self._counters.sample(operation, len(statuses), batch.payload_bytes, batch.seconds)
        if operation == "load":
            self._leases.loaded(batch.chunk_ids[-BLOCK_ID_BYTES:])
        moved: list[bool] = done(statuses).tolist()
        return moved

    # ---- namespaces

    def erase(self) -> None:
        """Removes this rank's namespaces from every node."""
        deadline = self._deadline(self._config.max_call_ms)
        namespaces = list(self._namespaces.values())
        Batch([self._native.erase(namespace, deadline.left_ms) for namespace in namespaces], b"", 1).finish(deadline)

    def close(self) -> None:
        """Ends every call under way. Idempotent; later calls are misses."""
        self._closed = True
        self._leases.close()
        self._client.close()

    def _namespace(self, pool: PagePool | None, deadline: Deadline) -> bytes | None:
        """The pool's namespace, None where its pages are not shared (counted, and said once)."""
        if self._closed:
            return None
        reason, detail = "", ""
        if pool is None:
            reason = "pool not registered"
        elif updates():
            reason = "weights were updated in place"
        elif (known := self._namespaces.get((pool.name, pool.geometry))) is not None:
            return known
        elif (model := self._identity.wait(deadline.left_ms / 1e3)) is not None:
            return self._new_namespace(pool, model)
        else:
            detail = self._identity.error
            reason = "model not identified" if detail else "model not identified yet"
        self._counters.add("refused", 1, reason)
        self._say(reason, logging.WARNING, "dfkv: nothing is shared: %s%s", reason, f" ({detail})" if detail else "")
        return None

    def _new_namespace(self, pool: PagePool, model: ModelIdentity) -> bytes:
        key = (pool.name, pool.geometry)
        with self._lock:
            if key not in self._namespaces:
                try:
                    descriptor = pool_descriptor(model, pool)
                except ValueError as error:
                    raise PoolError(f"pool {pool.name} has no namespace: {error}") from error
                namespace = self._native.add_namespace(descriptor.encode(), self._label)
                self._namespaces[key] = namespace
                logger.info(
                    "dfkv: sharing KV of pool %s in namespace %s (%s): pages of %d tokens, %d parts of %s bytes",
                    pool.name, namespace.hex(), self._label, pool.geometry.page_tokens, len(pool.parts),
                    pool.part_bytes or "flat",
                )  # fmt: skip
        return self._namespaces[key]

    def _tell_difference(self, pool: PagePool) -> None:
        """Once per pool: a namespace that is almost this one says what keeps the two apart."""
        if ("difference", pool.name) in self._told:
            return
        namespace = self._namespaces[pool.name, pool.geometry]
        tags = self._native.namespace_difference(namespace)
        if tags:
            self._say(
                ("difference", pool.name), logging.INFO,
                "dfkv: nothing is stored for pool %s yet; the nearest namespace differs in: %s",
                pool.name, ", ".join(field_names(tags)),
            )  # fmt: skip

    def _say(self, once: Any, level: int, message: str, *values: object) -> None:
        with self._lock:
            if once in self._told:
                return
            self._told.add(once)
        logger.log(level, message, *values)

    def _count(self, operation: str, pool: PagePool, statuses: Statuses) -> None:
        for status, pages in count(statuses).items():
            self._counters.add("pages", pages, operation, pool.name, status)

    def _deadline(self, limit_ms: float) -> Deadline:
        return Deadline.after_ms(min(limit_ms, self._config.max_call_ms))


def page_ids(keys: Sequence[str]) -> bytes:
    """Block ids of SGLang's page hashes, 16 bytes each, joined: SHA-256 in hex, or any text, told apart by length."""
    if set(map(len, keys)) <= {2 * _HASH_BYTES}:
        try:
            hashes = bytes.fromhex("".join(keys))
        except ValueError:
            hashes = b""
        if len(hashes) == _HASH_BYTES * len(keys):  # fromhex passes over blanks
            return _native.opaque_block_ids(HashAlgorithm.SGLANG_PAGE, hashes, _HASH_BYTES)
    return b"".join(_text_id(key) for key in keys)


def _text_id(key: str) -> bytes:
    try:
        digest = bytes.fromhex(key) if len(key) == 2 * _HASH_BYTES else b""
    except ValueError:
        digest = b""
    if len(digest) == _HASH_BYTES:
        return _native.opaque_block_id(HashAlgorithm.SGLANG_PAGE, digest, b"")
    return _native.opaque_block_id(HashAlgorithm.SGLANG_PAGE, hashlib.sha256(key.encode()).digest(), b"text")
