"""What each number of a node's and a membership service's stats() means. The metrics endpoints, `dfkv stat` and
docs/metrics.md are made from this."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Spec(NamedTuple):
    """How one number, or a family of numbers that differ in labels, is shown."""

    kind: str  # "counter" or "gauge"
    help: str
    labels: tuple[str, ...] = ()


class Table(NamedTuple):
    """families: by the prefix of their keys; what follows the prefix is split into the labels."""

    prefix: str
    metrics: Mapping[str, Spec]
    families: Mapping[str, Spec]


class Place(NamedTuple):
    """Where a key of stats() belongs: the family, its description, and the values of its labels."""

    family: str
    spec: Spec
    labels: tuple[str, ...]


def _counter(text: str, *labels: str) -> Spec:
    return Spec("counter", text, labels)


def _gauge(text: str, *labels: str) -> Spec:
    return Spec("gauge", text, labels)


_NODE_METRICS = {
    "capacity_bytes": _gauge("Memory that the store may fill."),
    "used_bytes": _gauge("Memory in whole slots that are not free."),
    "stored_bytes": _gauge("Payload of live objects."),
    "objects": _gauge("Live objects: parts of chunks."),
    "chunks": _gauge("Live chunks."),
    "namespaces": _gauge("Namespaces known."),
    "pins": _gauge("Objects pinned by transfers and leases; 0 at rest."),
    "leases": _gauge("Leases held by lookups."),
    "leased_bytes": _gauge("Bytes that leases keep from eviction."),
    "filling": _gauge("Slots being written."),
    "condemned": _gauge("Slots evicted or removed while pinned; freed by the last unpin."),
    "evicted_objects": _counter("Objects evicted from memory to make room; with disks, most are still there."),
    "evicted_bytes": _counter("Payload of objects evicted from memory."),
    "put_already": _counter("Objects offered that were there already."),
    "put_refused": _counter("Objects offered and not taken."),
    "disk_directories": _gauge("Directories on disk; absent, like all of disk_*, where objects are in memory only."),
    "disk_directories_failing": _gauge("Directories that take no writes now: full, read-only or failing."),
    "disk_capacity_bytes": _gauge("Disk space that the directories may fill."),
    "disk_used_bytes": _gauge("Disk space in whole slots that are not free."),
    "disk_bound_bytes": _gauge("Disk space in slots, free ones included, of extents that have a size class."),
    "disk_quarantined_bytes": _gauge("Disk space in slots that were found corrupt and are out of use."),
    "disk_objects": _gauge("Live objects on disk."),
    "disk_quarantined": _gauge("Slots on disk that were found corrupt and are out of use until the next start."),
    "disk_pins": _gauge("Slots on disk pinned by reads; 0 at rest."),
    "disk_leased_bytes": _gauge("Bytes on disk that leases keep from eviction."),
    "disk_reads": _counter("Objects read from disk."),
    "disk_writes": _counter("Objects written to disk."),
    "disk_read_bytes": _counter("Payload read from disk."),
    "disk_written_bytes": _counter("Payload written to disk."),
    "disk_read_errors": _counter("Reads that a disk refused."),
    "disk_write_errors": _counter("Writes and syncs that a disk refused."),
    "disk_corrupt": _counter("Objects on disk that were not what they should be: a miss, and the slot is quarantined."),
    "disk_evicted_objects": _counter("Objects evicted from disk to make room."),
    "disk_evicted_bytes": _counter("Slots of objects evicted from disk."),
    "disk_lost_writes": _counter("Objects that no disk took: they are in memory only."),
    "disk_joined_reads": _counter("Reads that were served by another one's read from disk."),
    "disk_promoted": _counter("Objects that were read from disk more than once and stay in memory."),
    "dirty_objects": _gauge("Objects in memory that are not on disk yet."),
    "dirty_bytes": _gauge("Memory of objects that are not on disk yet."),
    "meta_faults": _counter("Requests refused because their meta could not be read."),
    "protocol_faults": _counter("Connections closed for frames that make no sense."),
    "bytes_in": _counter("Bytes received, frames included."),
    "bytes_out": _counter("Bytes sent, frames included."),
    "payload_bytes_in": _counter("Payload received."),
    "payload_bytes_out": _counter("Payload sent."),
    "payload_copied_bytes": _counter("Payload copied in user space; 0 on bulk connections."),
    "payload_drained_bytes": _counter("Payload received and thrown away."),
    "connections_open": _gauge("Connections open now."),
    "connections_total": _counter("Connections accepted."),
    "connections_refused": _counter("Connections refused because max_connections was reached."),
    "connections_shed": _counter(
        "Connections closed before they had introduced themselves, to make room for newer ones."
    ),
    "handshake_failures": _counter("Connections that did not introduce themselves properly."),
    "auth_failures": _counter("Connections with a wrong secret, or none."),
    "handshake_timeouts": _counter("Connections that took longer than handshake_timeout_ms to introduce themselves."),
    "stalls": _counter("Connections closed because a transfer made no progress for stall_timeout_ms."),
    "requests_busy": _counter("Requests refused because too many were under way, on their connection or in all."),
    "put_waits": _counter("Objects offered that had to wait for memory, their connection with them."),
    "request_bytes": _gauge("Memory that requests under way share beyond what each connection has for itself."),
    "queue_us": _counter("Microseconds between the arrival of reads and their first item, added up."),
    "queue_waits": _counter("Reads that queue_us adds up."),
    "cancelled": _counter("Requests ended by their client."),
}

_NODE_FAMILIES = {
    "requests": _counter("Requests by operation.", "op"),
    "items": _counter("Items (chunks of exists, objects otherwise) by operation and status.", "op", "status"),
    "frame_faults": _counter("Connections closed for a frame that is not sound, by fault.", "fault"),
}


_MDS_METRICS = {
    "connections_open": _gauge("Connections open now."),
    "connections_total": _counter("Connections accepted."),
    "connections_refused": _counter("Connections refused because max_connections was reached."),
    "connections_shed": _counter(
        "Connections closed before they had introduced themselves, to make room for newer ones."
    ),
    "clients": _gauge("Clients of this replica, by name, that follow its views."),
    "heartbeats": _counter("Heartbeats of nodes."),
    "refused": _counter("Heartbeats refused: another holds the id or is registering it, or the group is full."),
    "registered": _gauge("Nodes that etcd had at the last look."),
    "missing": _gauge("Nodes that the view lists although etcd has lost them: their loss is not believed yet."),
    "view_revision": _gauge("Revision of the view that is told; 0: there is none."),
    "views": _counter("Views told."),
    "etcd_reachable": _gauge("1 where the last look at etcd succeeded, else 0; then the last view stands."),
    "etcd_look_age_ms": _gauge("Milliseconds since etcd was last read; -1: never."),
    "etcd_failures": _counter("Calls to etcd that failed at every member that was tried."),
}

_MDS_FAMILIES = {"nodes": _gauge("Nodes of the view that is told, by state.", "state")}

NODE_TABLE = Table("dfkv_node", _NODE_METRICS, _NODE_FAMILIES)
MDS_TABLE = Table("dfkv_mds", _MDS_METRICS, _MDS_FAMILIES)


def locate(key: str, table: Table = NODE_TABLE) -> Place:
    """The place of a key. One that is not described here becomes a gauge of its own, so that nothing is hidden."""
    spec = table.metrics.get(key)
    if spec is not None:
        return Place(key.removesuffix("_total"), spec, ())
    for prefix, family in table.families.items():
        if key.startswith(prefix + "_"):
            values = tuple(key[len(prefix) + 1 :].split("_", len(family.labels) - 1))
            if len(values) == len(family.labels):
                return Place(prefix, family, values)
    return Place(key, _gauge("Reported without a description."), ())


def is_described(key: str, table: Table = NODE_TABLE) -> bool:
    place = locate(key, table)
    return place.spec in table.metrics.values() or bool(place.labels)
