"""One connection to the membership service: introduced, authenticated, then served one request after the other."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from dfkv_core import _native
from dfkv_core.config import is_loopback
from dfkv_core.config_values import join_address, split_address
from dfkv_core.keys import Status
from dfkv_core.mds.registry import Accepted, Busy
from dfkv_core.mds.store import StoreError
from dfkv_core.membership.packing import PackingError, pack, unpack
from dfkv_core.membership.view import NodeEntry, View
from dfkv_core.membership.wire import (
    AUTH_HMAC,
    AUTH_NONE,
    MAX_META_BYTES,
    MAX_PAYLOAD_BYTES,
    NONCE_BYTES,
    Ask,
    Flag,
    Frame,
    Hello,
    Opcode,
    Tell,
    WireError,
    encode,
    is_nonce,
    receive,
)

if TYPE_CHECKING:
    from dfkv_core.mds.service import MembershipService

_log = logging.getLogger("dfkv.mds")

HANDSHAKE_S = 5.0
MAX_WAIT_S = 60.0
MAX_IN_FLIGHT = 8
MAX_NAME_BYTES = 128
MAX_ENTRY_BYTES = 512


class Session:
    """Owned by the server's connection task. A request that waits does not hold up the others of its connection."""

    def __init__(self, service: MembershipService, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._service = service
        self._reader = reader
        self._writer = writer
        self._tasks: set[asyncio.Task[None]] = set()
        self._name = ""
        self._subscribed = False
        self._announced: tuple[bytes, NodeEntry] | None = None
        """What was accepted last: a node says the same at every heartbeat."""
        self._operations: dict[int, Callable[[Frame], Awaitable[tuple[dict[int, Any], bytes]]]] = {
            Opcode.PING: self._ping,
            Opcode.SUBSCRIBE: self._subscribe,
            Opcode.ANNOUNCE: self._announce,
            Opcode.CONSUMERS: self._consumers,
            Opcode.DRAIN: self._drain,
        }

    async def run(self, introduced: Callable[[], Any]) -> None:
        """Until the peer goes, or does what ends a connection. introduced: called once it has said who it is."""
        try:
            if not await asyncio.wait_for(self._introduce(), HANDSHAKE_S):
                return
            introduced()
            while True:
                frame = await receive(self._reader)
                if len(self._tasks) >= MAX_IN_FLIGHT:
                    self._refuse(frame, Status.AGAIN_BUSY, "too many requests in flight on this connection")
                    continue
                task = asyncio.ensure_future(self._serve(frame))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except (WireError, OSError, asyncio.TimeoutError):
            return
        finally:
            for task in self._tasks:
                task.cancel()
            if self._subscribed:
                self._service.consumer_left(self._name)
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()

    # ---- introduction

    async def _introduce(self) -> bool:
        hello = await receive(self._reader)
        if hello.opcode != Opcode.HELLO:
            return self._refuse(hello, Status.REFUSED_UNAUTHENTICATED, "HELLO comes first")
        group = hello.meta.get(Hello.GROUP, "")
        if group and group != self._service.group:
            reason = f"this membership service keeps group {self._service.group!r}, and group {group!r} was asked for"
            return self._refuse(hello, Status.REFUSED_BAD_REQUEST, reason)
        theirs = hello.meta.get(Hello.NONCE, bytes(NONCE_BYTES))
        if not is_nonce(theirs):
            return self._refuse(hello, Status.REFUSED_BAD_REQUEST, f"the nonce of HELLO has {NONCE_BYTES} bytes")
        name = hello.meta.get(Hello.CLIENT_NAME, "")
        self._name = name.encode()[:MAX_NAME_BYTES].decode(errors="ignore") if isinstance(name, str) else ""
        secret, nonce = self._service.secret, os.urandom(NONCE_BYTES)
        meta: dict[int, Any] = {
            Hello.LANE: hello.meta.get(Hello.LANE, 0),
            Hello.MAX_META_BYTES: MAX_META_BYTES,
            Hello.MAX_FRAGMENT_BYTES: MAX_PAYLOAD_BYTES,
            Hello.AUTH_METHODS: AUTH_HMAC if secret else AUTH_NONE,
            Hello.NONCE: nonce,
            Hello.NODE_ID: self._service.replica_id,
            Hello.SOFTWARE: "dfkv mds",
        }
        self._send(Frame(Opcode.HELLO, Flag.REPLY | Flag.END_OF_REQUEST, hello.request_id, meta))
        if secret is None:
            return True
        proof = await receive(self._reader)
        expected = _native.auth_mac(secret, "c", theirs, nonce, self._service.replica_id)
        given = proof.meta.get(Ask.MAC, b"")
        if proof.opcode != Opcode.AUTH or not isinstance(given, bytes) or not hmac.compare_digest(given, expected):
            return self._refuse(proof, Status.REFUSED_UNAUTHENTICATED, "the secret is not this service's")
        mac = _native.auth_mac(secret, "s", theirs, nonce, self._service.replica_id)
        meta = {Tell.STATUS: Status.OK, Tell.MAC: mac}
        self._send(Frame(Opcode.AUTH, Flag.REPLY | Flag.END_OF_REQUEST, proof.request_id, meta))
        return True

    # ---- requests

    async def _serve(self, frame: Frame) -> None:
        try:
            operation = self._operations.get(frame.opcode)
            if operation is None:
                raise _RefusalError(Status.REFUSED_UNSUPPORTED, "this is a membership service: it stores nothing")
            meta, payload = await operation(frame)
        except _RefusalError as refusal:
            self._refuse(frame, refusal.status, refusal.reason)
        except StoreError as error:
            self._refuse(frame, Status.AGAIN_BUSY, f"etcd: {error}")
        except Exception:
            # A fault of this service is not one of its caller's: it asks another.
            _log.exception("request %d of %s", frame.opcode, self._peer())
            self._refuse(frame, Status.AGAIN_BUSY, "the membership service failed; its log says how")
        else:
            meta = {Tell.STATUS: int(Status.OK), **meta}
            self._send(Frame(frame.opcode, Flag.REPLY | Flag.END_OF_REQUEST, frame.request_id, meta, payload))

    async def _ping(self, _: Frame) -> tuple[dict[int, Any], bytes]:
        return {}, b""

    async def _subscribe(self, frame: Frame) -> tuple[dict[int, Any], bytes]:
        if self._name and not self._subscribed:
            self._subscribed = True
            self._service.consumer_came(self._name, self._peer())
        wait_s = min(_number(frame, Ask.WAIT_MS) / 1000, MAX_WAIT_S)
        found = await self._service.view_after(_number(frame, Ask.KNOWN_REVISION), wait_s)
        if found is None:
            raise _RefusalError(Status.AGAIN_BUSY, self._service.why_no_view())
        return {}, found

    async def _announce(self, frame: Frame) -> tuple[dict[int, Any], bytes]:
        entry = self._entry(frame.payload)
        answer = await self._service.heartbeat(entry, _number(frame, Ask.LEASE_ID))
        if isinstance(answer, Accepted):
            return {Tell.LEASE_ID: answer.lease, Tell.LEASE_MS: self._service.ttl_s * 1000}, b""
        status = Status.AGAIN_BUSY if isinstance(answer, Busy) else Status.REFUSED_BAD_REQUEST
        raise _RefusalError(status, answer.reason)

    def _entry(self, payload: bytes) -> NodeEntry:
        if self._announced is not None and self._announced[0] == payload:
            return self._announced[1]
        if len(payload) > MAX_ENTRY_BYTES:
            reason = f"the node's entry has {len(payload)} bytes, at most {MAX_ENTRY_BYTES} are taken: fewer addresses"
            raise _RefusalError(Status.REFUSED_TOO_LARGE, reason)
        try:
            nodes = View.decode(payload).nodes
        except ValueError as error:
            raise _RefusalError(Status.REFUSED_BAD_REQUEST, f"ANNOUNCE carries a view of one node: {error}") from None
        if len(nodes) != 1:
            raise _RefusalError(Status.REFUSED_BAD_REQUEST, f"ANNOUNCE carries a view of one node, found {len(nodes)}")
        local = self._writer.get_extra_info("sockname")[0]
        why = why_unreachable(nodes[0], self._service.listens_beyond_loopback or not is_loopback(local))
        if why is not None:
            raise _RefusalError(Status.REFUSED_BAD_REQUEST, why)
        self._announced = payload, nodes[0]
        return nodes[0]

    async def _consumers(self, _: Frame) -> tuple[dict[int, Any], bytes]:
        consumers = await self._service.consumers()
        return {}, pack([{1: one.name, 2: one.address, 3: one.since_s} for one in consumers])

    async def _drain(self, frame: Frame) -> tuple[dict[int, Any], bytes]:
        try:
            wish = unpack(frame.payload)
            node_id, undo = wish[1], bool(wish.get(2, False))
        except (PackingError, AttributeError, KeyError, TypeError):
            raise _RefusalError(Status.REFUSED_BAD_REQUEST, "DRAIN carries {1: node id, 2: undo}") from None
        if not await self._service.drain(str(node_id), undo):
            known = ", ".join(self._service.node_ids()) or "none"
            raise _RefusalError(
                Status.MISS_NOT_FOUND, f"no node {node_id!r} in group {self._service.group!r}; there are: {known}"
            )
        return {}, b""

    # ---- answers

    def _peer(self) -> str:
        name = self._writer.get_extra_info("peername")
        return join_address(name[0], name[1]) if name else ""

    def _refuse(self, frame: Frame, status: Status, reason: str) -> bool:
        meta: dict[int, Any] = {Tell.STATUS: int(status), Tell.REASON: reason[:1000]}
        flags = Flag.REPLY | Flag.END_OF_REQUEST | Flag.ERROR
        self._send(Frame(frame.opcode, flags, frame.request_id, meta))
        return False

    def _send(self, frame: Frame) -> None:
        # A peer that does not read is cut off rather than remembered.
        if self._writer.transport.get_write_buffer_size() > 8 * 1024 * 1024:
            self._writer.transport.abort()
            return
        self._writer.write(encode(frame))


class _RefusalError(Exception):
    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


def why_unreachable(entry: NodeEntry, others_are_remote: bool) -> str | None:
    """Why clients on other machines could not use this node, or None."""
    if not entry.tcp:
        return f"node {entry.id!r} announces no address"
    if not others_are_remote:
        return None
    for address in entry.tcp:
        try:
            host, _ = split_address(address)
        except ValueError:
            return f"node {entry.id!r} announces {address!r}, which is no address"
        if is_loopback(host):
            return (
                f"node {entry.id!r} announces {address}, which other machines cannot reach; "
                "listen on another --host or give --advertise HOST:PORT"
            )
    return None


def _number(frame: Frame, key: Ask) -> int:
    value = frame.meta.get(key, 0)
    if not isinstance(value, int):
        raise _RefusalError(Status.REFUSED_BAD_REQUEST, f"key {int(key)} of the meta is no number")
    return value
