"""Golden meta and golden frames: every opcode, fragments, errors, authentication.

A stream is one direction of one connection, whole. frames.txt lists what every frame of every stream holds.
"""

from __future__ import annotations

from typing import Any

import msgpack
import xxhash

from tests.golden.vectors import hexed, namespace_values, pattern, table, view_cases
from tests.reference import frames, identity, views
from tests.reference.crc import crc32c
from tests.reference.frames import END_OF_REQUEST, ERROR, LAST_OF_ITEM, OPCODES, REPLY, Frame

NS = identity.namespace_id(identity.descriptor_of(namespace_values()["minimal"]))
BLOCKS = [identity.chain_next(identity.chain_start(), [i])[:16] for i in range(4)]
PART_A = identity.part(0, 0, 0, 0, 0, 2)
PART_B = identity.part(0, 0, 0, 0, 1, 2)
NONCE_C, NONCE_S = bytes(range(1, 17)), bytes(range(101, 117))
SECRET = b"golden secret"
NODE_ID = "node-1"
HELLO = {"features_offered": 5, "lane": 1, "max_meta_bytes": 262144, "max_fragment_bytes": 1048576, "nonce": NONCE_C}
HELLO_REPLY = {
    **HELLO,
    "features_required": 1,
    "auth_methods": 1,
    "nonce": NONCE_S,
    "node_id": NODE_ID,
    "incarnation": 3,
    "boot_id": bytes(range(32, 48)),
}


def _request(name: str, request_id: int, meta: dict[str, Any] | None, payload: bytes = b"") -> Frame:
    return Frame(OPCODES[name], END_OF_REQUEST, request_id, frames.WHOLE_REQUEST, meta, payload)


def _final(name: str, request_id: int, meta: dict[str, Any], payload: bytes = b"", error: bool = False) -> Frame:
    flags = REPLY | END_OF_REQUEST | (ERROR if error else 0)
    return Frame(OPCODES[name], flags, request_id, frames.WHOLE_REQUEST, meta, payload)


def _fragment(name: str, flags: int, request_id: int, item: int, meta: dict[str, Any] | None, payload: bytes) -> Frame:
    return Frame(OPCODES[name], flags, request_id, item, meta, payload)


def _items(*entries: tuple[int, int, int]) -> bytes:
    return frames.item_table([(BLOCKS[b], part, identity.route(BLOCKS[b]), length) for b, part, length in entries])


def _handshakes() -> dict[str, list[Frame]]:
    client_hello = Frame(1, END_OF_REQUEST, 0, meta={**HELLO, "software": "dfkv", "client_name": "golden"})
    control = {"lane": 0, "max_meta_bytes": 4096, "max_fragment_bytes": 65536, "nonce": NONCE_C}
    proofs = [identity.auth_mac(SECRET, role, NONCE_C, NONCE_S, NODE_ID) for role in "cs"]
    return {
        "hello_open_client": [client_hello],
        "hello_open_server": [_final("HELLO", 0, HELLO_REPLY)],
        "hello_control_client": [Frame(1, END_OF_REQUEST, 0, meta=control)],
        "hello_auth_client": [client_hello, _request("AUTH", 0, {"mac": proofs[0]})],
        "hello_auth_server": [
            _final("HELLO", 0, {**HELLO_REPLY, "auth_methods": 2}),
            _final("AUTH", 0, {"status": 0, "mac": proofs[1]}),
        ],
        "hello_auth_refused_server": [
            _final("HELLO", 0, {**HELLO_REPLY, "auth_methods": 2}),
            _final("AUTH", 0, {"status": 304, "reason": "the proof is wrong"}, error=True),
        ],
    }


