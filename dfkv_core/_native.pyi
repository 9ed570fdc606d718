"""Typed surface of the native module. Nothing here holds the GIL while it waits, hashes, copies or does I/O."""

from collections.abc import Callable, Sequence
from typing import Any, final

from typing_extensions import Buffer

# ---- formats (any thread) ----------------------------------------------------------------------

def crc32c(data: Buffer) -> int: ...
def xxh3_64(data: Buffer) -> int: ...
def sha256(data: Buffer) -> bytes: ...
def encode_frame_header(
    opcode: int, flags: int, request_id: int, item: int, meta_bytes: int, payload_bytes: int
) -> bytes: ...
def decode_frame_header(header: Buffer, max_meta_bytes: int, max_fragment_bytes: int) -> dict[str, int]:
    """Raises ValueError naming the fault (magic, major, crc, flags, meta_limit, payload_limit)."""

def namespace_id(descriptor: Buffer) -> bytes:
    """The 16-byte id. Raises ValueError for a descriptor that is not canonical."""

def opaque_block_id(algorithm: int, hash: Buffer, extras: Buffer) -> bytes: ...
def opaque_block_ids(algorithm: int, hashes: Buffer, hash_bytes: int) -> bytes:
    """The ids of joined hashes of `hash_bytes` each, without extras, 16 bytes each, joined. ValueError for a length that
    is no multiple. Releases the GIL while hashing where there are many."""

def encode_part(group: int, component: int, stage: int, cp_index: int, shard_index: int, shard_count: int) -> int: ...
def status_name(status: int) -> str: ...
def auth_mac(secret: Buffer, role: str, client_nonce: Buffer, server_nonce: Buffer, node_id: str) -> bytes: ...
def encode_slot_record(fields: dict[str, Any], store_uuid: bytes, slot: int) -> bytes:
    """Fields by their names in docs/formats.md ("namespace", "block", "stored_bytes", ...); absent ones are zero.
    Raises ValueError naming an unknown or bad field."""

def decode_slot_record(record: Buffer, store_uuid: bytes, slot: int) -> dict[str, Any]:
    """Raises ValueError naming the fault (crc, version, not_zero). 128 zero bytes are a free slot."""

def encode_view(view: dict[str, Any]) -> bytes:
    """view: cluster_id, revision, placement_rule, nodes (dicts: id, incarnation, boot_id, state as a number,
    read_weight, write_weight, zone, features, tcp, rdma, unix_path). Nodes are sorted by id, the digest is made.
    Raises ValueError naming an unknown or bad field."""

def decode_view(data: Buffer) -> dict[str, Any]:
    """The same dict with its digest. Raises ValueError where malformed, over a limit, or not what the digest says."""

@final
class BlockChain:
    """The own block chain (docs/formats.md). Not thread-safe: one owner at a time."""

    def __init__(self, tip: bytes | None = None) -> None: ...
    @property
    def tip(self) -> bytes: ...
    def append(self, tokens: Buffer, extras: Sequence[tuple[int, bytes]] = ()) -> bytes:
        """Appends one block of u32 tokens (a C-contiguous buffer of 4-byte items). Returns the 16-byte block id."""

    def append_blocks(self, tokens: Buffer, block_tokens: int, extras: Sequence[tuple[int, int, bytes]] = ()) -> bytes:
        """Appends len(tokens) // block_tokens whole blocks. extras: (block index in this call, tag, bytes).
        Returns the block ids, 16 bytes each, joined. Releases the GIL while hashing."""

# ---- routing -----------------------------------------------------------------------------------

@final
class Ring:
    """Slots filled by weighted rendezvous hashing; owner(route) is one array access."""

    def __init__(self, node_ids: Sequence[str], weights: Sequence[int]) -> None: ...
    def owner(self, route: int) -> int: ...
    def counts(self) -> list[int]:
        """Slots of each node; they add up to all of them."""

    def owners(self, routes: Buffer) -> bytes:
        """routes: u64 each. One little-endian u16 per route: the position in node_ids."""

# ---- node --------------------------------------------------------------------------------------

