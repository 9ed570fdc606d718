"""The client of the cache for Python: typed batches over the native client, which does the work without the GIL.

Every operation takes a deadline and reports per key; a failure of the cache is a status, never an exception. Three forms
of each: `get` waits, `get_async` is awaited, `get_future` gives a concurrent.futures.Future. The caller's memory is
read (put) or written (get) until the operation is done, and never after that, also when it was cancelled or late.
The client keeps the buffers it was given alive until then.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from dfkv_core.completions import Completions, OperationFuture
from dfkv_core.keys import pack_chunks, pack_items, pack_parts, route_of, split_ids
from dfkv_core.memory import pack_segments, segments_of
from dfkv_core.results import BatchResult, Lookup

if TYPE_CHECKING:
    from dfkv_core import _native

T = TypeVar("T")
Ack = Literal["ram", "disk"]

# The native client ends every operation at its deadline; this is for a machine that is out of breath.
_GRACE_MS = 2000.0
_READABLE_STATES = (1, 2)  # serving, draining


class ClientSettings(Protocol):
    """What open() needs to know. dfkv_core.config.ClientConfig is one."""

    @property
    def seeds(self) -> list[tuple[str, int]]: ...
    def effective_name(self) -> str: ...
    def read_secret(self) -> bytes | None: ...
    @property
    def last_view_path(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def connections_per_node(self) -> int: ...
    @property
    def connect_timeout_ms(self) -> int: ...
    @property
    def cooldown_ms(self) -> int: ...
    @property
    def lookup_deadline_ms(self) -> int: ...
    @property
    def load_deadline_ms(self) -> int: ...
    @property
    def save_deadline_ms(self) -> int: ...
    @property
    def lease_ms(self) -> int: ...
    @property
    def max_inflight_bytes(self) -> int: ...


class ClientClosedError(RuntimeError):
    """The client was closed. Open another."""


@dataclass(frozen=True)
class Deadlines:
    """Used where a call names none."""

    lookup_ms: float = 500
    load_ms: float = 10_000
    save_ms: float = 30_000


@dataclass(frozen=True, slots=True)
class Item:
    """One object of a batch. buffer: anything segments_of() takes; its bytes in order are the object."""

    block_id: bytes
    part: int
    buffer: Any
    route: int | None = None  # None: placement rule 1


@dataclass(frozen=True)
class _Tables:
    """A batch as the native client takes it, and the buffers it points into."""

    items: bytes
    segments: bytes
    counts: bytes
    buffers: list[Any]

    @classmethod
    def of(cls, batch: Sequence[Item], *, writable: bool) -> _Tables:
        each = [segments_of(item.buffer, writable=writable) for item in batch]
        lengths = [sum(length for _, length in segments) for segments in each]
        routes = [route_of(item.block_id) if item.route is None else item.route for item in batch]
        return cls(
            pack_items(b"".join([item.block_id for item in batch]), [item.part for item in batch], lengths, routes),
            pack_segments([segment for segments in each for segment in segments]),
            struct.pack(f"<{len(each)}I", *[len(segments) for segments in each]),
            [item.buffer for item in batch],
        )


@dataclass(frozen=True)
class _Started(Generic[T]):
    """An operation in flight, what to make of it, and what must stay alive until it is done."""

    operation: _native.Operation
    make: Callable[[_native.Operation], T]
    limit_ms: float
    buffers: list[Any] | None = None


class Client:
    """Connections to the cache nodes. Make it with open(), after any fork. Methods from any thread."""

    def __init__(self, native: _native.Client, deadlines: Deadlines | None = None, lease_ms: int = 0) -> None:
        self.native = native
        """For callers that pack their batches themselves; see dfkv_core/_native.pyi."""
        self.deadlines = deadlines or Deadlines()
        self.lease_ms = lease_ms
        self._completions = Completions(native)
        self._closed = False

    @classmethod
    def open(
        cls,
        target: ClientSettings | Sequence[str],
        *,
        name: str = "",
        secret: bytes | None = None,
        last_view: bytes | None = None,
        **native_options: Any,
    ) -> Client:
        """Starts the client's thread; connects in the background and does not wait for it.

        target: addresses of nodes to ask first ("host:port"), or a ClientConfig. name and secret overrule the
        latter's. native_options: those of _native.Client. last_view: what view() gave in an earlier process, for when
        no address answers. Raises ValueError for what cannot be an address, OSError when no thread or descriptor is left.
        """
        from dfkv_core import _native
        from dfkv_core.config_values import split_address

        if isinstance(target, str):
            raise TypeError(f"addresses: expected a list, found the text {target!r}")
        if isinstance(target, Sequence):
            seeds = [split_address(address) for address in target]
            native = _native.Client(seeds, name=name, secret=secret, last_view=last_view, **native_options)
            return cls(native)
        options: dict[str, int] = {
            "connections_per_node": target.connections_per_node,
            "connect_timeout_ms": target.connect_timeout_ms,
            "cooldown_ms": target.cooldown_ms,
            "max_inflight_bytes": target.max_inflight_bytes,
            **native_options,
        }
        native = _native.Client(
            target.seeds,
            name=name or target.effective_name(),
            secret=secret if secret is not None else target.read_secret(),
            last_view=last_view,
            last_view_path=target.last_view_path,
            group=target.group,
            **options,
        )
        deadlines = Deadlines(target.lookup_deadline_ms, target.load_deadline_ms, target.save_deadline_ms)
        return cls(native, deadlines, target.lease_ms)

    def close(self, timeout_ms: float = 2000) -> None:
        """Ends every operation (unfinished keys: cancelled) and every thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._completions.stop()
        self.native.close(timeout_ms)
        self._completions.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait_ready(self, timeout_ms: float) -> bool:
        """True once the view of the cluster is known. Not needed before operations: they wait by themselves."""
        return self.native.wait_ready(timeout_ms)

    def add_namespace(self, descriptor: bytes, label: str = "") -> bytes:
        """Makes a namespace known to every node. Returns its 16-byte id; does not block. ValueError: not canonical."""
        return self.native.add_namespace(descriptor, label)

    # ---- lookup

    def lookup(
        self,
        namespace: bytes,
        block_ids: bytes | Sequence[bytes],
        parts: Sequence[int],
        *,
        deadline_ms: float | None = None,
        lease_ms: int | None = None,
        routes: Sequence[int] | None = None,
    ) -> Lookup:
        """Which chunks have all `parts`, in order. lease_ms: what is found is kept that long (None: as configured)."""
        return self._now(self._exists(namespace, block_ids, parts, deadline_ms, lease_ms, routes, waits=True))

    async def lookup_async(
        self,
        namespace: bytes,
        block_ids: bytes | Sequence[bytes],
        parts: Sequence[int],
        *,
        deadline_ms: float | None = None,
        lease_ms: int | None = None,
        routes: Sequence[int] | None = None,
    ) -> Lookup:
        """lookup() for asyncio."""
        return await self._awaited(self._exists(namespace, block_ids, parts, deadline_ms, lease_ms, routes))

    def lookup_future(
        self,
        namespace: bytes,
        block_ids: bytes | Sequence[bytes],
        parts: Sequence[int],
        *,
        deadline_ms: float | None = None,
        lease_ms: int | None = None,
        routes: Sequence[int] | None = None,
    ) -> OperationFuture[Lookup]:
        """lookup() for threads."""
        return self._future(self._exists(namespace, block_ids, parts, deadline_ms, lease_ms, routes))

    # ---- get

    def get(self, source: bytes | Lookup, batch: Sequence[Item], *, deadline_ms: float | None = None) -> BatchResult:
        """Receives objects into the items' buffers. source: the namespace, or the lookup that found them.

        A key is done only when every byte has arrived and the checksum is right; what its buffer holds otherwise is
        unspecified. Raises MemoryTypeError for a buffer that cannot be written.
        """
        return self._now(self._get(source, batch, deadline_ms))

    async def get_async(
        self, source: bytes | Lookup, batch: Sequence[Item], *, deadline_ms: float | None = None
    ) -> BatchResult:
        """get() for asyncio."""
        return await self._awaited(self._get(source, batch, deadline_ms))

    def get_future(
        self, source: bytes | Lookup, batch: Sequence[Item], *, deadline_ms: float | None = None
    ) -> OperationFuture[BatchResult]:
        """get() for threads."""
        return self._future(self._get(source, batch, deadline_ms))

    # ---- put

    def put(
        self,
        namespace: bytes,
        batch: Sequence[Item],
        *,
        deadline_ms: float | None = None,
        replace: bool = False,
        recompute_us: int = 0,
        ack: Ack = "ram",
    ) -> BatchResult:
        """Stores objects. Write-once: a key that is there gives `already`, unless replace. recompute_us: what the
        batch would cost to compute again, for eviction. ack: "ram" promises that it is found, "disk" that it is after a
        crash too (`again_disk` when no disk could take it, a refusal where there is none). The buffers must not change
        until this is done."""
        return self._now(self._put(namespace, batch, deadline_ms, replace, recompute_us, ack))

    async def put_async(
        self,
        namespace: bytes,
        batch: Sequence[Item],
        *,
        deadline_ms: float | None = None,
        replace: bool = False,
        recompute_us: int = 0,
        ack: Ack = "ram",
    ) -> BatchResult:
        """put() for asyncio."""
        return await self._awaited(self._put(namespace, batch, deadline_ms, replace, recompute_us, ack))

    def put_future(
        self,
        namespace: bytes,
        batch: Sequence[Item],
        *,
        deadline_ms: float | None = None,
        replace: bool = False,
        recompute_us: int = 0,
        ack: Ack = "ram",
    ) -> OperationFuture[BatchResult]:
        """put() for threads."""
        return self._future(self._put(namespace, batch, deadline_ms, replace, recompute_us, ack))

    # ---- the rest

    def remove(
        self,
        namespace: bytes,
        block_ids: bytes | Sequence[bytes],
        parts: Sequence[int] | int,
        *,
        deadline_ms: float | None = None,
    ) -> BatchResult:
        """Removes objects; part keys.ALL_PARTS removes the chunk. Returns once the nodes have done it."""
        self._check_open()
        limit = self.deadlines.save_ms if deadline_ms is None else deadline_ms
        operation = self.native.remove(namespace, pack_items(_joined(block_ids), parts, 0), limit)
        return self._now(_Started(operation, BatchResult.of, limit))

    def erase(self, namespace: bytes, *, deadline_ms: float = 5000) -> dict[str, int | None]:
        """Removes a namespace everywhere. Objects that went, per node id; None: the node did not answer."""
        return self._ask(self.native.erase(namespace, deadline_ms), deadline_ms)

    def list_namespaces(self, *, deadline_ms: float = 5000) -> dict[str, list[dict[str, Any]] | None]:
        """Per node id its namespaces: id, descriptor, label, objects, stored_bytes, created_s, last_used_s."""
        return self._ask(self.native.list_namespaces(deadline_ms), deadline_ms)

    def node_stats(self, *, deadline_ms: float = 5000) -> dict[str, dict[str, int] | None]:
        """Per node id its counters (docs/metrics.md)."""
        return self._ask(self.native.stat(deadline_ms), deadline_ms)

    def ping(self, *, deadline_ms: float = 1000) -> dict[str, int | None]:
        """Microseconds to each node and back."""
        return self._ask(self.native.ping(deadline_ms), deadline_ms)

    def sync(self, *, deadline_ms: float = 30_000) -> dict[str, bool]:
        """Makes what was stored before survive a crash. Per node id whether it does: not on a node without disks."""
        return {
            node_id: answer is not None
            for node_id, answer in self._ask(self.native.sync(deadline_ms), deadline_ms).items()
        }

    def view(self) -> bytes | None:
        """The view of the cluster in wire form; None before the first."""
        return self.native.view()

    def stats(self) -> dict[str, Any]:
        """Counters of this client."""
        return self.native.stats()

    # ---- inside

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosedError("the client is closed; open another")

    def _now(self, started: _Started[T]) -> T:
        try:
            started.operation.wait(started.limit_ms + _GRACE_MS)
        finally:
            # Also when a signal's handler raised: the buffers belong to the caller again.
            started.operation.cancel()
        return started.make(started.operation)

    async def _awaited(self, started: _Started[T]) -> T:
        await self._completions.wait(started.operation)
        return started.make(started.operation)

    def future_of(self, operation: _native.Operation, make: Callable[[_native.Operation], T]) -> OperationFuture[T]:
        """A future of an operation of `native`. `make` runs on the client's dispatching thread and must not block.

        Whoever packed the batch keeps its buffers alive until then."""
        self._check_open()
        return self._completions.future(operation, make)

    def _future(self, started: _Started[T]) -> OperationFuture[T]:
        kept = started

        def make(operation: _native.Operation) -> T:
            return kept.make(operation)

        return self._completions.future(started.operation, make)

    def _ask(self, operation: _native.Operation, limit_ms: float) -> dict[str, Any]:
        answers: dict[str, Any] = self._now(_Started(operation, lambda done: done.result, limit_ms))
        return answers

    def _exists(
        self,
        namespace: bytes,
        block_ids: bytes | Sequence[bytes],
        parts: Sequence[int],
        deadline_ms: float | None,
        lease_ms: int | None,
        routes: Sequence[int] | None,
        *,
        waits: bool = False,
    ) -> _Started[Lookup]:
        self._check_open()
        ids = _joined(block_ids)
        limit = self.deadlines.lookup_ms if deadline_ms is None else deadline_ms
        lease = self.lease_ms if lease_ms is None else lease_ms
        wait_ms = limit + _GRACE_MS if waits else 0.0
        operation = self.native.exists(namespace, pack_chunks(ids, routes), pack_parts(parts), limit, lease, wait_ms)

        def make(done: _native.Operation) -> Lookup:
            return Lookup(namespace, ids, done, self.native.release, self._owners)

        return _Started(operation, make, limit)

    def _get(self, source: bytes | Lookup, batch: Sequence[Item], deadline_ms: float | None) -> _Started[BatchResult]:
        self._check_open()
        namespace = source.namespace if isinstance(source, Lookup) else source
        tables = _Tables.of(batch, writable=True)
        limit = self.deadlines.load_ms if deadline_ms is None else deadline_ms
        operation = self.native.get(namespace, tables.items, tables.segments, tables.counts, limit)
        return _Started(operation, BatchResult.of, limit, tables.buffers)

    def _put(
        self,
        namespace: bytes,
        batch: Sequence[Item],
        deadline_ms: float | None,
        replace: bool,
        recompute_us: int,
        ack: Ack,
    ) -> _Started[BatchResult]:
        self._check_open()
        tables = _Tables.of(batch, writable=False)
        limit = self.deadlines.save_ms if deadline_ms is None else deadline_ms
        operation = self.native.put(
            namespace, tables.items, tables.segments, tables.counts, limit, replace, recompute_us, ack == "disk"
        )
        return _Started(operation, BatchResult.of, limit, tables.buffers)

    def _owners(self, block_ids: bytes, view_revision: int) -> list[str] | None:
        from dfkv_core import _native

        encoded = self.native.view()
        view = _native.decode_view(encoded) if encoded is not None else None
        if view is None or view["revision"] != view_revision:
            return None
        nodes = [node for node in view["nodes"] if int(node["state"]) in _READABLE_STATES]
        ids = [node["id"] for node in nodes]
        ring = _native.Ring(ids, [node["read_weight"] for node in nodes])
        return [ids[ring.owner(route_of(block))] for block in split_ids(block_ids)]


def _joined(block_ids: bytes | Sequence[bytes]) -> bytes:
    return block_ids if isinstance(block_ids, bytes) else b"".join(block_ids)
