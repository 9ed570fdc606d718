"""The slot record and the header of slots.tbl, written from docs/formats.md."""

from __future__ import annotations

from typing import Any

from tests.reference.crc import crc32c
from tests.reference.identity import little

# name, offset, size; "namespace" and "block" hold bytes.
RECORD_FIELDS = [
    ("version", 4, 1),
    ("state", 5, 1),
    ("codec", 6, 1),
    ("priority", 7, 1),
    ("sequence", 8, 8),
    ("namespace", 16, 16),
    ("block", 32, 16),
    ("part", 48, 8),
    ("route", 56, 8),
    ("checksum", 64, 8),
    ("stored_bytes", 72, 4),
    ("raw_bytes", 76, 4),
    ("created_s", 80, 4),
    ("expires_s", 84, 4),
    ("extent_generation", 88, 4),
    ("namespace_generation", 92, 4),
    ("tenant", 96, 4),
    ("recompute_us", 100, 4),
    ("key_id", 104, 4),
]


def seal_record(record: bytes, store_uuid: bytes, slot: int) -> bytes:
    """Puts the CRC over store, slot number and bytes 4-127 into bytes 0-3."""
    return little(crc32c(store_uuid + little(slot, 8) + record[4:]), 4) + record[4:]


def encode_record(fields: dict[str, Any], store_uuid: bytes, slot: int) -> bytes:
    """One record, 128 bytes."""
    record = bytearray(128)
    for name, at, size in RECORD_FIELDS:
        value = fields.get(name, 1 if name == "version" else bytes(size) if size == 16 else 0)
        record[at : at + size] = value if isinstance(value, bytes) else little(value, size)
    return seal_record(bytes(record), store_uuid, slot)


def decode_record(record: bytes, store_uuid: bytes, slot: int) -> dict[str, Any]:
    """Fields of a record. Raises ValueError with the fault's name."""
    if record == bytes(128):
        return {name: bytes(size) if size == 16 else 0 for name, _, size in RECORD_FIELDS if name != "version"}
    if seal_record(record, store_uuid, slot) != record:
        raise ValueError("crc")
    if record[4] != 1 or record[5] > 2:
        raise ValueError("version")
    if any(record[108:]):
        raise ValueError("not_zero")
    fields: dict[str, Any] = {}
    for name, at, size in RECORD_FIELDS[1:]:
        data = record[at : at + size]
        fields[name] = data if size == 16 else int.from_bytes(data, "little")
    return fields


def encode_table_header(fields: dict[str, Any]) -> bytes:
    """The first 4 KiB of slots.tbl."""
    node_id = str(fields["node_id"]).encode()
    store: bytes = fields["store"]
    head = b"DFKSLOTS" + little(fields.get("major", 1), 2) + little(fields.get("minor", 0), 2) + bytes(4)
    head += store + little(fields["extent_bytes"], 8) + little(fields["extent_count"], 8)
    head += little(fields["slot_count"], 8) + little(fields["lattice_id"], 4) + little(len(node_id), 4)
    header = (head + node_id).ljust(4096, b"\0")
    return header[:12] + little(crc32c(header), 4) + header[16:]