@final
class Node:
    """A cache node: RAM store, disks and TCP server on its own native threads."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        ram_bytes: int,
        ram_ahead_bytes: int = 0,
        node_id: str,
        secret: bytes | None = None,
        threads: int = 2,
        max_connections: int = 4096,
        max_object_bytes: int = 64 * 1024 * 1024,
        max_leased_fraction: float = 0.5,
        handshake_timeout_ms: int = 5000,
        stall_timeout_ms: int = 30000,
        insecure: bool = False,
        tenant: bytes | None = None,
        directories: Sequence[str] = (),
        directory_bytes: int = 0,
    ) -> None:
        """Maps the memory, opens the directories (each of directory_bytes), binds and listens. Port 0 takes a free one.

        Without a secret only loopback addresses are taken, unless `insecure` is given. `tenant`: the only one whose
        namespaces are accepted; None accepts any. Raises ValueError for a value out of range, a directory that cannot be
        used or an address that others reach without a secret, OSError when the address or (ENOMEM) the memory cannot
        be had."""

    @property
    def port(self) -> int: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def boot_id(self) -> bytes: ...
    def start(self) -> None: ...
    def stop(self, timeout_ms: int) -> bool:
        """Stops listening, closes connections, writes to the disks what is not there yet, joins threads. Idempotent.

        False: not all ended in time. What was not written by then is lost."""

    def set_view(self, view: bytes) -> None:
        """Publishes an encoded view to SUBSCRIBE; waiting subscribers are answered when its revision changed."""

    def stats(self) -> dict[str, Any]:
        """Counters and gauges, O(1) in objects; see docs/metrics.md."""

    def recovery(self) -> list[dict[str, Any]]:
        """What each directory held at the start: path, created, objects, dropped, faulty, quarantined, seconds, remark
        (empty, or what somebody should know)."""

    def namespaces(self) -> list[dict[str, Any]]: ...

# ---- directories on disk, while no node uses them -----------------------------------------------

def inspect_directory(path: str) -> dict[str, Any]:
    """What the table of slots holds: node_id, store, extent_bytes, extents, capacity_bytes, namespaces_found, objects,
    stored_bytes, slot_bytes, quarantined, faulty, namespaces, objects_by_slot_bytes. Reads only; without the GIL.

    Raises ValueError, which says what to do, when the directory holds no store that this version reads."""

def scrub_directory(path: str, progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Compares every object with its checksum: objects, bytes, corrupt, unreadable, total, faulty, remark.

    progress: called about once a second and at the end, on this thread; what it raises ends the scrub. The GIL is not
    held in between. Raises ValueError when the directory cannot be used."""

def bench_fill_table(path: str, objects: int, object_bytes: int) -> None:
    """Makes a store whose table holds that many objects, without their payload."""

def bench_recover_table(path: str, objects: int, object_bytes: int) -> dict[str, Any]:
    """Opens that store: objects, seconds, index_bytes (growth of this process), table_bytes read."""

@final
class StoreBench:
    """A store in an empty directory, for as many objects. Its methods run one at a time, without the GIL."""

    def __init__(self, path: str, object_bytes: int, objects: int, depth: int) -> None: ...
    def run(self, op: str, count: int) -> dict[str, Any]:
        """op: "put", of new objects, or "get", of random ones. seconds, bytes, failed, p50_us, p99_us."""

# ---- client ------------------------------------------------------------------------------------

@final
class Operation:
    """One batch in flight. Methods may be called from any thread.

    The caller's segments are read or written by the client's I/O thread until the operation is done; when done() is True
    (also after cancel() or the deadline) nothing touches them again. Dropping the last reference cancels and
    waits for that."""

    @property
    def kind(self) -> str: ...  # "exists" | "get" | "put" | "remove" | "erase" | "list" | "stat" | "ping" | "sync"
    def done(self) -> bool: ...
    def wait(self, timeout_ms: float) -> bool:
        """True when done. Releases the GIL."""

    def cancel(self) -> None:
        """Ends the operation now; unfinished keys get miss_cancelled. Returns once memory is detached (no GIL)."""

    def statuses(self) -> bytes:
        """One little-endian u16 per key (chunk for exists). Raises RuntimeError before done()."""

    @property
    def prefix(self) -> int:
        """exists: leading chunks whose required parts are all there, over all owners."""

    def leases(self) -> list[tuple[str, int]]:
        """exists with lease_ms: (node id, lease id)."""

    @property
    def view_revision(self) -> int: ...
    @property
    def payload_bytes(self) -> int: ...  # payload bytes of keys that ended well
    @property
    def elapsed_us(self) -> int: ...
    @property
    def round_trips(self) -> int: ...
    @property
    def result(self) -> Any:
        """What operations that ask every node came back with, by node id (None: no answer): list: a list of dicts;
        stat: a dict; erase: objects that went; ping: microseconds. Their statuses are one per node. None for the others."""

