"""Runs the commands of store.py on a real etcd, through aetcd: one client per member, a deadline for every call.

The only module that imports aetcd (extra `etcd`). A call that fails or is late is tried at the next member; the member that
answered last is asked first. Calls run side by side: a slow one holds up nobody else's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import aetcd
import aetcd.rpc as rpc

from dfkv_core.config_values import join_address
from dfkv_core.mds import store
from dfkv_core.mds.store import Consumer, Held, Keys, Snapshot, StoreError, unescape
from dfkv_core.membership.packing import PackingError, pack, unpack
from dfkv_core.membership.view import NodeEntry, View

_MEMBERS_TRIED = 3


class EtcdStore:
    """One group's keys. Used on one event loop."""

    def __init__(self, endpoints: Sequence[tuple[str, int]], group: str, *, call_timeout_s: float = 1.5) -> None:
        self._members = [_Member(host, port, Keys(group), call_timeout_s) for host, port in endpoints]
        self._first = 0

    async def run(self, command: store.Command) -> Any:
        """The command's result. Raises StoreError when no member did it."""
        failures = []
        start = self._first
        for offset in range(min(len(self._members), _MEMBERS_TRIED)):
            index = (start + offset) % len(self._members)
            member = self._members[index]
            try:
                result = await member.run(command)
            except (aetcd.ClientError, aetcd.rpc.BaseError, OSError) as error:
                failures.append(f"{member.address}: {_short(error)}")
            else:
                self._first = index
                return result
        raise StoreError("; ".join(failures))

    async def close(self) -> None:
        for member in self._members:
            with contextlib.suppress(asyncio.TimeoutError, aetcd.ClientError):  # nothing of it outlives the loop
                await asyncio.wait_for(member.close(), 1.0)


