"""The committed golden files are what the independent implementation makes, and what the native code and Python read."""

from __future__ import annotations

import array
import json
from pathlib import Path
from typing import Any

import pytest

from dfkv_core import _native, keys
from dfkv_core.namespace import Group, GroupKind, HashAlgorithm, HashForm, NamespaceDescriptor, ShardScheme
from tests.golden import generate, traffic, vectors
from tests.reference import frames, identity, views

GOLDEN = generate.GOLDEN_DIR


def rows(name: str) -> list[list[str]]:
    """The rows of a golden table."""
    lines = (GOLDEN / name).read_text().splitlines()
    found = [line.split(" ") for line in lines if line and not line.startswith("#")]
    assert found
    return found


def unhex(text: str) -> bytes:
    return b"" if text == "-" else bytes.fromhex(text)


def descriptor_of(values: dict[str, Any]) -> NamespaceDescriptor:
    """A descriptor out of JSON-ready values."""
    typed = dict(values)
    for name in ("fleet_salt", "weights_digest", "config_digest", "kv_scales_digest"):
        if name in typed:
            typed[name] = bytes.fromhex(typed[name])
    if "page_layout" in typed:
        typed["page_layout"] = tuple((axis, size) for axis, size in typed["page_layout"])
    if "hash_form" in typed:
        form = typed["hash_form"]
        typed["hash_form"] = HashForm(HashAlgorithm(form["algorithm"]), bytes.fromhex(form["seed"]))
    if "shard_scheme" in typed:
        typed["shard_scheme"] = ShardScheme(typed["shard_scheme"])
    typed["groups"] = tuple(
        Group(
            **{
                **group,
                "kind": GroupKind(group["kind"]),
                "state_sizes": tuple(group.get("state_sizes", ())),
            }
        )
        for group in typed["groups"]
    )
    return NamespaceDescriptor(**typed)


def test_committed_files_are_current() -> None:
    made = generate.files()
    stale = [str(path) for path, content in made.items() if not path.exists() or path.read_bytes() != content]
    assert not stale, "run: python -m tests.golden.generate"
    kept = {path for folder in (GOLDEN / "frames", generate.CORPUS_DIR) for path in folder.rglob("*") if path.is_file()}
    assert kept <= made.keys(), "files that nothing makes any more"


def test_reference_imports_nothing_of_dfkv() -> None:
    for folder in ("reference", "golden"):
        for path in (Path(__file__).parents[1] / folder).glob("*.py"):
            assert "dfkv_core" not in path.read_text(), path


def test_checksums() -> None:
    for size, crc, xxh3, sha in rows("checksum.txt"):
        data = vectors.pattern(int(size))
        assert _native.crc32c(data) == int(crc)
        assert _native.xxh3_64(data) == int(xxh3)
        assert _native.sha256(data).hex() == sha


def test_auth() -> None:
    for secret, role, client, server, node, mac in rows("auth.txt"):
        node_id = unhex(node).decode()
        made = _native.auth_mac(unhex(secret), role, unhex(client), unhex(server), node_id)
        assert made.hex() == mac


def test_typed_namespaces() -> None:
    expected = {name: (unhex(data), ns) for name, data, ns in rows("namespace.txt")}
    typed = json.loads((GOLDEN / "namespace.json").read_text())
    assert len(typed) >= 3
    for name, values in typed.items():
        data, ns = expected[name]
        descriptor = descriptor_of(values)
        assert descriptor.encode() == data == identity.descriptor_of(values)
        assert descriptor.id.hex() == ns == _native.namespace_id(data).hex()
        assert NamespaceDescriptor.decode(data) == descriptor


def test_blocks() -> None:
    for _, tip, tokens, extras, after, block in rows("block.txt"):
        chain = _native.BlockChain(unhex(tip))
        listed = [] if extras == "-" else [item.split(":") for item in extras.split(",")]
        pairs = [(int(tag), bytes.fromhex(value)) for tag, value in listed]
        assert chain.append(array.array("I", unhex(tokens)), pairs).hex() == block
        assert chain.tip.hex() == after
    for algorithm, engine_hash, extras, block in rows("opaque.txt"):
        assert _native.opaque_block_id(int(algorithm), unhex(engine_hash), unhex(extras)).hex() == block


def test_parts_and_routes() -> None:
    for *fields, part in rows("part.txt"):
        numbers = [int(field) for field in fields]
        assert _native.encode_part(*numbers) == int(part)
        assert keys.PartFields(*numbers).encode() == int(part)
        assert keys.PartFields.decode(int(part)) == keys.PartFields(*numbers)
    for block, route in rows("route.txt"):
        assert keys.route_of(unhex(block)) == int(route)


def test_views() -> None:
    cases = vectors.view_cases()
    for row in rows("view.txt"):
        if row[0] == "node":
            continue
        data = unhex(row[7])
        decoded = _native.decode_view(data)
        assert decoded == views.decode(data)
        assert decoded["nodes"] == sorted(cases[row[1]]["nodes"], key=lambda node: str(node["id"]))
        assert _native.encode_view(cases[row[1]]) == data


def test_bad_headers() -> None:
    for _, fault, header in rows("bad_frames.txt"):
        data = unhex(header)
        if fault == "none":
            assert _native.decode_frame_header(data, 262144, 1048576) == frames.decode_header(data)
            continue
        with pytest.raises(ValueError, match=rf"\b{fault}\b"):
            _native.decode_frame_header(data, 262144, 1048576)
        with pytest.raises(frames.FrameError, match=rf"^{fault}$"):
            frames.decode_header(data)


def test_streams_are_read_back() -> None:
    listed: dict[str, list[list[str]]] = {}
    for row in rows("frames.txt"):
        listed.setdefault(row[0], []).append(row)
    assert set(listed) == {path.stem for path in (GOLDEN / "frames").glob("*.bin")}
    for name, lines in listed.items():
        read = list(frames.decode_stream((GOLDEN / "frames" / f"{name}.bin").read_bytes()))
        assert len(read) == len(lines)
        for frame, line in zip(read, lines, strict=True):
            kind = frames.kind_of(frame)
            head = (frame.opcode, frame.flags, frame.request_id, frame.item)
            assert [str(value) for value in head] == line[2:6]
            assert [kind, traffic.shown(frame.meta, kind), str(len(frame.payload))] == line[6:9]
            assert str(_native.xxh3_64(frame.payload)) == line[9]
            fields = (*head, len(frame.raw_meta), len(frame.payload))
            assert _native.encode_frame_header(*fields) == frames.header(*fields)