@final
class Client:
    """Connections to the cache nodes, driven by native I/O threads. Create it after fork. Methods from any thread."""

    def __init__(
        self,
        seeds: Sequence[tuple[str, int]],
        *,
        name: str = "",
        secret: bytes | None = None,
        connections_per_node: int = 2,
        connect_timeout_ms: int = 1000,
        cooldown_ms: int = 500,
        view_poll_ms: int = 10000,
        max_inflight_bytes: int = 1 << 30,
        max_pending_operations: int = 4096,
        last_view: bytes | None = None,
        last_view_path: str = "",
        group: str = "",
    ) -> None:
        """Starts threads and connects in the background; does not block on the network. last_view: taken when no seed
        answers. last_view_path: a file that keeps the last view for the next start; read here unless last_view is given.
        group: that a membership service among the seeds must keep; empty: any."""

    def close(self, timeout_ms: float = 2000) -> None:
        """Ends every operation, joins threads. Idempotent."""

    def wait_ready(self, timeout_ms: float) -> bool:
        """True once a first view was taken."""

    def add_namespace(self, descriptor: bytes, label: str = "") -> bytes:
        """Remembers a descriptor and registers it (PUT_NS) on every connection before other operations.
        Returns the 16-byte namespace id. Does not block."""

    def namespace_difference(self, namespace: bytes) -> list[int] | None:
        """Tags in which the nearest namespace of a node differs from this one; None until a node has answered."""

    # entries are packed as on the wire (docs/formats.md); chunks: n x {block 16, route 8};
    # items: n x {block 16, part 8, route 8, u32 length, u32 zero}; segments: m x {u64 address, u64 length};
    # counts: n x u32 segments per item. A segment with address 0 is skipped on get (bytes are verified and thrown away).
    def exists(
        self,
        namespace: bytes,
        chunks: bytes,
        parts: bytes,
        deadline_ms: float,
        lease_ms: int = 0,
        wait_ms: float = 0,  # waits that long for its end, which is quicker than a wait() that follows
    ) -> Operation: ...
    def get(
        self, namespace: bytes, items: bytes, segments: Buffer, counts: Buffer, deadline_ms: float
    ) -> Operation: ...
    def put(
        self,
        namespace: bytes,
        items: bytes,
        segments: Buffer,
        counts: Buffer,
        deadline_ms: float,
        replace: bool = False,
        recompute_us: int = 0,
        durable: bool = False,
    ) -> Operation: ...
    def remove(self, namespace: bytes, items: bytes, deadline_ms: float) -> Operation: ...
    def release(self, leases: Sequence[tuple[str, int]]) -> None:
        """Gives leases back; fire and forget."""

    def erase(self, namespace: bytes, deadline_ms: float) -> Operation: ...
    def list_namespaces(self, deadline_ms: float) -> Operation: ...
    def stat(self, deadline_ms: float) -> Operation: ...
    def ping(self, deadline_ms: float) -> Operation: ...
    def sync(self, deadline_ms: float) -> Operation: ...
    def view(self) -> bytes | None: ...
    def stats(self) -> dict[str, Any]: ...
    @property
    def completion_fd(self) -> int:
        """An eventfd that becomes readable when watched operations end (see watch)."""

    def watch(self, operation: Operation, token: int) -> None:
        """Asks for `token` from take_completed() once the operation is done."""

    def take_completed(self, timeout_ms: float = 0) -> list[int]: ...

# ---- simulator (dfkv plan) -----------------------------------------------------------------------

DEFAULT_EVICTION_POLICY: str
"""What stores use."""

def eviction_policies() -> list[str]: ...
def replay_policies() -> list[str]:
    """What replay() knows: the store's policies and the references lru-ref, lru-tail, belady and unbounded."""

@final
class Trace:
    """Requests as lists of block ids; an id stands for its whole prefix. Append from one thread, with no replay under
    way; replays of one trace may run at the same time."""

    def __init__(self) -> None: ...
    def append(self, block_counts: Buffer, block_ids: Buffer) -> None:
        """Requests in their order: n u32 counts, and as many u64 ids as they sum up to (else ValueError)."""

    @property
    def requests(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def unique_blocks(self) -> int: ...
    @property
    def conflicts(self) -> int:
        """Blocks that follow different blocks in different requests. Not 0: ids do not stand for whole prefixes."""

def replay(trace: Trace, policy: str, capacity_blocks: int) -> dict[str, Any]:
    """One node. hits: one u32 per request, in blocks; hit_blocks, written_blocks, evicted_blocks: their sums.
    Releases the GIL. Raises ValueError for an unknown policy or a capacity of 0."""

def replay_cluster(
    trace: Trace,
    *,
    nodes: int,
    capacity_blocks: int = 0,
    policy: str,
    run_blocks: int = 1,
    spread_blocks: int = 0,
    copy_after_reads: int = 0,
    copy_share: float = 0.0,
    lost_node: int | None = None,
    lost_at: int = 0,
) -> dict[str, Any]:
    """Several nodes (native/plan/cluster.h says what the options mean). hits as replay(); touched: nodes asked, summed
    over the requests; copied_blocks; nodes: held_blocks, copy_blocks, read_blocks, written_blocks of each.
    Releases the GIL. Raises ValueError for options out of range."""