class _Member:
    """One etcd member. Its cache of the cluster's keys makes a read without changes small."""

    def __init__(self, host: str, port: int, keys: Keys, timeout_s: float) -> None:
        self.address = join_address(host, port)
        self._timeout_s = timeout_s
        # gRPC waits up to two minutes before it dials again; a lease does not live that long.
        options = {
            "grpc.min_reconnect_backoff_ms": 200,
            "grpc.initial_reconnect_backoff_ms": 200,
            "grpc.max_reconnect_backoff_ms": 1000,
            "grpc.enable_http_proxy": 0,
            "grpc.max_receive_message_length": 64 * 1024 * 1024,
        }
        self.client: Any = aetcd.Client(host, port, timeout=timeout_s, options=options)
        self._keys = keys
        self._renewals = _Renewals(self.client, timeout_s)
        self._cached: dict[bytes, _Parsed] = {}
        self._snapshot = Snapshot()
        self._cached_at = 0
        self._rollbacks = 0
        """How often etcd was at an earlier revision than before."""
        self._done: Mapping[type[store.Command], Callable[[Any], Awaitable[Any]]] = {
            store.Read: self._read,
            store.Grant: self._grant,
            store.KeepAlive: self._keep_alive,
            store.GetNode: self._get_node,
            store.PutNode: self._put_node,
            store.PutView: self._put_view,
            store.PutDrain: self._put_drain,
            store.DropDrain: self._drop_drain,
            store.PutConsumer: self._put_consumer,
            store.DeleteConsumer: self._delete_consumer,
            store.ListConsumers: self._list_consumers,
        }

    async def run(self, command: store.Command) -> Any:
        return await self._done[type(command)](command)

    async def close(self) -> None:
        self._renewals.end("closed")
        await self.client.close()

    async def _range(self, prefix: str, newer_than: int = 0) -> Any:
        await self.client.connect()
        key = prefix.encode()
        request = rpc.RangeRequest(key=key, range_end=aetcd.utils.prefix_range_end(key), min_mod_revision=newer_than)
        return await self._call(self.client.kvstub.Range, request)

    async def _call(self, method: Any, request: Any) -> Any:
        """What aetcd has no method for, with its error."""
        try:
            return await method(request, timeout=self._timeout_s, metadata=self.client.metadata)
        except rpc.AioRpcError as error:
            raise aetcd.ClientError(error.details()) from None

    async def _read(self, _: store.Read) -> Snapshot:
        """Only what changed since the last read; the number of keys tells whether one has gone."""
        since = self._cached_at
        reply = await self._range(self._keys.cluster, since + 1 if since else 0)
        known = self._cached if since else {}
        changed = {bytes(kv.key): self._parsed(kv) for kv in reply.kvs}
        if since and (len(known.keys() | changed.keys()) != reply.count or reply.header.revision < since):
            reply = await self._range(self._keys.cluster)
            known, changed = {}, {bytes(kv.key): self._parsed(kv) for kv in reply.kvs}
        if reply.header.revision < since:
            self._rollbacks += 1
        epoch = reply.header.cluster_id + self._rollbacks
        if changed or not since or len(known) != reply.count or epoch != self._snapshot.epoch:
            self._cached = {**known, **changed}
            self._snapshot = replace(_snapshot(self._cached.values()), epoch=epoch)
        self._cached_at = reply.header.revision
        return self._snapshot

    def _parsed(self, kv: Any) -> _Parsed:
        """None: not written by a membership service."""
        key = kv.key.decode(errors="replace")
        if key == self._keys.view:
            view = _decode_view(kv.value)
            return (view, kv.mod_revision) if view is not None else None
        if key.startswith(self._keys.nodes):
            held = _held(kv)
            return held if held is not None and key == self._keys.node(held.entry.id) else None
        if key.startswith(self._keys.drains) and kv.value.isdigit():
            return unescape(key.removeprefix(self._keys.drains)), int(kv.value)
        return None

    async def _grant(self, command: store.Grant) -> int:
        return int((await self.client.lease(command.ttl_s)).id)

    async def _keep_alive(self, command: store.KeepAlive) -> int:
        return await self._renewals.renew(command.lease)

    async def _get_node(self, command: store.GetNode) -> Held | None:
        found = await self.client.get(self._keys.node(command.id).encode())
        return None if found is None else _held(found)

    async def _put_node(self, command: store.PutNode) -> bool:
        return bool(await self._swap(self._keys.node(command.entry.id), _encode_node(command.entry), command))

    async def _put_view(self, command: store.PutView) -> int:
        return await self._swap(self._keys.view, command.view.encode(), command)

    async def _swap(self, key: str, value: bytes, command: store.PutNode | store.PutView) -> int:
        """etcd's revision of the write; 0: the key was at another revision than the command's."""
        await self.client.connect()
        name = key.encode()
        lease = command.lease if isinstance(command, store.PutNode) else 0
        unchanged = (self.client.transactions.mod(name) == command.revision).build_message()
        put = rpc.RequestOp(request_put=rpc.PutRequest(key=name, value=value, lease=lease))
        request = rpc.TxnRequest(compare=[unchanged], success=[put])
        reply = await self._call(self.client.kvstub.Txn, request)
        return int(reply.header.revision) if reply.succeeded else 0

    async def _put_drain(self, command: store.PutDrain) -> None:
        key = self._keys.drain(command.id).encode()
        if command.incarnation:
            await self.client.put(key, str(command.incarnation).encode())
        else:
            await self.client.delete(key)

    async def _drop_drain(self, command: store.DropDrain) -> None:
        key = self._keys.drain(command.id).encode()
        value = str(command.incarnation).encode()
        unchanged = (self.client.transactions.value(key) == value).build_message()
        delete = rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))
        await self.client.connect()
        await self._call(self.client.kvstub.Txn, rpc.TxnRequest(compare=[unchanged], success=[delete]))

    async def _put_consumer(self, command: store.PutConsumer) -> None:
        consumer = command.consumer
        value = pack({1: consumer.name, 2: consumer.address, 3: consumer.since_s})
        await self.client.put(self._keys.consumer(command.replica, consumer.name).encode(), value, lease=command.lease)

    async def _delete_consumer(self, command: store.DeleteConsumer) -> None:
        await self.client.delete(self._keys.consumer(command.replica, command.name).encode())

    async def _list_consumers(self, _: store.ListConsumers) -> list[Consumer]:
        found: dict[str, Consumer] = {}
        for kv in (await self._range(self._keys.consumers)).kvs:
            try:
                value = unpack(kv.value)
                consumer = Consumer(value[1], value[2], value[3])
            except (PackingError, KeyError, TypeError):
                continue
            # One that has moved to another replica is there twice for a moment.
            found[consumer.name] = max(consumer, found.get(consumer.name, consumer), key=lambda one: one.since_s)
        return [found[name] for name in sorted(found)]