def _objects() -> dict[str, list[Frame]]:
    chunks = [(block, identity.route(block)) for block in BLOCKS[:3]]
    first, second = pattern(300), pattern(5000)
    sums = [xxhash.xxh3_64_intdigest(data) for data in (first, second)]
    head = {"ns": NS, "deadline_us": 250000, "trace_id": 77}
    return {
        "exists_client": [
            _request("EXISTS", 1, {**head, "lease_ms": 5000}, frames.exists_table([PART_A, PART_B], chunks)),
        ],
        "exists_server": [
            _final(
                "EXISTS",
                1,
                {"status": 0, "lease_id": 2**63 + 1, "prefix": 2, "queue_us": 12, "lease_ms": 5000},
                frames.statuses([0, 0, 104]),
            ),
        ],
        "get_client": [_request("GET", 2, head, _items((0, PART_A, 300), (1, PART_A, 0), (2, PART_B, 5000)))],
        "get_server": [
            _fragment("GET", REPLY, 2, 2, {"status": 0, "length": 5000, "checksum": sums[1]}, second[:2048]),
            _fragment("GET", REPLY | LAST_OF_ITEM, 2, 0, {"status": 0, "length": 300, "checksum": sums[0]}, first),
            _fragment("GET", REPLY, 2, 2, None, second[2048:4096]),
            _fragment("GET", REPLY | LAST_OF_ITEM, 2, 2, None, second[4096:]),
            _final("GET", 2, {"status": 0, "disk_us": 40}, frames.statuses([0, 100, 0])),
        ],
        "get_two_requests_server": [
            _fragment("GET", REPLY, 3, 0, {"status": 0, "length": 5000, "checksum": sums[1]}, second[:3000]),
            _fragment("GET", REPLY | LAST_OF_ITEM, 4, 0, {"status": 0, "length": 300, "checksum": sums[0]}, first),
            _final("GET", 4, {"status": 0}, frames.statuses([0])),
            _fragment("GET", REPLY | LAST_OF_ITEM, 3, 0, None, second[3000:]),
            _final("GET", 3, {"status": 0}, frames.statuses([0])),
        ],
        "put_client": [
            Frame(
                OPCODES["PUT"],
                0,
                5,
                meta={**head, "ack": 1, "replace": True, "priority": 1, "recompute_us": 1500},
                payload=_items((0, PART_A, 300), (1, PART_A, 5000), (2, PART_A, 5000)),
            ),
            _fragment("PUT", LAST_OF_ITEM, 5, 0, {"checksum": sums[0]}, first),
            _fragment("PUT", 0, 5, 1, None, second[:4096]),
            _fragment("PUT", LAST_OF_ITEM, 5, 1, {"checksum": sums[1]}, second[4096:]),
            _fragment("PUT", 0, 5, 2, None, second[:100]),
            _fragment("PUT", LAST_OF_ITEM | END_OF_REQUEST, 5, 2, {"aborted": True}, b""),
        ],
        "put_server": [_final("PUT", 5, {"status": 0}, frames.statuses([0, 1, 306]))],
        "remove_client": [_request("REMOVE", 6, head, _items((0, 2**64 - 1, 0), (1, PART_B, 0)))],
        "remove_server": [_final("REMOVE", 6, {"status": 0}, frames.statuses([0, 100]))],
        "erase_client": [_request("ERASE", 7, {"ns": NS})],
        "erase_server": [_final("ERASE", 7, {"status": 0, "length": 12345})],
        "lease_client": [_request("LEASE", 8, {"lease_ms": 3000, "lease_id": 2**63 + 1})],
        "lease_server": [_final("LEASE", 8, {"status": 0, "lease_id": 2**63 + 1, "lease_ms": 2500})],
        "release_client": [_request("RELEASE", 9, {"lease_id": 2**63 + 1})],
        "release_server": [_final("RELEASE", 9, {"status": 0})],
        "cancel_client": [_request("CANCEL", 10, {"target_request": 2})],
        "cancelled_get_server": [_final("GET", 2, {"status": 0}, frames.statuses([0, 109, 109]))],
    }


def _management() -> dict[str, list[Frame]]:
    descriptor = identity.descriptor_of(namespace_values()["minimal"])
    entry = {1: NS, 2: descriptor, 3: "läbel", 4: 12, 5: 2**40, 6: 1700000000, 7: 1700000001}
    view = views.encode(view_cases()["two"])
    listed = bytes(msgpack.packb([entry, {1: bytes(16)}], use_bin_type=True))
    counters = bytes(msgpack.packb({"objects": 3, "used_bytes": 2**40, "pins": 0}))
    return {
        "ping_client": [_request("PING", 11, None)],
        "ping_server": [_final("PING", 11, {"status": 0})],
        "put_ns_client": [_request("PUT_NS", 12, {"ns": NS, "descriptor": descriptor, "label": "tiny llama"})],
        "put_ns_server": [
            _final("PUT_NS", 12, {"status": 0, "reason": "new here", "nearest_differs_in": [5, 300, 65535]}),
        ],
        "list_client": [_request("LIST", 13, {"cursor": 4, "limit": 100})],
        "list_server": [_final("LIST", 13, {"status": 0, "cursor": 104}, listed)],
        "stat_client": [_request("STAT", 14, None)],
        "stat_server": [_final("STAT", 14, {"status": 0}, counters)],
        "subscribe_client": [_request("SUBSCRIBE", 15, {"known_revision": 6, "wait_ms": 10000})],
        "subscribe_server": [_final("SUBSCRIBE", 15, {"status": 0}, view)],
        "subscribe_unchanged_server": [_final("SUBSCRIBE", 15, {"status": 0})],
    }


