"""Golden vectors of checksums, identity, records and views. Lines of columns; '-' stands for nothing."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import xxhash

from tests.reference import identity, ring, storage, views
from tests.reference.crc import crc32c


def pattern(size: int) -> bytes:
    """Bytes that a test in any language can make again: byte i is (31 * i + 7) mod 251."""
    return bytes((31 * i + 7) % 251 for i in range(size))


def hexed(data: bytes) -> str:
    """Hex, or '-' for no bytes."""
    return data.hex() or "-"


def table(columns: str, rows: list[list[Any]]) -> bytes:
    """A text table with its columns named in the first line."""
    lines = [f"# {columns}"] + [" ".join(str(cell) for cell in row) for row in rows]
    return ("\n".join(lines) + "\n").encode()


def checksums() -> bytes:
    """Lengths around every boundary inside CRC, xxh3 and SHA-256."""
    sizes = [*range(20), 31, 32, 33, 55, 56, 57, 63, 64, 65, 119, 120, 127, 128, 129, 239, 240, 241, 255, 256, 257]
    sizes += [511, 512, 1023, 1024, 1025, 2047, 4096, 5000, 65536, 65539]
    rows: list[list[Any]] = []
    for size in sizes:
        data = pattern(size)
        rows.append([size, crc32c(data), xxhash.xxh3_64_intdigest(data), hashlib.sha256(data).hexdigest()])
    return table("length of the pattern byte[i] = (31 * i + 7) mod 251, crc32c, xxh3_64, sha256", rows)


def macs() -> bytes:
    """Proofs of AUTH, with secrets shorter and longer than a hash block."""
    rows = []
    for index, size in enumerate((1, 32, 64, 65, 200)):
        secret, client, server = pattern(size), bytes(range(16)), bytes(range(100, 116))
        for role in "cs":
            node = ["", "node-1", "a.b_c"][index % 3]
            mac = identity.auth_mac(secret, role, client, server, node)
            rows.append([secret.hex(), role, client.hex(), server.hex(), hexed(node.encode()), mac.hex()])
    return table("secret role client_nonce server_nonce node_id(hex) mac", rows)


# ---- identity ------------------------------------------------------------------------------------


def namespace_values() -> dict[str, dict[str, Any]]:
    """Typed field values, JSON-ready."""
    base: dict[str, Any] = {
        "engine_family": "vllm",
        "kv_format": 2,
        "weights_digest": hashlib.sha256(b"weights").hexdigest(),
        "config_digest": hashlib.sha256(b"config").hexdigest(),
        "compute_dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "block_tokens": 128,
        "chunk_tokens": 256,
        "groups": [{"kind": 1, "heads": 4, "head_size": 64}],
    }
    full = {
        **base,
        "tenant": "team-ä",
        "fleet_salt": "00ff10",
        "weights_generation": 2**64 - 1,
        "kv_scales_digest": hashlib.sha256(b"scales").hexdigest(),
        "page_layout": [["N", 128], ["C", 2**40]],
        "page_format": "cpu-amx",
        "hash_form": {"algorithm": 1, "seed": "30"},
        "groups": [
            {"kind": 1, "heads": 8, "head_size": 128},
            {"kind": 2, "heads": 8, "head_size": 128, "window": 4096},
            {"kind": 5, "state_sizes": [4096, 2**33]},
        ],
        "pp_size": 2,
        "pcp_size": 3,
        "dcp_size": 4,
        "shard_scheme": 1,
    }
    mla = {**base, "groups": [{"kind": 4, "heads": 1, "head_size": 576}], "hash_form": {"algorithm": 3, "seed": ""}}
    return {"minimal": base, "full": full, "mla": mla}


def namespaces() -> bytes:
    """Descriptors that mean something, and bare framings that must not collide."""
    encoded = {name: identity.descriptor_of(values) for name, values in namespace_values().items()}
    encoded["empty"] = b""
    encoded["split_ab_c"] = identity.descriptor([(1, b"ab"), (2, b"c")])
    encoded["split_a_bc"] = identity.descriptor([(1, b"a"), (2, b"bc")])
    encoded["nested"] = identity.descriptor([(1, b"x" + identity.descriptor([(2, b"y")]))])
    encoded["beside"] = identity.descriptor([(1, b"x"), (2, b"y")])
    encoded["high_tag"] = identity.descriptor([(65535, b"")])
    rows = [[name, hexed(data), identity.namespace_id(data).hex()] for name, data in encoded.items()]
    return table("name descriptor id", rows)


def blocks() -> bytes:
    """Two chains: one without extras, one with extras given out of order."""
    rows = []
    for name, extras in (("plain", []), ("extras", [(2, b"salt"), (1, b"lora"), (1, b"a"), (255, b"")])):
        tip = identity.chain_start()
        for index, count in enumerate((16, 128, 1, 0)):
            tokens = [(index * 1000003 + i * 2654435761) % 2**32 for i in range(count)]
            after = identity.chain_next(tip, tokens, extras)
            packed = b"".join(identity.little(token, 4) for token in tokens)
            listed = ",".join(f"{tag}:{value.hex()}" for tag, value in extras) or "-"
            rows.append([f"{name}_{index}", tip.hex(), hexed(packed), listed, after.hex(), after[:16].hex()])
            tip = after
    return table("name tip tokens extras(tag:hex) next_tip block_id", rows)


def opaque_blocks() -> bytes:
    """Engine hashes; the last two would collide without the length."""
    cases = [(1, pattern(32), b""), (2, pattern(32), b"x"), (3, pattern(16), b""), (1, b"ab", b"c"), (1, b"a", b"bc")]
    rows = [[a, hexed(h), hexed(e), identity.opaque_block_id(a, h, e).hex()] for a, h, e in cases]
    return table("algorithm hash extras block_id", rows)


def parts() -> bytes:
    """Each field alone at its top value, and all together."""
    cases = [(0, 0, 0, 0, 0, 0), (1, 2, 3, 4, 5, 6), (255, 255, 65535, 255, 254, 255)]
    cases += [(255, 0, 0, 0, 0, 0), (0, 255, 0, 0, 0, 0), (0, 0, 65535, 0, 0, 0), (0, 0, 0, 255, 0, 0)]
    cases += [(0, 0, 0, 0, 254, 255), (0, 0, 0, 0, 0, 255)]
    return table(
        "group component stage cp_index shard_index shard_count part", [[*c, identity.part(*c)] for c in cases]
    )


def routes() -> bytes:
    """Routes under placement rule 1."""
    ids = [bytes(16), bytes(range(16)), bytes([255] * 16), hashlib.sha256(b"route").digest()[:16]]
    return table("block_id route", [[block.hex(), identity.route(block)] for block in ids])


def rings() -> bytes:
    """Owners under placement rule 1: equal and mixed weights, none, the largest, many nodes."""
    clusters = {
        "one": {"node-a": 100},
        "equal": {f"node-{i}": 100 for i in range(8)},
        "mixed": {"n1": 1, "n2": 7, "n3": 0, "n4": 4294967295, "n5": 4294967294},
        "many": {f"cache-{i}.rack-{i % 7}": (100, 200, 75, 150)[i % 4] for i in range(200)},
    }
    rows: list[list[Any]] = []
    for name, weights in clusters.items():
        places = list(weights)
        asked = [i * 0x9E3779B97F4A7C15 & ring.MASK for i in range(256)]
        owners = [places.index(str(ring.owner(route, weights))) for route in asked]
        listed = ",".join(f"{node}:{weight}" for node, weight in weights.items())
        rows.append([name, listed, ",".join(map(str, owners))])
    return table("name nodes(id:weight) owners(position) of the routes i * 0x9E3779B97F4A7C15, i from 0", rows)


# ---- storage and view ----------------------------------------------------------------------------


def record_cases() -> dict[str, tuple[dict[str, Any], bytes, int]]:
    """Fields, store and slot of each record."""
    live = {
        "state": 1,
        "namespace": bytes(range(16)),
        "block": bytes(range(16, 32)),
        "part": identity.part(1, 2, 3, 4, 5, 6),
    }
    distinct = {name: (at * 0x01010101 % 2 ** (8 * size)) for name, at, size in storage.RECORD_FIELDS if size in (4, 8)}
    full = {**distinct, **live, "codec": 7, "priority": 9}
    top = {name: 2 ** (8 * size) - 1 for name, _, size in storage.RECORD_FIELDS if size in (4, 8)}
    quarantined = {
        **top,
        "state": 2,
        "codec": 255,
        "priority": 255,
        "namespace": bytes([255] * 16),
        "block": bytes([254] * 16),
    }
    store = bytes(range(200, 216))
    return {"free": ({}, store, 0), "live": (full, store, 5), "top": (quarantined, bytes(16), 2**64 - 1)}


def records() -> bytes:
    """Good records, and the ways in which one is not believed."""
    rows = []
    for name, (fields, store, slot) in record_cases().items():
        record = storage.encode_record(fields, store, slot)
        values = ",".join(
            f"{key}={value.hex() if isinstance(value, bytes) else value}"
            for key, value in storage.decode_record(record, store, slot).items()
        )
        rows.append([name, "none", store.hex(), slot, record.hex(), values])
    fields, store, slot = record_cases()["live"]
    record = storage.encode_record(fields, store, slot)
    flipped = record[:100] + bytes([record[100] ^ 1]) + record[101:]
    later = storage.encode_record({**fields, "version": 2}, store, slot)
    state = storage.encode_record({**fields, "state": 3}, store, slot)
    used = storage.seal_record(record[:127] + b"\1", store, slot)
    bad = [
        ("flipped_bit", "crc", slot, flipped),
        ("other_slot", "crc", slot + 1, record),
        ("later_version", "version", slot, later),
    ]
    bad += [("later_state", "version", slot, state), ("zero_bytes_used", "not_zero", slot, used)]
    rows += [[name, fault, store.hex(), at, data.hex(), "-"] for name, fault, at, data in bad]
    return table("name fault store slot record fields", rows)


TABLE_HEADERS: dict[str, dict[str, Any]] = {
    "first": {
        "store": bytes(range(16)),
        "extent_bytes": 2**30,
        "extent_count": 12,
        "slot_count": 2**33,
        "lattice_id": 1,
        "node_id": "node-1",
    },
    "longest_name": {
        "minor": 3,
        "store": bytes([9] * 16),
        "extent_bytes": 1,
        "extent_count": 2,
        "slot_count": 3,
        "lattice_id": 2**32 - 1,
        "node_id": "n" * 128,
    },
}


def table_headers() -> bytes:
    """The header's first 256 bytes; the rest is zero."""
    rows = []
    for name, fields in TABLE_HEADERS.items():
        header = storage.encode_table_header(fields)
        assert not any(header[256:])
        order = ("store", "extent_bytes", "extent_count", "slot_count", "lattice_id", "node_id")
        cells = [fields[key].hex() if isinstance(fields[key], bytes) else fields[key] for key in order]
        rows.append([name, fields.get("minor", 0), *cells, header[:256].hex()])
    columns = "name minor store extent_bytes extent_count slot_count lattice_id node_id first_256_bytes"
    return table(columns, rows)


