"""What each number of Node.stats() means. The metrics endpoint, `dfkv stat` and docs/metrics.md are made from this."""

from __future__ import annotations

from typing import NamedTuple


class Spec(NamedTuple):
    """How one number, or a family of numbers that differ in labels, is shown."""

    kind: str  # "counter" or "gauge"
    help: str
    labels: tuple[str, ...] = ()


class Place(NamedTuple):
    """Where a key of stats() belongs: the family, its description, and the values of its labels."""

    family: str
    spec: Spec
    labels: tuple[str, ...]


def _counter(text: str, *labels: str) -> Spec:
    return Spec("counter", text, labels)


def _gauge(text: str) -> Spec:
    return Spec("gauge", text)


NODE_METRICS: dict[str, Spec] = {
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

# Families by the prefix of their keys; what follows the prefix is split into the labels.
NODE_FAMILIES: dict[str, Spec] = {
    "requests": _counter("Requests by operation.", "op"),
    "items": _counter("Items (chunks of exists, objects otherwise) by operation and status.", "op", "status"),
    "frame_faults": _counter("Connections closed for a frame that is not sound, by fault.", "fault"),
}


def locate(key: str) -> Place:
    """The place of a key. One that is not described here becomes a gauge of its own, so that nothing is hidden."""
    spec = NODE_METRICS.get(key)
    if spec is not None:
        return Place(key.removesuffix("_total"), spec, ())
    for prefix, family in NODE_FAMILIES.items():
        if key.startswith(prefix + "_"):
            values = tuple(key[len(prefix) + 1 :].split("_", len(family.labels) - 1))
            if len(values) == len(family.labels):
                return Place(prefix, family, values)
    return Place(key, _gauge("Reported by the node without a description."), ())


def is_described(key: str) -> bool:
    place = locate(key)
    return place.spec in NODE_METRICS.values() or bool(place.labels)
