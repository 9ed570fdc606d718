"""A proxy between clients and one node that reads every frame, spoils some answers on purpose, and notes what the client
must conclude from each.

Give the node the proxy's address to advertise, so that clients that follow the view come through here too.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from dfkv_core.keys import CHUNK_REF_BYTES, ITEM_REF_BYTES, Status
from tests.reference.frames import (
    END_OF_REQUEST,
    ERROR,
    OPCODES,
    WHOLE_REQUEST,
    Frame,
    decode_header,
    encode,
    pack_meta,
    unpack_meta,
)

HEADER_BYTES = 32
# What is sent instead of an answer that the node gave; the client passes these statuses on as they are.
REFUSALS = (Status.AGAIN_BUSY, Status.AGAIN_NO_MEMORY, Status.REFUSED_OVER_QUOTA)
MISSES = (Status.MISS_NOT_FOUND, Status.MISS_EVICTED, Status.MISS_PART_MISSING)


@dataclass
class Odds:
    """Probabilities of each fault, per lookup, per read and per object of a read."""

    hold_lookup: float = 0.0  # the answer comes after the client has given up
    refuse_lookup: float = 0.0
    shorten_lookup: float = 0.0  # a chunk of the answer becomes a miss
    hold_read: float = 0.0
    refuse_read: float = 0.0
    spoil_object: float = 0.0  # a wrong byte
    cut_object: float = 0.0  # another length
    lose_object: float = 0.0  # a miss
    pause: float = 0.0  # before any frame, either way
    longest_pause_s: float = 0.0  # uniformly from 0


@dataclass
class LookupSeen:
    """A lookup that came through. status: of its first chunk, as the client gets it; None until it is answered."""

    chunk_ids: list[bytes]
    status: Status | None = None
    prefix: int = 0


@dataclass
class _Held:
    """A request whose answer waits until the client cancels it."""

    frames: list[bytes] = field(default_factory=list)


@dataclass
class _Read:
    """A read whose objects meet their faults: by item, what the client must make of it."""

    items: int
    faults: dict[int, Status] = field(default_factory=dict)
    refusal: Status | None = None


class _Connection:
    def __init__(self, client: socket.socket, node: socket.socket) -> None:
        self.client = client
        self.node = node
        self.lock = threading.Lock()  # of what is sent to the client
        self.requests: dict[int, LookupSeen | _Read | _Held] = {}
        self.refused_lookups: dict[int, Status | None] = {}  # None: a chunk becomes a miss instead

    def close(self) -> None:
        for end in (self.client, self.node):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class FaultProxy:
    """Listens on a free loopback port from the start; set node_port before the first connection.

    What it notes may be read once nothing is in flight.
    """

    def __init__(self, seed: int, odds: Odds | None = None, *, segment_bytes: int = 0) -> None:
        """segment_bytes: of TCP, from the client. The kernel's buffers grow with it: with small ones even small transfers
        stay in the client's memory while they are held."""
        self.odds = odds or Odds()
        self.puts_pass = threading.Event()  # cleared: saves wait, unread
        self.puts_pass.set()
        self._segment_bytes = segment_bytes
        self.node_port = 0
        self.lookups: dict[bytes, list[LookupSeen]] = {}  # by the last chunk asked for
        self.objects: Counter[str] = Counter()  # of reads: status as the client must see it
        self.reads: Counter[bytes] = Counter()  # by table
        self.given_up = 0  # reads that the client cancelled although nothing held them
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._connections: list[_Connection] = []
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None
        self.port = 0
        self.up()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def up(self) -> None:
        """Listens, again on the same port after down()."""
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=64)
        # Little is on its way at a time, so that a pause is felt at the other end.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        if self._segment_bytes:
            self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, self._segment_bytes)
        self.port = self._listener.getsockname()[1]
        self._spawn(self._accept, self._listener)

    def down(self) -> None:
        """As when the node's machine goes: connections end, and nothing listens."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        with self._lock:
            connections, self._connections = self._connections, []
        for connection in connections:
            connection.close()

    def close(self) -> None:
        self.puts_pass.set()
        self.down()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def latest_lookup(self, last_chunk: bytes) -> LookupSeen | None:
        """What came of the newest lookup that asked for chunks up to this one."""
        with self._lock:
            seen = self.lookups.get(last_chunk)
            return seen[-1] if seen else None

    # ---- threads

    def _spawn(self, target: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                node = socket.create_connection(("127.0.0.1", self.node_port), timeout=10)
            except OSError:
                client.close()
                continue
            node.settimeout(None)
            for end in (client, node):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = _Connection(client, node)
            with self._lock:
                self._connections.append(connection)
            self._spawn(self._pump, connection, True)
            self._spawn(self._pump, connection, False)

    def _pump(self, connection: _Connection, upwards: bool) -> None:
        source = connection.client if upwards else connection.node
        try:
            while True:
                head = _read(source, HEADER_BYTES)
                fields = decode_header(head)
                if upwards and fields["opcode"] == OPCODES["PUT"]:
                    self.puts_pass.wait()
                body = _read(source, fields["meta_bytes"] + fields["payload_bytes"])
                frame = Frame(fields["opcode"], fields["flags"], fields["request_id"], fields["item"])
                frame.raw_meta, frame.payload = body[: fields["meta_bytes"]], body[fields["meta_bytes"] :]
                self._pause()
                if upwards:
                    self._request(connection, frame)
                    connection.node.sendall(head + body)
                else:
                    self._reply(connection, frame, head + body)
        except (OSError, EOFError):
            connection.close()

    def _pause(self) -> None:
        odds = self.odds
        if odds.pause and self._random.random() < odds.pause:
            time.sleep(self._random.random() * odds.longest_pause_s)

    # ---- from the client

    def _request(self, connection: _Connection, frame: Frame) -> None:
        if frame.opcode == OPCODES["CANCEL"]:
            target = unpack_meta("request", frame.raw_meta)["target_request"]
            held = connection.requests.get(target)
            if isinstance(held, _Held):
                del connection.requests[target]
                with connection.lock:
                    for late in held.frames:
                        connection.client.sendall(late)
            elif isinstance(held, _Read):
                self.given_up += 1
        elif frame.opcode == OPCODES["EXISTS"]:
            self._lookup(connection, frame)
        elif frame.opcode == OPCODES["GET"]:
            self._read_begins(connection, frame)

    def _lookup(self, connection: _Connection, frame: Frame) -> None:
        parts = int.from_bytes(frame.payload[4:8], "little")
        table = frame.payload[8 + 8 * parts :]
        ids = [table[at : at + 16] for at in range(0, len(table), CHUNK_REF_BYTES)]
        seen = LookupSeen(ids)
        with self._lock:
            self.lookups.setdefault(ids[-1], []).append(seen)
            draw = self._random.random()
            refusal = self._random.choice(REFUSALS)
        odds = self.odds
        connection.requests[frame.request_id] = seen
        if draw < odds.hold_lookup:
            seen.status = Status.MISS_DEADLINE
            connection.requests[frame.request_id] = _Held()
        elif draw < odds.hold_lookup + odds.refuse_lookup:
            connection.refused_lookups[frame.request_id] = refusal
        elif draw < odds.hold_lookup + odds.refuse_lookup + odds.shorten_lookup:
            connection.refused_lookups[frame.request_id] = None

    def _read_begins(self, connection: _Connection, frame: Frame) -> None:
        items = int.from_bytes(frame.payload[:4], "little")
        assert len(frame.payload) == 8 + items * ITEM_REF_BYTES
        read = _Read(items)
        odds = self.odds
        with self._lock:
            self.reads[frame.payload] += 1
            draw = self._random.random()
            if draw < odds.hold_read:
                self.objects[Status.MISS_DEADLINE.label] += items
                connection.requests[frame.request_id] = _Held()
                return
            if draw < odds.hold_read + odds.refuse_read:
                read.refusal = self._random.choice(REFUSALS)
            for item in range(items):
                draw = self._random.random()
                if draw < odds.spoil_object:
                    read.faults[item] = Status.MISS_CORRUPT
                elif draw < odds.spoil_object + odds.cut_object:
                    read.faults[item] = Status.MISS_LENGTH
                elif draw < odds.spoil_object + odds.cut_object + odds.lose_object:
                    read.faults[item] = self._random.choice(MISSES)
        connection.requests[frame.request_id] = read

    # ---- from the node

    def _reply(self, connection: _Connection, frame: Frame, raw: bytes) -> None:
        request = connection.requests.get(frame.request_id)
        if isinstance(request, _Held):
            request.frames.append(raw)
            return
        if isinstance(request, LookupSeen):
            raw = self._answer_lookup(connection, request, frame, raw)
        elif isinstance(request, _Read):
            raw = self._answer_read(connection, request, frame, raw)
        with connection.lock:
            connection.client.sendall(raw)

    def _answer_lookup(self, connection: _Connection, seen: LookupSeen, frame: Frame, raw: bytes) -> bytes:
        del connection.requests[frame.request_id]
        statuses = [
            Status(int.from_bytes(frame.payload[at : at + 2], "little")) for at in range(0, len(frame.payload), 2)
        ]
        if frame.request_id in connection.refused_lookups:
            refusal = connection.refused_lookups.pop(frame.request_id)
            if refusal is not None:
                seen.status = refusal
                return _refuse(frame, refusal)
            with self._lock:
                at, miss = self._random.randrange(len(statuses)), self._random.choice(MISSES)
            statuses[at] = miss
            meta = unpack_meta("reply", frame.raw_meta)
            meta["prefix"] = min(meta.get("prefix", 0), at)
            raw = _rewritten(frame, meta, b"".join(int(status).to_bytes(2, "little") for status in statuses))
        seen.prefix = next((at for at, status in enumerate(statuses) if status is not Status.OK), len(statuses))
        seen.status = statuses[0]
        return raw

    def _answer_read(self, connection: _Connection, read: _Read, frame: Frame, raw: bytes) -> bytes:
        if frame.item != WHOLE_REQUEST:
            fault = read.faults.get(frame.item)
            if read.refusal is not None or fault in MISSES:
                return b""
            if fault is Status.MISS_CORRUPT:
                at = HEADER_BYTES + len(frame.raw_meta) + self._random.randrange(len(frame.payload))
                return raw[:at] + bytes([raw[at] ^ 0x40]) + raw[at + 1 :]
            if fault is Status.MISS_LENGTH:
                meta = unpack_meta("reply", frame.raw_meta)
                meta["length"] -= 1
                return _rewritten(frame, meta, frame.payload[:-1])
            return raw
        del connection.requests[frame.request_id]
        if read.refusal is not None:
            with self._lock:
                self.objects[read.refusal.label] += read.items
            return _refuse(frame, read.refusal)
        statuses = bytearray(frame.payload)
        with self._lock:
            for item in range(read.items):
                there = Status(int.from_bytes(statuses[2 * item : 2 * item + 2], "little"))
                fault = read.faults.get(item)
                if there is Status.OK and fault is not None:
                    there = fault
                    if fault in MISSES:
                        statuses[2 * item : 2 * item + 2] = int(fault).to_bytes(2, "little")
                self.objects[there.label] += 1
        return raw[: HEADER_BYTES + len(frame.raw_meta)] + bytes(statuses)


def _read(source: socket.socket, count: int) -> bytes:
    pieces = bytearray()
    while len(pieces) < count:
        piece = source.recv(min(1 << 20, count - len(pieces)))
        if not piece:
            raise EOFError
        pieces += piece
    return bytes(pieces)


def _refuse(frame: Frame, status: Status) -> bytes:
    return encode(
        Frame(frame.opcode, frame.flags | END_OF_REQUEST | ERROR, frame.request_id, meta={"status": int(status)})
    )


def _rewritten(frame: Frame, meta: dict[str, Any], payload: bytes) -> bytes:
    assert len(pack_meta("reply", meta)) <= 262144
    return encode(Frame(frame.opcode, frame.flags, frame.request_id, frame.item, meta, payload))
