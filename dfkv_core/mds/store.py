"""What the membership service asks of etcd, as data: registry.py yields these, and whoever runs it does the I/O.

Keys of a group G, all texts percent-encoded where an outsider chose them:
    /dfkv/1/G/cluster/node/ID       an encoded view of one node, under the node's lease
    /dfkv/1/G/cluster/drain/ID      the incarnation that an operator wants drained
    /dfkv/1/G/cluster/view          the published view; replaced only where it is what the writer has read
    /dfkv/1/G/consumer/REPLICA/NAME who holds a subscription at that replica, under the replica's lease
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from dfkv_core.membership.view import NodeEntry, View

T = TypeVar("T")
Steps = Generator["Command", Any, T]
"""A computation that asks etcd: it yields commands, is sent their results, and gets StoreError thrown in."""


class StoreError(Exception):
    """etcd did not do it: out of reach, too late, or it refused. Whether a write took place is not known."""


@dataclass(frozen=True)
class Held:
    """A registration. revision: etcd's, of its last change."""

    entry: NodeEntry
    lease: int
    revision: int


@dataclass(frozen=True)
class Snapshot:
    """The keys of the cluster at one moment."""

    nodes: Mapping[str, Held] = field(default_factory=dict)
    drained: Mapping[str, int] = field(default_factory=dict)
    view: View | None = None
    view_revision: int = 0
    """etcd's revision of the view's key; 0: there is none."""
    epoch: int = 0
    """Another one: etcd was restored, and may have lost what it had at the last look."""


@dataclass(frozen=True)
class Command:
    """Base of all. Each says in its docstring what it results in."""


@dataclass(frozen=True)
class Read(Command):
    """Snapshot."""


@dataclass(frozen=True)
class Grant(Command):
    """int: a new lease."""

    ttl_s: int


@dataclass(frozen=True)
class KeepAlive(Command):
    """int: seconds the lease has now; 0: there is no such lease."""

    lease: int


@dataclass(frozen=True)
class GetNode(Command):
    """Held or None."""

    id: str


@dataclass(frozen=True)
class PutNode(Command):
    """bool: whether the key was at `revision` (0: absent) and is now this."""

    entry: NodeEntry
    lease: int
    revision: int


@dataclass(frozen=True)
class PutView(Command):
    """int: etcd's revision of the write; 0: the key was not at `revision` any more."""

    view: View
    revision: int


@dataclass(frozen=True)
class PutDrain(Command):
    """None. incarnation 0: takes the wish back."""

    id: str
    incarnation: int


@dataclass(frozen=True)
class DropDrain(Command):
    """None. Only the wish for that incarnation goes: another may have been put since."""

    id: str
    incarnation: int


@dataclass(frozen=True)
class Consumer:
    """Who uses the cache: one client with a subscription."""

    name: str
    address: str
    since_s: int
    """Seconds since the epoch."""


@dataclass(frozen=True)
class PutConsumer(Command):
    """None."""

    replica: str
    consumer: Consumer
    lease: int


@dataclass(frozen=True)
class DeleteConsumer(Command):
    """None."""

    replica: str
    name: str


@dataclass(frozen=True)
class ListConsumers(Command):
    """list of Consumer, by name."""


class Keys:
    """The keys of one group. The group's name has the form of a node id, so that it cannot escape its prefix."""

    def __init__(self, group: str) -> None:
        self.base = f"/dfkv/1/{group}/"
        self.cluster = self.base + "cluster/"
        self.nodes = self.cluster + "node/"
        self.drains = self.cluster + "drain/"
        self.view = self.cluster + "view"
        self.consumers = self.base + "consumer/"

    def node(self, node_id: str) -> str:
        return self.nodes + escape(node_id)

    def drain(self, node_id: str) -> str:
        return self.drains + escape(node_id)

    def consumer(self, replica: str, name: str) -> str:
        return f"{self.consumers}{escape(replica)}/{escape(name)}"


def escape(text: str) -> str:
    """Any text as one level of a key."""
    return quote(text, safe="")


def unescape(level: str) -> str:
    return unquote(level)
