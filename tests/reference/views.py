"""The encoded view of the cluster, written from docs/formats.md on the msgpack package."""

from __future__ import annotations

import hashlib
from typing import Any

import msgpack

from tests.reference.identity import little

# name, key, default (None: always written)
NODE_FIELDS: list[tuple[str, int, Any]] = [
    ("id", 1, None),
    ("incarnation", 2, None),
    ("boot_id", 3, None),
    ("state", 4, None),
    ("read_weight", 5, None),
    ("write_weight", 6, None),
    ("zone", 7, ""),
    ("features", 8, 0),
    ("tcp", 9, []),
    ("rdma", 10, []),
    ("unix_path", 11, ""),
]


def pack(value: Any) -> bytes:
    """Msgpack with str and bin kept apart."""
    return bytes(msgpack.packb(value, use_bin_type=True))


def encode_nodes(nodes: list[dict[str, Any]]) -> bytes:
    """The array of nodes, sorted by id; fields at their default are left out."""
    maps = []
    for node in sorted(nodes, key=lambda node: node["id"]):
        maps.append({key: node[name] for name, key, default in NODE_FIELDS if default is None or node[name] != default})
    return pack(maps)


def digest(placement_rule: int, encoded_nodes: bytes) -> bytes:
    """First 16 bytes of SHA-256("dfkv.view.1" || u32 rule || encoded nodes)."""
    return hashlib.sha256(b"dfkv.view.1" + little(placement_rule, 4) + encoded_nodes).digest()[:16]


def encode(view: dict[str, Any]) -> bytes:
    """{1 cluster id, 2 revision, 3 digest, 4 placement rule, 5 nodes}."""
    nodes = encode_nodes(view["nodes"])
    rule = view["placement_rule"]
    head = pack({1: view["cluster_id"], 2: view["revision"], 3: digest(rule, nodes), 4: rule, 5: None})
    assert head[-1:] == pack(None)
    return head[:-1] + nodes


def decode(data: bytes) -> dict[str, Any]:
    """The reverse of encode, without its checks."""
    found = msgpack.unpackb(data, strict_map_key=False, raw=False)
    nodes = [{name: node.get(key, default) for name, key, default in NODE_FIELDS} for node in found[5]]
    return {
        "cluster_id": found[1],
        "revision": found[2],
        "digest": found[3],
        "placement_rule": found[4],
        "nodes": nodes,
    }
