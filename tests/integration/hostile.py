"""Peers that mean harm to a node, seeded: frames that are wrong in every way, connections that say nothing, requests that
hold memory. Loopback only, bounded, and over with the process.

usage: python -m tests.integration.hostile PORT KIND SEED

Reads seconds, a line each; attacks in that way (a name of ATTACKS) for so long, and prints a line of JSON with what it did.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import msgpack

from tests.reference.frames import (
    END_OF_REQUEST,
    LAST_OF_ITEM,
    OPCODES,
    REQUEST_KEYS,
    WHOLE_REQUEST,
    Frame,
    encode,
    exists_table,
    header,
    item_table,
)
from tests.reference.identity import little, namespace_id, route

DESCRIPTOR = struct.pack("<HI", 1, 6) + b"hostile"[:6]
NAMESPACE = namespace_id(DESCRIPTOR)
TIMEOUT_S = 5.0
# How long an answer is waited for: most hostile frames get none.
ANSWER_S = 0.002
HUGE = (2**31, 2**32 - 1, 2**63, 2**64 - 1)

Case = Callable[[random.Random], bytes]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def packed(value: Any) -> bytes:
    return bytes(msgpack.packb(value, use_bin_type=True))


# ---- what comes after a proper HELLO and PUT_NS: bytes, as one peer sends them


@case
def header_lengths(rng: random.Random) -> bytes:
    lengths = [rng.choice([0, 1, 2**18, 2**18 + 1, 2**20, 2**20 + 1, 2**31, 2**32 - 1]) for _ in range(2)]
    return header(rng.randrange(1, 20), rng.choice([0, 4]), 7, WHOLE_REQUEST, *lengths) + rng.randbytes(100)


@case
def meta_lengths(rng: random.Random) -> bytes:
    """Maps, texts and arrays that claim up to 2^32-1 entries, and numbers up to 2^64-1, under every key."""
    key = rng.choice([*REQUEST_KEYS.values(), rng.randrange(256)])
    huge = rng.choice(HUGE)
    small = min(huge, 2**32 - 1)
    value = rng.choice(
        [
            b"\xcf" + struct.pack(">Q", huge),
            b"\xd3" + struct.pack(">Q", huge),
            b"\xc6" + struct.pack(">I", small) + rng.randbytes(8),
            b"\xdb" + struct.pack(">I", small) + rng.randbytes(8),
            b"\xdd" + struct.pack(">I", small) + rng.randbytes(8),
            b"\xdf" + struct.pack(">I", small) + rng.randbytes(8),
            b"\xc9" + struct.pack(">I", small) + rng.randbytes(8),
            b"\x91" * 200,
        ]
    )
    entry = packed(key) + value
    count = rng.choice([b"\x81", b"\x8f", b"\xde\xff\xff", b"\xdf\xff\xff\xff\xff"])
    known = packed(1) + b"\xc4\x10" + NAMESPACE if rng.random() < 0.5 and key != 1 else b""
    if known and count == b"\x81":
        count = b"\x82"
    meta = count + known + entry
    opcode = rng.choice(list(OPCODES.values()))
    return header(opcode, END_OF_REQUEST, 7, WHOLE_REQUEST, len(meta), 0) + meta


@case
def table_counts(rng: random.Random) -> bytes:
    opcode = rng.choice(["EXISTS", "GET", "PUT", "REMOVE"])
    counts = little(rng.choice([0, 1, 16385, 32769, 2**31, 2**32 - 1]), 4) + little(rng.choice([0, 1, 2**32 - 1]), 4)
    return encode(_request(opcode, 7, counts + rng.randbytes(rng.choice([0, 24, 40, 4000]))))


@case
def item_lengths(rng: random.Random) -> bytes:
    """A PUT and a GET of objects of every impossible size; then more payload than was announced."""
    items = [_item(rng, rng.choice([0, 1, 2**26, 2**26 + 1, 2**31, 2**32 - 1])) for _ in range(4)]
    table = item_table(items)
    put = Frame(OPCODES["PUT"], 0, 7, meta={"ns": NAMESPACE}, payload=table)
    piece = Frame(OPCODES["PUT"], LAST_OF_ITEM, 7, 0, {"checksum": 1}, rng.randbytes(1000))
    return encode(_request("GET", 5, table)) + encode(put) + encode(piece) + encode(piece)


@case
def truncated(rng: random.Random) -> bytes:
    whole = _conversation(rng)
    return whole[: rng.randrange(len(whole))]


@case
def overlapping(rng: random.Random) -> bytes:
    """A frame begins inside another one, or says that it is shorter than it is."""
    outer = bytearray(_conversation(rng))
    inner = _conversation(rng)
    at = rng.randrange(len(outer))
    return bytes(outer[:at]) + inner + bytes(outer[at:])


@case
def items_out_of_order(rng: random.Random) -> bytes:
    count = 5
    data = [rng.randbytes(100) for _ in range(count)]
    order = [rng.randrange(count + 2) for _ in range(count)]
    if rng.random() < 0.3:
        order[rng.randrange(count)] = 2**32 - 2
    head = Frame(OPCODES["PUT"], 0, 7, meta={"ns": NAMESPACE}, payload=item_table([_item(rng, 100)] * count))
    frames = [encode(head)]
    for place, item in enumerate(order):
        flags = rng.choice([0, LAST_OF_ITEM]) | (END_OF_REQUEST if place == count - 1 else 0)
        frames.append(encode(Frame(OPCODES["PUT"], flags, 7, item, {"checksum": 1}, data[item % count])))
    return b"".join(frames)


@case
def duplicate_ids(rng: random.Random) -> bytes:
    """The same request id again while the first is under way, also across operations; and id 0."""
    put = Frame(OPCODES["PUT"], 0, 7, meta={"ns": NAMESPACE}, payload=item_table([_item(rng, 100)]))
    again = rng.choice(
        [
            encode(put),
            encode(_request("GET", 7, item_table([_item(rng, 0)] * 50))),
            encode(_request("PING", 7)),
            encode(_request("PING", 0)),
            encode(Frame(OPCODES["SUBSCRIBE"], END_OF_REQUEST, 7, meta={"wait_ms": 2**32 - 1, "known_revision": 1})),
            encode(Frame(OPCODES["CANCEL"], END_OF_REQUEST, 8, meta={"target_request": 7})) + encode(put),
        ]
    )
    return encode(put) + again


@case
def unknown_things(rng: random.Random) -> bytes:
    """Opcodes, critical keys, flags and lanes of some other version; HELLO, AUTH and replies in mid-connection."""
    opcode = rng.choice([0, 19, 127, 255, OPCODES["HELLO"], OPCODES["AUTH"], OPCODES["SYNC"], OPCODES["OPEN_REGION"]])
    keys = {rng.randrange(16, 128): rng.randrange(2**64), rng.randrange(140, 2**32): [[[rng.randbytes(3)]]]}
    meta = packed(dict(sorted(keys.items())))
    flags = rng.choice([0, 1, 4, 5, 12, 0x0104, 0x8004, 0x10])
    return (
        header(opcode, flags, rng.choice([0, 7, 2**64 - 1]), rng.choice([0, WHOLE_REQUEST]), len(meta), 3)
        + meta
        + b"abc"
    )


@case
def flipped_bits(rng: random.Random) -> bytes:
    """A sound conversation with some bits turned, and each header's CRC put right again."""
    data = bytearray(_conversation(rng))
    for _ in range(rng.randrange(1, 6)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    out = bytearray()
    at = 0
    while at + 32 <= len(data):
        fixed = header_with_crc(bytes(data[at : at + 28]))
        meta, payload = struct.unpack("<II", fixed[20:28])
        out += fixed + data[at + 32 : at + 32 + min(meta + payload, 1 << 20)]
        at += 32 + meta + payload
    return bytes(out)


@case
def garbage(rng: random.Random) -> bytes:
    return rng.randbytes(rng.randrange(1, 4000))


def header_with_crc(head: bytes) -> bytes:
    from tests.reference.crc import crc32c

    return head + little(crc32c(head), 4)


def _request(opcode: str, request_id: int, payload: bytes = b"") -> Frame:
    return Frame(OPCODES[opcode], END_OF_REQUEST, request_id, meta={"ns": NAMESPACE}, payload=payload)


def _item(rng: random.Random, length: int) -> tuple[bytes, int, int, int]:
    block = rng.randbytes(16)
    return block, rng.randrange(4), route(block), length


def _conversation(rng: random.Random) -> bytes:
    """Some sound requests, one after another."""
    frames = []
    for request_id in range(5, 5 + rng.randrange(1, 5)):
        kind = rng.choice(["EXISTS", "GET", "PUT", "REMOVE", "STAT", "LIST", "PING", "LEASE", "SUBSCRIBE"])
        items = [_item(rng, 200) for _ in range(rng.randrange(1, 6))]
        if kind == "EXISTS":
            frames.append(_request(kind, request_id, exists_table([0, 1], [(item[0], item[2]) for item in items])))
        elif kind == "PUT":
            frames.append(Frame(OPCODES[kind], 0, request_id, meta={"ns": NAMESPACE}, payload=item_table(items)))
            for number in range(len(items)):
                flags = LAST_OF_ITEM | (END_OF_REQUEST if number == len(items) - 1 else 0)
                meta = {"checksum": rng.randrange(2**64)}
                frames.append(Frame(OPCODES[kind], flags, request_id, number, meta, rng.randbytes(200)))
        else:
            table = item_table(items) if kind in ("GET", "REMOVE") else b""
            frames.append(_request(kind, request_id, table))
    return b"".join(encode(frame) for frame in frames)


# ---- attacks


def connect(port: int) -> socket.socket:
    peer = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer


def hello(lane: int = 1) -> bytes:
    meta = {"lane": lane, "nonce": bytes(16)}
    return encode(Frame(OPCODES["HELLO"], END_OF_REQUEST, 0, meta=meta))


def introduction(lane: int = 1) -> bytes:
    """HELLO, and the namespace that the cases name."""
    meta = {"ns": NAMESPACE, "descriptor": DESCRIPTOR}
    return hello(lane) + encode(Frame(OPCODES["PUT_NS"], END_OF_REQUEST, 1, meta=meta))


def attack_once(port: int, data: bytes, rng: random.Random) -> None:
    """One connection that sends `data`, in pieces as it comes, and reads a little."""
    with contextlib.suppress(OSError), connect(port) as peer:
        peer.settimeout(ANSWER_S)
        data = introduction(rng.randrange(2)) + data
        cut = rng.randrange(len(data)) if rng.random() < 0.3 else len(data)
        peer.sendall(data[:cut])
        peer.sendall(data[cut:])
        for _ in range(rng.randrange(3)):
            if not peer.recv(65536):
                return
        if rng.random() < 0.3:  # as a process that was killed
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def mutate(port: int, rng: random.Random) -> Iterator[str]:
    while True:
        name = rng.choice(list(CASES))
        attack_once(port, CASES[name](rng), rng)
        yield name


def half_open(port: int, rng: random.Random, count: int = 10_000) -> Iterator[str]:
    """Up to `count` connections at once that never introduce themselves; the oldest make way for new ones."""
    peers: list[socket.socket] = []
    try:
        while True:
            with contextlib.suppress(OSError):
                peers.append(connect(port))
                if rng.random() < 0.5:
                    peers[-1].send(hello()[: rng.randrange(1, 32)])
            if len(peers) >= count:
                peers.pop(rng.randrange(len(peers))).close()
            yield "half_open"
    finally:
        for peer in peers:
            peer.close()


def slow(port: int, rng: random.Random, count: int = 200) -> Iterator[str]:
    """Connections that send the bytes of a HELLO and of what follows it one at a time."""
    peers: list[tuple[socket.socket, Iterator[int]]] = []
    data = introduction()
    try:
        while True:
            if len(peers) < count:
                peers.append((connect(port), iter(range(len(data)))))
            index = rng.randrange(len(peers))
            peer, places = peers[index]
            try:
                peer.send(data[(at := next(places)) : at + 1])
            except (OSError, StopIteration):
                peer.close()
                del peers[index]
            yield "slow"
    finally:
        for peer, _ in peers:
            peer.close()


@cache
def largest_requests() -> list[bytes]:
    rng = random.Random(1)
    chunks = [(block := rng.randbytes(16), route(block)) for _ in range(32768)]
    lookup = _request("EXISTS", 5, exists_table(list(range(32)), chunks))
    read = _request("GET", 5, item_table([_item(rng, 0) for _ in range(16384)]))
    return [encode(lookup), encode(read)]


def large(port: int, rng: random.Random) -> Iterator[str]:
    """Requests that are as large as they may be, one at a time, each answered before the next."""
    requests = largest_requests()
    with connect(port) as peer:
        peer.sendall(introduction())
        _answer(peer)
        _answer(peer)
        while True:
            peer.sendall(rng.choice(requests))
            _answer(peer)
            yield "large"


def _answer(peer: socket.socket) -> None:
    head = _exactly(peer, 32)
    _exactly(peer, sum(struct.unpack("<II", head[20:28])))


def _exactly(peer: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = peer.recv(count - len(data))
        if not piece:
            raise OSError("closed")
        data += piece
    return bytes(data)


ATTACKS: dict[str, Callable[[int, random.Random], Iterator[str]]] = {
    "mutate": mutate,
    "half_open": half_open,
    "slow": slow,
    "large": large,
}


def main(port: int, kind: str, seed: int) -> None:
    rng = random.Random(seed)
    for line in sys.stdin:
        end = time.monotonic() + float(line)
        done: Counter[str] = Counter()
        attack = ATTACKS[kind](port, rng)
        for name in attack:
            done[name] += 1
            if time.monotonic() > end:
                break
        del attack  # closes its connections
        print(json.dumps(done), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