def _refusals() -> dict[str, list[Frame]]:
    streams: dict[str, list[Frame]] = {}
    for request_id, name in enumerate(("SYNC", "OPEN_REGION", "PREFETCH"), start=20):
        lower = name.lower()
        refusal = {"status": 300, "reason": f"{name} is not supported"}
        streams[f"{lower}_client"] = [_request(name, request_id, {"ns": NS})]
        streams[f"{lower}_server"] = [_final(name, request_id, refusal, error=True)]
    streams["unknown_opcode_client"] = [Frame(77, END_OF_REQUEST, 30, payload=b"?")]
    refusal = {"status": 300, "reason": "opcode 77 is not supported"}
    streams["unknown_opcode_server"] = [Frame(77, REPLY | END_OF_REQUEST | ERROR, 30, meta=refusal)]
    busy = {"status": 200, "retry_after_ms": 50, "reason": "256 requests are in flight"}
    streams["busy_server"] = [_final("GET", 31, busy, error=True)]
    streams["unauthenticated_server"] = [_final("GET", 32, {"status": 304}, error=True)]
    streams["ignorable_flags_server"] = [Frame(3, 0xFF00 | REPLY | END_OF_REQUEST, 33, meta={"status": 0})]
    return streams


def streams() -> dict[str, list[Frame]]:
    """Every stream by name."""
    return {**_handshakes(), **_objects(), **_management(), **_refusals()}


def shown(meta: dict[str, Any] | None, kind: str) -> str:
    """name=value pairs in key order: numbers in decimal, text and bytes in hex, lists with ';'."""
    if not meta:
        return "-"
    pairs = []
    for name in sorted(meta, key=lambda name: frames.KEYS[kind][name]):
        value = meta[name]
        if isinstance(value, str):
            value = value.encode()
        if isinstance(value, bytes):
            text = value.hex()
        elif isinstance(value, list):
            text = ";".join(str(item) for item in value)
        else:
            text = str(int(value))
        pairs.append(f"{name}={text}")
    return ",".join(pairs)


def frame_table() -> bytes:
    """What every frame of every stream holds."""
    rows: list[list[Any]] = []
    for name, stream in streams().items():
        for index, frame in enumerate(stream):
            kind = frames.kind_of(frame)
            head = [frame.opcode, frame.flags, frame.request_id, frame.item]
            body = [len(frame.payload), xxhash.xxh3_64_intdigest(frame.payload)]
            rows.append([name, index, *head, kind, "-" if frame.meta is None else shown(frame.meta, kind), *body])
    return table("stream index opcode flags request_id item meta_kind meta payload_bytes payload_xxh3", rows)


def bad_headers() -> bytes:
    """Headers that close the connection."""

    def sealed(data: bytes) -> bytes:
        return data[:28] + identity.little(crc32c(data[:28]), 4)

    good = frames.header(6, 4, 9, 0, 100, 200)
    rows = [["good", "none", good.hex()]]
    rows.append(["magic", "magic", sealed(b"DFK2" + good[4:]).hex()])
    rows.append(["major_0", "major", sealed(good[:4] + b"\0" + good[5:]).hex()])
    rows.append(["major_2", "major", sealed(good[:4] + b"\2" + good[5:]).hex()])
    for bit in range(4, 8):
        rows.append([f"flag_{bit}", "flags", frames.header(6, 1 << bit, 9, 0, 100, 200).hex()])
    rows.append(["meta_at_limit", "none", frames.header(6, 4, 9, 0, 262144, 0).hex()])
    rows.append(["meta_over", "meta_limit", frames.header(6, 4, 9, 0, 262145, 0).hex()])
    rows.append(["meta_top", "meta_limit", frames.header(6, 4, 9, 0, 2**32 - 1, 0).hex()])
    rows.append(["payload_at_limit", "none", frames.header(6, 4, 9, 0, 0, 1048576).hex()])
    rows.append(["payload_over", "payload_limit", frames.header(6, 4, 9, 0, 0, 1048577).hex()])
    rows.append(["payload_top", "payload_limit", frames.header(6, 4, 9, 0, 0, 2**32 - 1).hex()])
    for byte in range(32):
        flipped = good[:byte] + bytes([good[byte] ^ 0x80]) + good[byte + 1 :]
        rows.append([f"flipped_byte_{byte}", "magic" if byte < 4 else "crc", flipped.hex()])
    return table("name fault header (limits: 262144 bytes of meta, 1048576 of payload)", rows)


