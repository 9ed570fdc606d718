"""Frame headers, slot records and views through the native module, against the independent implementation."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfkv_core import _native
from tests.golden.vectors import view_cases
from tests.reference import frames, storage, views

U8, U16, U32, U64 = (st.integers(0, 2**width - 1) for width in (8, 16, 32, 64))
STORE = bytes(range(16))


@given(U8, U16.map(lambda flags: flags & 0xFF0F), U64, U32, st.integers(0, 262144), st.integers(0, 1048576))
def test_frame_headers_agree(opcode: int, flags: int, request_id: int, item: int, meta: int, payload: int) -> None:
    header = frames.header(opcode, flags, request_id, item, meta, payload)
    assert _native.encode_frame_header(opcode, flags, request_id, item, meta, payload) == header
    fields = {"opcode": opcode, "flags": flags, "request_id": request_id, "item": item}
    fields.update(meta_bytes=meta, payload_bytes=payload)
    assert _native.decode_frame_header(header, 262144, 1048576) == frames.decode_header(header) == fields


@given(st.binary(min_size=32, max_size=32))
def test_random_headers_are_refused(header: bytes) -> None:
    with pytest.raises(ValueError, match="frame header"):
        _native.decode_frame_header(header, 2**32 - 1, 2**32 - 1)


def test_headers_of_another_length() -> None:
    good = frames.header(1, 0, 0, 0, 0, 0)
    for header in (b"", good[:31], good + b"\0"):
        with pytest.raises(ValueError, match="expected 32 bytes"):
            _native.decode_frame_header(header, 1, 1)


WIDTHS = {1: U8, 4: U32, 8: U64, 16: st.binary(min_size=16, max_size=16)}
RECORDS = st.fixed_dictionaries(
    {name: st.integers(0, 2) if name == "state" else WIDTHS[size] for name, _, size in storage.RECORD_FIELDS[1:]}
)


@given(RECORDS, st.binary(min_size=16, max_size=16), U64)
def test_records_agree(fields: dict[str, Any], store: bytes, slot: int) -> None:
    record = storage.encode_record(fields, store, slot)
    assert _native.encode_slot_record(fields, store, slot) == record
    assert _native.decode_slot_record(record, store, slot) == storage.decode_record(record, store, slot) == fields
    with pytest.raises(ValueError, match="crc"):
        _native.decode_slot_record(record, store, slot ^ 1)


def test_record_faults() -> None:
    fields: dict[str, Any] = {"state": 1, "sequence": 9}
    record = storage.encode_record(fields, STORE, 4)
    later = storage.encode_record({**fields, "version": 2}, STORE, 4)
    used = storage.seal_record(record[:110] + b"\1" + record[111:], STORE, 4)
    cases = [
        (record[:50] + b"\1" + record[51:], "crc"),
        (later, "version"),
        (used, "not_zero"),
        (record[:127], "128 bytes"),
    ]
    for data, fault in cases:
        with pytest.raises(ValueError, match=fault):
            _native.decode_slot_record(data, STORE, 4)
    assert _native.decode_slot_record(bytes(128), STORE, 4)["state"] == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"state": 3}, "state"),
        ({"sequence": -1}, "sequence"),
        ({"sequence": 2**64}, "sequence"),
        ({"tenant": 2**32}, "tenant"),
        ({"block": bytes(15)}, "block"),
        ({"block": "x" * 16}, "block"),
        ({"codec": None}, "codec"),
        ({"sequense": 1}, "unknown field 'sequense'"),
        ({1: 1}, "unknown field 1"),
    ],
)
def test_record_fields_are_checked(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _native.encode_slot_record(fields, STORE, 0)


NODE_IDS = st.text("abcXYZ019._-", min_size=1, max_size=12)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NODES = st.fixed_dictionaries(
    {
        "id": NODE_IDS,
        "incarnation": U64,
        "boot_id": WIDTHS[16],
        "state": st.integers(0, 3),
        "read_weight": U32,
        "write_weight": U32,
        "zone": TEXTS,
        "features": U64,
        "tcp": st.lists(TEXTS, max_size=3),
        "rdma": st.lists(TEXTS, max_size=3),
        "unix_path": TEXTS,
    }
)
VIEWS = st.fixed_dictionaries(
    {
        "cluster_id": WIDTHS[16],
        "revision": U64,
        "placement_rule": U32,
        "nodes": st.lists(NODES, max_size=5, unique_by=lambda node: str(node["id"])),
    }
)


@given(VIEWS)
def test_views_agree(view: dict[str, Any]) -> None:
    data = views.encode(view)
    assert _native.encode_view(view) == data
    decoded = _native.decode_view(data)
    assert decoded == views.decode(data)
    assert _native.encode_view(decoded) == data
    assert decoded["nodes"] == sorted(view["nodes"], key=lambda node: str(node["id"]))


@given(st.binary(max_size=300))
def test_random_views_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="view"):
        _native.decode_view(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cluster_id": b""}, "cluster_id"),
        ({"revision": "1"}, "revision"),
        ({"placement_rule": 2**32}, "placement_rule"),
        ({"nodes": "n1"}, "nodes"),
        ({"nodes": ["n1"]}, "nodes"),
        ({"nodes": [{"id": "a/b"}]}, "a/b"),
        ({"nodes": [{"id": "a"}, {"id": "a"}]}, "twice"),
        ({"nodes": [{"id": "a", "state": 4}]}, "state"),
        ({"nodes": [{"id": "a", "tcp": "h:1"}]}, "tcp"),
        ({"nodes": [{"id": "a", "tcp": [1]}]}, "tcp"),
        ({"nodes": [{"id": "a", "weight": 1}]}, "unknown field 'weight'"),
        ({"epoch": 1}, "unknown field 'epoch'"),
    ],
)
def test_view_fields_are_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _native.encode_view({**view_cases()["one"], **change})


def test_auth_arguments() -> None:
    for role in ("", "x", "cs"):
        with pytest.raises(ValueError, match="role"):
            _native.auth_mac(b"k", role, bytes(16), bytes(16), "n")
    with pytest.raises(ValueError, match="client nonce"):
        _native.auth_mac(b"k", "c", bytes(15), bytes(16), "n")
    with pytest.raises(ValueError, match="server nonce"):
        _native.auth_mac(b"k", "c", bytes(16), bytes(17), "n")
