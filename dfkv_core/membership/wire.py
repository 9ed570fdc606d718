"""The frames of docs/formats.md over asyncio streams, as far as a membership service and its users need them."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any

from dfkv_core import _native
from dfkv_core.keys import Status
from dfkv_core.membership.packing import PackingError, pack, unpack

MAX_META_BYTES = 256 * 1024
MAX_PAYLOAD_BYTES = 1024 * 1024
HEADER_BYTES = 32
WHOLE_REQUEST = 0xFFFFFFFF
AUTH_NONE, AUTH_HMAC = 1, 2
NONCE_BYTES = 16


class Opcode(IntEnum):
    HELLO = 1
    AUTH = 2
    PING = 3
    SUBSCRIBE = 18
    ANNOUNCE = 19
    CONSUMERS = 20
    DRAIN = 21


class Flag(IntFlag):
    REPLY = 1
    LAST_OF_ITEM = 2
    END_OF_REQUEST = 4
    ERROR = 8


class Hello(IntEnum):
    """Keys of HELLO's meta."""

    LANE = 3
    MAX_META_BYTES = 4
    MAX_FRAGMENT_BYTES = 5
    AUTH_METHODS = 6
    NONCE = 7
    NODE_ID = 8
    INCARNATION = 9
    BOOT_ID = 10
    SOFTWARE = 128
    CLIENT_NAME = 129
    GROUP = 130


class Ask(IntEnum):
    """Keys of a request's meta."""

    LEASE_ID = 6
    KNOWN_REVISION = 10
    WAIT_MS = 11
    MAC = 13


class Tell(IntEnum):
    """Keys of a reply's meta."""

    STATUS = 1
    LEASE_ID = 4
    MAC = 7
    REASON = 131
    LEASE_MS = 133


class WireError(Exception):
    """What the other side sent ends the connection, or it has ended."""