def view_cases() -> dict[str, dict[str, Any]]:
    """Views as plain values."""
    node: dict[str, Any] = {
        "id": "n1",
        "incarnation": 1,
        "boot_id": bytes(16),
        "state": 1,
        "read_weight": 100,
        "write_weight": 100,
        "zone": "",
        "features": 0,
        "tcp": ["127.0.0.1:9444"],
        "rdma": [],
        "unix_path": "",
    }
    rich = {
        **node,
        "id": "Node_2.b-c",
        "incarnation": 2**64 - 1,
        "boot_id": bytes(range(16)),
        "state": 2,
        "write_weight": 0,
        "read_weight": 2**32 - 1,
        "zone": "rack ü",
        "features": 2**63,
        "tcp": ["[::1]:1", "host.example:65535"],
        "rdma": ["fe80::1"],
        "unix_path": "/run/dfkv.sock",
    }
    bare = {"cluster_id": bytes(16), "revision": 0, "placement_rule": 1, "nodes": []}
    many = [{**node, "id": f"m{i:03d}", "incarnation": i} for i in range(20)]
    return {
        "empty": bare,
        "one": {**bare, "cluster_id": bytes(range(16)), "revision": 7, "nodes": [node]},
        "two": {**bare, "revision": 2**64 - 1, "placement_rule": 2, "nodes": [node, rich]},
        "twenty": {**bare, "revision": 300, "nodes": many},
    }


