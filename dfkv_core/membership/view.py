"""The view of the cluster as typed records; the bytes are docs/formats.md, made by the native module."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any


class NodeState(IntEnum):
    """Values are on the wire. Draining nodes are read and not written; gone ones neither."""

    JOINING = 0
    SERVING = 1
    DRAINING = 2
    GONE = 3


@dataclass(frozen=True)
class NodeEntry:
    """One node. Incarnation 0 and an empty boot id mean "not known here"; tcp holds "host:port" texts."""

    id: str
    tcp: tuple[str, ...]
    incarnation: int = 0
    boot_id: bytes = bytes(16)
    state: NodeState = NodeState.SERVING
    read_weight: int = 100
    write_weight: int = 100
    zone: str = ""
    features: int = 0
    rdma: tuple[str, ...] = ()
    unix_path: str = ""


USED_STATES = (NodeState.SERVING, NodeState.DRAINING)


def usable(nodes: Iterable[NodeEntry]) -> bool:
    """Whether somebody can be read. A view without is never published, and never taken."""
    return any(node.state in USED_STATES for node in nodes)


@dataclass(frozen=True)
class View:
    """An immutable picture of the cluster. (cluster_id, revision) orders views of one cluster."""

    cluster_id: bytes
    revision: int
    nodes: tuple[NodeEntry, ...] = field(default=())
    placement_rule: int = 1

    def follows(self, known: View | None) -> bool:
        """Whether a node that goes by `known` goes by this one instead: usable, and later. None: it has none yet."""
        later = known is None or (self.cluster_id, self.revision) > (known.cluster_id, known.revision)
        return later and usable(self.nodes)

    def encode(self) -> bytes:
        """The wire form. Raises ValueError where a field is over its limit. Any thread."""
        from dfkv_core import _native

        view: dict[str, Any] = asdict(self)
        for node in view["nodes"]:
            node["state"] = int(node["state"])
            node["tcp"] = list(node["tcp"])
            node["rdma"] = list(node["rdma"])
        view["nodes"] = list(view["nodes"])
        return _native.encode_view(view)

    @classmethod
    def decode(cls, data: bytes) -> View:
        """Reads the wire form. Raises ValueError when malformed. Any thread."""
        from dfkv_core import _native

        raw = _native.decode_view(data)
        names = NodeEntry.__dataclass_fields__
        nodes = []
        for item in raw["nodes"]:
            known = {key: value for key, value in item.items() if key in names}
            known.update(state=NodeState(item["state"]), tcp=tuple(item["tcp"]), rdma=tuple(item["rdma"]))
            nodes.append(NodeEntry(**known))
        return cls(raw["cluster_id"], raw["revision"], tuple(nodes), raw["placement_rule"])