def _packed(pairs: list[tuple[Any, Any]]) -> bytes:
    """A map with its entries in the order given, repeated keys and all."""
    packer = msgpack.Packer(use_bin_type=True)
    return bytes(packer.pack_map_header(len(pairs))) + b"".join(packer.pack(k) + packer.pack(v) for k, v in pairs)


def _nested(depth: int) -> bytes:
    """An array of an array of an array ..."""
    return b"\x91" * depth + b"\x90"


def meta_cases() -> bytes:
    """Meta maps with their verdicts. 'none': canonical; 'lenient': read, but written otherwise by dfkv."""
    rows: list[list[str]] = []

    def add(kind: str, name: str, verdict: str, data: bytes, fields: dict[str, Any] | None = None) -> None:
        rows.append([kind, name, verdict, hexed(data), shown(fields, kind)])

    add("request", "empty", "lenient", b"")
    add("request", "empty_map", "none", b"\x80")
    add("reply", "empty", "malformed", b"")
    add("reply", "no_status", "malformed", b"\x80")
    add("hello", "no_lane", "malformed", b"\x80")
    for value in (0, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**63, 2**64 - 1):
        fields = {} if value == 0 else {"trace_id": value}
        add("request", f"trace_{value}", "none", frames.pack_meta("request", fields), fields)
    add("request", "checksum_0", "none", _packed([(14, 0)]), {"checksum": 0})
    add("request", "zero_written_out", "lenient", _packed([(2, 0)]))
    add("request", "unordered", "lenient", _packed([(9, 5), (8, 4)]), {"cursor": 4, "limit": 5})
    for form, size in (("cc", 1), ("cd", 2), ("ce", 4), ("cf", 8), ("d0", 1), ("d1", 2), ("d2", 4), ("d3", 8)):
        data = b"\x81\x02" + bytes.fromhex(form) + (7).to_bytes(size, "big")
        add("request", f"wide_{form}", "lenient", data, {"deadline_us": 7})
    for form, size in (("d0", 1), ("d1", 2), ("d2", 4), ("d3", 8)):
        add("request", f"negative_{form}", "bad_type", b"\x81\x02" + bytes.fromhex(form) + b"\xff" * size)
    add("request", "negative_fixint", "bad_type", b"\x81\x02\xff")
    add("request", "wide_map", "lenient", b"\xde\x00\x01\x02\x07", {"deadline_us": 7})
    add("request", "widest_map", "lenient", b"\xdf\x00\x00\x00\x01\x02\x07", {"deadline_us": 7})

    ignorable: list[tuple[str, Any]] = [("int", -5), ("float", 1.5), ("nil", None), ("bytes", b"ab"), ("text", "ab")]
    ignorable += [
        ("map", {"a": [1, {2: b"c"}]}),
        ("ext", msgpack.ExtType(5, b"abc")),
        ("ext16", msgpack.ExtType(1, bytes(16))),
    ]
    ignorable += [("long_text", "x" * 300), ("array16", list(range(40))), ("map16", {i: i for i in range(20)})]
    for name, value in ignorable:
        add("request", f"ignorable_{name}", "lenient", _packed([(200, value), (2, 7)]), {"deadline_us": 7})
    add("request", "ignorable_top_key", "lenient", _packed([(2**64 - 1, 1)]))
    add("request", "ignorable_depth_7", "lenient", b"\x81\xcc\xc8" + _nested(7))
    add("request", "ignorable_depth_8", "malformed", b"\x81\xcc\xc8" + _nested(8))
    add("request", "ignorable_depth_1000", "malformed", b"\x81\xcc\xc8" + _nested(1000))
    add("request", "ignorable_lying_array", "malformed", b"\x81\xcc\xc8\xdd\xff\xff\xff\xff")
    add("request", "ignorable_lying_map", "malformed", b"\x81\xcc\xc8\xdf\xff\xff\xff\xff\x01")
    add("request", "ignorable_lying_ext", "malformed", b"\x81\xcc\xc8\xc9\xff\xff\xff\xff\x01")
    add("request", "never_used_byte", "bad_type", b"\x81\xcc\xc8\xc1")
    add("request", "priority_later", "lenient", _packed([(129, 9)]))
    for kind, key in (("request", 16), ("request", 127), ("reply", 8), ("hello", 11), ("request", 0)):
        required = {"request": [], "reply": [(1, 0)], "hello": [(3, 0)]}[kind]
        add(kind, f"critical_{key}", "unknown_critical", _packed([*required, (key, 0)]))

    add("request", "twice", "malformed", _packed([(2, 1), (2, 1)]))
    add("request", "ignorable_twice", "malformed", _packed([(200, 1), (200, 2)]))
    add("request", "key_text", "bad_type", _packed([("2", 1)]))
    add("request", "not_a_map", "bad_type", b"\x91\x01")
    add("request", "trailing", "malformed", b"\x80\x80")
    add("request", "lying_map", "too_large", b"\xdf\xff\xff\xff\xff")
    add("request", "short_map", "malformed", b"\xde\x00\x40")
    add("request", "65_entries", "too_large", _packed([(200 + i, 0) for i in range(65)]))
    add("request", "64_entries", "lenient", _packed([(200 + i, 0) for i in range(64)]))
    add("request", "lying_text", "too_large", b"\x81\xcc\x83\xdb\xff\xff\xff\xff")
    add("request", "lying_bytes", "too_large", b"\x81\x0c\xc6\xff\xff\xff\xff")
    add("request", "short_text", "malformed", b"\x81\xcc\x83\xa5abc")
    for name, text in (
        ("overlong", b"\xc0\x80"),
        ("surrogate", b"\xed\xa0\x80"),
        ("cut", b"\xe2\x82"),
        ("lone", b"\x80"),
    ):
        add("request", f"utf8_{name}", "malformed", b"\x81\xcc\x83" + bytes([0xA0 | len(text)]) + text)
    add("request", "utf8_good", "none", _packed([(131, "añ€𐍈")]), {"label": "añ€𐍈"})

    wrong: list[tuple[str, int, Any, str]] = [
        ("request", 1, bytes(15), "bad_value"),
        ("request", 1, bytes(17), "too_large"),
        ("request", 1, "x" * 16, "bad_type"),
        ("request", 3, 2**32, "bad_value"),
        ("request", 4, 2, "bad_value"),
        ("request", 5, 1, "bad_type"),
        ("request", 5, None, "bad_type"),
        ("request", 13, bytes(31), "bad_value"),
        ("request", 13, bytes(33), "too_large"),
        ("request", 14, 1.5, "bad_type"),
        ("request", 131, b"bytes", "bad_type"),
        ("request", 131, "x" * 257, "too_large"),
        ("reply", 1, 65536, "bad_value"),
        ("reply", 1, None, "bad_type"),
        ("reply", 5, 2**32, "bad_value"),
        ("reply", 7, bytes(16), "bad_value"),
        ("reply", 131, "x" * 1025, "too_large"),
        ("reply", 132, [65536], "bad_value"),
        ("reply", 132, {1: 2}, "bad_type"),
        ("reply", 132, [1] * 257, "too_large"),
        ("hello", 3, 2, "bad_value"),
        ("hello", 7, bytes(8), "bad_value"),
        ("hello", 8, "x" * 129, "too_large"),
        ("hello", 6, 2**32, "bad_value"),
    ]
    for kind, key, value, verdict in wrong:
        required = {"request": [], "reply": [(1, 0)], "hello": [(3, 0)]}[kind]
        entries = [entry for entry in required if entry[0] != key]
        add(kind, f"key_{key}_{len(rows)}", verdict, _packed([*entries, (key, value)]))
    add("reply", "status_unknown", "none", _packed([(1, 65535)]), {"status": 65535})
    return table("kind name verdict encoded meta", rows)


def files() -> dict[str, bytes]:
    """Every file of this module."""
    made = {"frames.txt": frame_table(), "bad_frames.txt": bad_headers(), "meta.txt": meta_cases()}
    for name, stream in streams().items():
        made[f"frames/{name}.bin"] = b"".join(frames.encode(frame) for frame in stream)
    return made


def fuzz_seeds() -> dict[str, bytes]:
    """Small inputs from which the fuzzers of native/fuzz start, by path below its corpus folder."""
    seeds = {}
    for name, stream in streams().items():
        whole = b"".join(frames.encode(frame) for frame in stream)
        if len(whole) <= 1024:
            seeds[f"frame_fuzz/{name}"] = whole
        for index, frame in enumerate(stream):
            if frame.meta is not None:
                kind = frames.kind_of(frame)
                selector = ("hello", "request", "reply").index(kind)
                seeds[f"meta_fuzz/{name}_{index}"] = bytes([selector]) + frames.pack_meta(kind, frame.meta)
    for name, view in view_cases().items():
        seeds[f"view_fuzz/{name}_whole"] = b"\0" + views.encode(view)
        seeds[f"view_fuzz/{name}_nodes"] = b"\1" + views.encode_nodes(view["nodes"])
    return seeds