def _listed(values: list[str]) -> str:
    return "|".join(value.encode().hex() for value in values) or "-"


def encoded_views() -> bytes:
    """One line for each view, one for each of its nodes."""
    rows: list[list[Any]] = []
    for name, view in view_cases().items():
        data = views.encode(view)
        digest = views.decode(data)["digest"]
        head = [view["cluster_id"].hex(), view["revision"], digest.hex(), view["placement_rule"], len(view["nodes"])]
        rows.append(["view", name, *head, data.hex()])
        for node in sorted(view["nodes"], key=lambda node: str(node["id"])):
            cells = [node["id"], node["incarnation"], node["boot_id"].hex(), node["state"], node["read_weight"]]
            cells += [node["write_weight"], hexed(node["zone"].encode()), node["features"]]
            cells += [_listed(node["tcp"]), _listed(node["rdma"]), hexed(node["unix_path"].encode())]
            rows.append(["node", *cells])
    columns = (
        "view name cluster_id revision digest rule nodes encoded, then for each node: node id incarnation boot_id "
        "state read_weight write_weight zone(hex) features tcp(hex|hex) rdma(hex|hex) unix_path(hex)"
    )
    return table(columns, rows)


def files() -> dict[str, bytes]:
    """Every file of this module."""
    values = json.dumps(namespace_values(), indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    return {
        "checksum.txt": checksums(),
        "auth.txt": macs(),
        "namespace.json": values.encode(),
        "namespace.txt": namespaces(),
        "block.txt": blocks(),
        "opaque.txt": opaque_blocks(),
        "part.txt": parts(),
        "route.txt": routes(),
        "ring.txt": rings(),
        "record.txt": records(),
        "table_header.txt": table_headers(),
        "view.txt": encoded_views(),
    }