class _Renewals:
    """Leases of one member, renewed over one stream: a stream for each, as aetcd has it, takes three times the CPU.

    An answer that does not come in time ends the stream, so that a stuck one holds up nobody for longer than one call."""

    def __init__(self, client: Any, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._call: Any = None
        self._asked: asyncio.Queue[int] = asyncio.Queue()
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[int]] = {}

    async def renew(self, lease: int) -> int:
        """Seconds it has now; 0: there is no such lease. Raises aetcd.ClientError."""
        await self._client.connect()
        loop = asyncio.get_running_loop()
        future = self._waiting.get(lease)
        if future is None:
            future = self._waiting[lease] = loop.create_future()
            if self._call is None:
                self._asked = asyncio.Queue()
                requests = self._requests(self._asked)
                self._call = self._client.leasestub.LeaseKeepAlive(requests, metadata=self._client.metadata)
                self._reader = asyncio.ensure_future(self._read(self._call))
            timer = loop.call_later(self._timeout_s, self._late, future)
            future.add_done_callback(lambda _: timer.cancel())
            self._asked.put_nowait(lease)
        return await asyncio.shield(future)

    @staticmethod
    async def _requests(asked: asyncio.Queue[int]) -> AsyncIterator[Any]:
        while True:
            yield rpc.LeaseKeepAliveRequest(ID=await asked.get())

    async def _read(self, call: Any) -> None:
        try:
            async for reply in call:
                future = self._waiting.pop(reply.ID, None)
                if future is not None and not future.done():
                    future.set_result(int(reply.TTL))
            self._ended(call, "etcd ended the stream of renewals")
        except (rpc.AioRpcError, asyncio.CancelledError) as error:
            self._ended(call, _short(error))

    def _late(self, future: asyncio.Future[int]) -> None:
        if not future.done():
            self.end(f"no answer in {self._timeout_s:.1f} s")

    def _ended(self, call: Any, reason: str) -> None:
        if call is self._call:
            self.end(reason)

    def end(self, reason: str) -> None:
        """Fails whoever waits; the next renewal opens another stream."""
        call, self._call = self._call, None
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(aetcd.ClientError(reason))
                future.exception()  # seen, also where its asker has gone
        if call is not None:
            call.cancel()


_Parsed: TypeAlias = "Held | tuple[View, int] | tuple[str, int] | None"


def _snapshot(parsed: Iterable[_Parsed]) -> Snapshot:
    nodes, drained, view, view_revision = {}, {}, None, 0
    for one in parsed:
        if isinstance(one, Held):
            nodes[one.entry.id] = one
        elif one is not None and isinstance(one[0], View):
            view, view_revision = one[0], one[1]
        elif one is not None:
            drained[str(one[0])] = one[1]
    return Snapshot(nodes, drained, view, view_revision)


def _encode_node(entry: NodeEntry) -> bytes:
    return View(bytes(16), 0, (entry,)).encode()


def _held(kv: Any) -> Held | None:
    """None: not written by a membership service."""
    view = _decode_view(kv.value)
    return Held(view.nodes[0], kv.lease, kv.mod_revision) if view is not None and len(view.nodes) == 1 else None


def _decode_view(value: bytes) -> View | None:
    try:
        return View.decode(value)
    except ValueError:
        return None


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:200]