class RefusedError(Exception):
    """A reply that is no success. status: docs/formats.md."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason or _native.status_name(status))
        self.status = status
        self.reason = reason or _native.status_name(status)

    @property
    def final(self) -> bool:
        """Asking again does not help."""
        return self.status >= Status.REFUSED_UNSUPPORTED


@dataclass(frozen=True)
class Frame:
    """meta: values by key."""

    opcode: int
    flags: int
    request_id: int
    meta: dict[int, Any]
    payload: bytes = b""


def is_nonce(value: Any) -> bool:
    return isinstance(value, bytes) and len(value) == NONCE_BYTES


def encode(frame: Frame) -> bytes:
    """The bytes of a frame that concerns a whole request."""
    meta = pack({int(key): value for key, value in sorted(frame.meta.items())}) if frame.meta else b""
    head = _native.encode_frame_header(
        frame.opcode, frame.flags, frame.request_id, WHOLE_REQUEST, len(meta), len(frame.payload)
    )
    return head + meta + frame.payload


async def receive(reader: asyncio.StreamReader) -> Frame:
    """The next frame. Raises WireError for the end of the stream and for what is no frame."""
    try:
        header = await reader.readexactly(HEADER_BYTES)
        try:
            fields = _native.decode_frame_header(header, MAX_META_BYTES, MAX_PAYLOAD_BYTES)
        except ValueError as error:
            raise WireError(f"it does not speak dfkv's protocol ({error})") from None
        raw = await reader.readexactly(fields["meta_bytes"])
        payload = await reader.readexactly(fields["payload_bytes"])
    except asyncio.IncompleteReadError:
        raise WireError("it closed the connection") from None
    except OSError as error:
        raise WireError(error.strerror or str(error)) from None
    try:
        meta = unpack(raw) if raw else {}
    except PackingError as error:
        raise WireError(f"its meta is malformed: {error}") from None
    if not isinstance(meta, dict):
        raise WireError("its meta is no map")
    return Frame(fields["opcode"], fields["flags"], fields["request_id"], meta, payload)


class Connection:
    """One connection to a membership service or a node. Used on one event loop; requests may be in flight together."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._next_id = 1
        self._waiting: dict[int, asyncio.Future[Frame]] = {}
        self._receiver: asyncio.Task[None] | None = None
        self._ended: WireError | None = None

    @classmethod
    async def open(
        cls, host: str, port: int, *, secret: bytes | None, group: str, timeout_s: float, client_name: str = ""
    ) -> Connection:
        """Connects and proves the secret, both ways. Raises WireError or RefusedError."""
        try:
            return await asyncio.wait_for(cls._open(host, port, secret, group, client_name), timeout_s)
        except asyncio.TimeoutError:
            raise WireError(f"no answer in {timeout_s:.1f} s") from None
        except OSError as error:
            reason = "nothing listens there" if isinstance(error, ConnectionRefusedError) else error.strerror
            raise WireError(reason or str(error)) from None

    @classmethod
    async def _open(cls, host: str, port: int, secret: bytes | None, group: str, client_name: str) -> Connection:
        reader, writer = await asyncio.open_connection(host, port)
        connection = cls(reader, writer)
        try:
            await connection._handshake(secret, group, client_name)
        except BaseException:
            writer.close()
            raise
        connection._receiver = asyncio.ensure_future(connection._receive())
        return connection

    async def _handshake(self, secret: bytes | None, group: str, client_name: str) -> None:
        nonce = os.urandom(NONCE_BYTES)
        meta: dict[int, Any] = {Hello.LANE: 0, Hello.NONCE: nonce, Hello.SOFTWARE: "dfkv", Hello.GROUP: group}
        if client_name:
            meta[Hello.CLIENT_NAME] = client_name
        answer = await self._exchange(Opcode.HELLO, meta)
        methods, theirs = (
            answer.meta.get(Hello.AUTH_METHODS, AUTH_NONE),
            answer.meta.get(Hello.NONCE, bytes(NONCE_BYTES)),
        )
        name = answer.meta.get(Hello.NODE_ID, "")
        if not isinstance(methods, int) or not is_nonce(theirs) or not isinstance(name, str):
            raise WireError("its HELLO is malformed")
        if secret is None:
            if not methods & AUTH_NONE:
                raise RefusedError(Status.REFUSED_UNAUTHENTICATED, "it wants a secret: name its secret_file")
            return
        # Whoever configured a secret wants to know whom they talk to: no silent step down.
        if not methods & AUTH_HMAC:
            reason = (
                "it does not prove that it knows the secret: start it with this secret_file, or this side without one"
            )
            raise RefusedError(Status.REFUSED_UNAUTHENTICATED, reason)
        proof = _native.auth_mac(secret, "c", nonce, theirs, name)
        answer = await self._exchange(Opcode.AUTH, {Ask.MAC: proof})
        given = answer.meta.get(Tell.MAC)
        expected = _native.auth_mac(secret, "s", nonce, theirs, name)
        if not isinstance(given, bytes) or not hmac.compare_digest(given, expected):
            raise RefusedError(Status.REFUSED_UNAUTHENTICATED, "it does not know the secret")

    async def _exchange(self, opcode: Opcode, meta: dict[int, Any]) -> Frame:
        self._writer.write(encode(Frame(opcode, Flag.END_OF_REQUEST, 0, meta)))
        answer = await receive(self._reader)
        if answer.flags & Flag.ERROR:
            raise RefusedError(
                answer.meta.get(Tell.STATUS, Status.REFUSED_BAD_REQUEST), answer.meta.get(Tell.REASON, "")
            )
        return answer

    async def ask(self, opcode: Opcode, meta: dict[int, Any], payload: bytes = b"", *, timeout_s: float) -> Frame:
        """The reply to one request. Raises RefusedError for what is no success, WireError when none comes in time."""
        if self._ended is not None:
            raise self._ended
        request_id = self._next_id
        self._next_id += 1
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        try:
            self._writer.write(encode(Frame(opcode, Flag.END_OF_REQUEST, request_id, meta, payload)))
            frame = await asyncio.wait_for(future, timeout_s)
        except asyncio.TimeoutError:
            raise WireError(f"no answer in {timeout_s:.1f} s") from None
        finally:
            self._waiting.pop(request_id, None)
        status = frame.meta.get(Tell.STATUS, 0)
        if status != Status.OK:
            raise RefusedError(status, frame.meta.get(Tell.REASON, ""))
        return frame

    async def _receive(self) -> None:
        try:
            while True:
                frame = await receive(self._reader)
                future = self._waiting.get(frame.request_id)
                if future is not None and not future.done():
                    future.set_result(frame)
        except WireError as error:
            self._end(error)

    def _end(self, error: WireError) -> None:
        self._ended = error
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)

    async def close(self) -> None:
        """Idempotent; requests in flight fail."""
        if self._receiver is not None:
            self._receiver.cancel()
        self._end(WireError("the connection was closed"))
        self._writer.close()
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), 1.0)
