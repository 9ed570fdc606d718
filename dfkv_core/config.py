"""The typed configuration of each process, and load_config() that fills it.

Sources, weakest first: /etc/dfkv/dfkv.toml, ~/.config/dfkv/dfkv.toml (both replaced by the file of --config or
DFKV_CONFIG), environment variables DFKV_SECTION__FIELD, then flags or the engine's extra-config JSON. Unknown
keys are errors. Records are immutable.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from dfkv_core.bounded import MAX_SECRET_BYTES, TooLargeError, read_bytes
from dfkv_core.config_load import ConfigError, Loaded, Problem, Record, load_record
from dfkv_core.config_values import (
    DEFAULT_PORT,
    ETCD_PORT,
    MDS_PORT,
    AddressList,
    Count,
    EtcdAddressList,
    FilePath,
    MdsAddressList,
    PathList,
    Size,
    TextList,
    join_address,
    split_address,
)

__all__ = [
    "DEFAULT_PORT",
    "RECORDS",
    "ClientConfig",
    "ConfigError",
    "Loaded",
    "MdsConfig",
    "NodeConfig",
    "Problem",
    "Record",
    "VllmConnectorConfig",
    "is_loopback",
    "join_address",
    "load_config",
    "read_secret",
    "split_address",
]

_SIZE: dict[str, JsonValue] = {"size": True}
_SECRET: dict[str, JsonValue] = {"secret": True}
_NODE_ID = re.compile(r"^[A-Za-z0-9._-]{1,128}$")
_NAME = "1 to 128 letters, digits, '.', '_' or '-'"
DEFAULT_GROUP = "default"
MIN_SECRET_BYTES = 16
MOST_AHEAD_BYTES = 512 * 1024**2


class NodeConfig(Record):
    """A cache node (`dfkv serve`, `dfkv node`)."""

    sections: ClassVar[tuple[str, ...]] = ("node",)

    host: str = Field("127.0.0.1", description="Address to listen on. Other than loopback needs secret_file.")
    port: Count = Field(DEFAULT_PORT, ge=0, le=65535, description="TCP port to listen on; 0 takes a free one.")
    ram_bytes: Size = Field(4 * 1024**3, ge=1024**2, description="Memory for cached KV.", json_schema_extra=_SIZE)
    ram_ahead_bytes: Size | None = Field(
        None,
        ge=0,
        description="Memory that is made ready before it is stored to; 0: none; ram_bytes: all of it at the start. "
        "Unset: an eighth of ram_bytes, at most 512MiB.",
        json_schema_extra=_SIZE,
    )
    dirs: PathList = Field((), description="Directories for cached KV on disk. Empty: memory only.")
    capacity_bytes: Size | None = Field(
        None,
        ge=16 * 1024**2,
        le=8 * 1024**4,
        description="Space that each of dirs takes, reserved at the first start. It cannot be changed later.",
        json_schema_extra=_SIZE,
    )
    node_id: str = Field(
        "",
        description="Stable name of this node (letters, digits, . _ -); placement depends on it. "
        "Empty: host name and port.",
    )
    advertise: str = Field("", description="Address that clients are told, host:port. Empty: the address listened on.")
    peers: TextList = Field(
        (),
        description="Fixed list of all nodes, this one included, as id=host:port. Empty: this node alone.",
    )
    peers_revision: Count = Field(1, ge=1, description="Raise it whenever peers changes; the same on every node.")
    mds: MdsAddressList = Field((), description="Membership services to register with, host:port. Empty: none.")
    group: str = Field(DEFAULT_GROUP, description="Group of nodes that make up one cluster, with mds.")
    weight: Count = Field(
        100, ge=1, le=1_000_000, description="Share of the keys this node owns, relative to the others', with mds."
    )
    zone: str = Field("", max_length=128, description="Where the node is, for operators, with mds.")
    secret_file: FilePath | None = Field(
        None, description="File with the shared secret that clients must know (at least 16 bytes)."
    )
    insecure: bool = Field(
        False, description="Listen on a non-loopback address without a secret; serve metrics on one."
    )
    threads: Count = Field(
        2, ge=1, le=64, description="Threads that move payload; one more serves handshakes and lookups."
    )
    metrics_host: str = Field("127.0.0.1", description="Address of the Prometheus endpoint.")
    metrics_port: Count | None = Field(
        None, ge=0, le=65535, description="Port of the Prometheus endpoint; 0 takes a free one. Unset: none."
    )
    max_connections: Count = Field(4096, ge=1, le=65536, description="Connections served at once.")
    max_object_bytes: Size = Field(
        64 * 1024**2,
        ge=4096,
        le=2**31,
        description="Largest object (one part of one chunk) taken.",
        json_schema_extra=_SIZE,
    )
    max_leased_fraction: float = Field(
        0.5, gt=0, le=1, description="Share of ram_bytes that leases may hold against eviction."
    )
    handshake_timeout_ms: Count = Field(5000, ge=1, description="Time for a connection to introduce itself.")
    stall_timeout_ms: Count = Field(
        30000, ge=1, description="A connection that makes no progress for this long in a transfer is closed."
    )
    stop_timeout_ms: Count = Field(3000, ge=1, description="Time for a clean stop.")

    @model_validator(mode="after")
    def _check(self) -> NodeConfig:
        if self.node_id and not _NODE_ID.match(self.node_id):
            raise _invalid(f"node_id of {_NAME}, found {self.node_id[:150]!r}")
        _check_group(self.group)
        if not self.secret_file and not self.insecure and not is_loopback(self.host):
            raise _invalid(
                f"a secret_file when host is {self.host!r}, because anyone who reaches that address could read and "
                "poison the cache (or insecure = true on a network where that is acceptable)"
            )
        _check_metrics(self.metrics_host, self.metrics_port, self.insecure)
        if self.mds and self.peers:
            raise _invalid("either mds or peers: both say who is in the cluster")
        if self.advertise:
            try:
                split_address(self.advertise)
            except ValueError as error:
                raise _invalid(f"advertise to be {error}") from None
        self.peer_addresses()
        self._check_dirs()
        return self

    def _check_dirs(self) -> None:
        if self.dirs and self.capacity_bytes is None:
            raise _invalid("capacity_bytes (--capacity) with dirs: the space that each directory takes")
        if self.capacity_bytes is not None and not self.dirs:
            raise _invalid("dirs (--dir) with capacity_bytes; the size of the memory is ram_bytes")
        if len({path.absolute() for path in self.dirs}) != len(self.dirs):
            raise _invalid("dirs to be distinct")
        if self.dirs and self.port == 0 and not self.node_id:
            raise _invalid("a node_id with dirs and port 0, because what is on disk belongs to one node")

    def effective_node_id(self) -> str:
        """node_id, or host name and port (the process id where the port is chosen at start)."""
        if self.node_id:
            return self.node_id
        host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()) or "node"
        return f"{host[:96]}-{self.port or f'p{os.getpid()}'}"

    def effective_ram_ahead_bytes(self) -> int:
        if self.ram_ahead_bytes is None:
            return min(MOST_AHEAD_BYTES, self.ram_bytes // 8)
        return self.ram_ahead_bytes

    def peer_addresses(self) -> list[tuple[str, str]]:
        """peers as (id, "host:port")."""
        out = []
        for peer in self.peers:
            node_id, equals, address = peer.partition("=")
            try:
                if not equals or not _NODE_ID.match(node_id):
                    raise ValueError
                out.append((node_id, join_address(*split_address(address))))
            except ValueError:
                raise _invalid(f'peers as "id=host:port", not {peer!r}') from None
        ids = [node_id for node_id, _ in out]
        if len(set(ids)) != len(ids):
            raise _invalid("peers with distinct ids")
        if out and self.effective_node_id() not in ids:
            raise _invalid(f"peers to hold this node's own id {self.effective_node_id()!r}")
        return out


class MdsConfig(Record):
    """A membership service (`dfkv mds`)."""

    sections: ClassVar[tuple[str, ...]] = ("mds",)

    host: str = Field("127.0.0.1", description="Address to listen on. Other than loopback needs secret_file.")
    port: Count = Field(MDS_PORT, ge=0, le=65535, description="TCP port to listen on; 0 takes a free one.")
    etcd: EtcdAddressList = Field(
        (f"127.0.0.1:{ETCD_PORT}",), min_length=1, description="Members of the etcd cluster, host:port."
    )
    group: str = Field(DEFAULT_GROUP, description="Group of nodes that this service keeps.")
    secret_file: FilePath | None = Field(
        None, description="File with the shared secret that nodes and clients must know (at least 16 bytes)."
    )
    insecure: bool = Field(
        False, description="Listen on a non-loopback address without a secret; serve metrics on one."
    )
    metrics_host: str = Field("127.0.0.1", description="Address of the Prometheus endpoint.")
    metrics_port: Count | None = Field(
        None, ge=0, le=65535, description="Port of the Prometheus endpoint; 0 takes a free one. Unset: none."
    )
    ttl_s: Count = Field(
        30, ge=3, le=600, description="Time after which a silent node is gone; it reports three times as often."
    )
    poll_ms: Count = Field(1000, ge=50, le=10000, description="Time between two looks at etcd.")
    max_connections: Count = Field(16384, ge=1, le=65536, description="Connections served at once.")

    @model_validator(mode="after")
    def _check(self) -> MdsConfig:
        _check_group(self.group)
        if not self.secret_file and not self.insecure and not is_loopback(self.host):
            raise _invalid(
                f"a secret_file when host is {self.host!r}, because anyone who reaches that address could add nodes "
                "(or insecure = true on a network where that is acceptable)"
            )
        _check_metrics(self.metrics_host, self.metrics_port, self.insecure)
        return self


class ClientConfig(Record):
    """What every user of the cache needs: the connectors and the command line."""

    sections: ClassVar[tuple[str, ...]] = ("client",)

    addresses: AddressList = Field(
        (f"127.0.0.1:{DEFAULT_PORT}",),
        min_length=1,
        description="Nodes or membership services to ask first, host:port; they tell the client about the others.",
    )
    group: str = Field("", description="Group that a membership service must keep. Empty: whichever it keeps.")
    view_dir: str = Field(
        "",
        description="Directory that keeps the last view of the cluster for the next start. "
        "Empty: $XDG_STATE_HOME/dfkv, or ~/.local/state/dfkv.",
    )
    secret_file: FilePath | None = Field(None, description="File with the secret shared with the nodes.")
    name: str = Field("", max_length=128, description="Name shown to operators. Empty: host name and process id.")
    connections_per_node: Count = Field(
        2, ge=1, le=64, description="Bulk connections per node; with more than one, the first carries loads only."
    )
    connect_timeout_ms: Count = Field(1000, ge=1, description="Time for a connection and its handshake.")
    cooldown_ms: Count = Field(500, ge=0, description="Time a node is left alone after a transport failure.")
    lookup_deadline_ms: Count = Field(500, ge=1, description="Deadline of a lookup; past it the answer is a miss.")
    load_deadline_ms: Count = Field(10000, ge=1, description="Deadline of a load; past it the KV is recomputed.")
    save_deadline_ms: Count = Field(30000, ge=1, description="Deadline of a save; past it the KV is not stored.")
    lease_ms: Count = Field(
        30000,
        ge=0,
        description="Time that what a lookup found is kept from eviction for the load that follows.",
    )
    max_inflight_bytes: Size = Field(
        1024**3, ge=1024**2, description="Payload under way at once.", json_schema_extra=_SIZE
    )

    @property
    def seeds(self) -> list[tuple[str, int]]:
        """addresses as (host, port)."""
        return [split_address(address) for address in self.addresses]

    @property
    def last_view_path(self) -> str:
        """The file that keeps the last view of the cluster behind these addresses."""
        state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
        place = hashlib.sha256(repr((sorted(self.addresses), self.group)).encode()).hexdigest()[:24]
        return os.path.join(self.view_dir or os.path.join(state, "dfkv"), f"{place}.view")

    def effective_name(self) -> str:
        return self.name or f"{socket.gethostname()}:{os.getpid()}"[:128]

    def read_secret(self) -> bytes | None:
        """The secret, or None when none is configured. Raises ConfigError."""
        return read_secret(self.secret_file)


class EngineConfig(ClientConfig):
    """What every connector adds to the client's keys: whose KV it is, and what is logged."""

    weights_id: str = Field(
        "",
        description="Identity of the weights where their files cannot be read; it must change when they do.",
    )
    weights_digest: Literal["sampled", "full"] = Field(
        "sampled",
        description="sampled: headers and samples of every tensor. full: every byte, for weights edited by hand.",
    )
    fleet_salt: str = Field(
        "",
        description="Engines share KV only with engines of the same salt.",
        json_schema_extra=_SECRET,
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe message that is logged."
    )


class VllmConnectorConfig(EngineConfig):
    """The vLLM connector: every client key (from [client] or [vllm]) and its own."""

    sections: ClassVar[tuple[str, ...]] = ("client", "vllm")

    min_restore_tokens: Count = Field(0, ge=0, description="Shortest extra prefix worth restoring; less is computed.")
    save_generated: bool = Field(True, description="Save blocks of generated tokens too, not only of prompts.")
    chunk_bytes: Size = Field(
        256 * 1024,
        ge=4096,
        le=64 * 1024**2,
        description="A chunk is the fewest blocks that make a part this large. It is part of the identity: "
        "engines share only with the same value.",
        json_schema_extra=_SIZE,
    )
    granules: Count | None = Field(
        None,
        ge=1,
        le=255,
        description="Shards that attention KV heads are cut into, a multiple of the tensor parallel size. "
        "Unset: chosen from the model.",
    )


class SglangConnectorConfig(EngineConfig):
    """The SGLang connector: every client key (from [client] or [sglang]) and its own.

    SGLang joins the threads that call the connector within 10 s, so that no call may take longer than max_call_ms.
    """

    sections: ClassVar[tuple[str, ...]] = ("client", "sglang")

    load_deadline_ms: Count = Field(3000, ge=1, description="Deadline of one batch of pages; past it they are misses.")
    save_deadline_ms: Count = Field(
        3000, ge=1, description="Deadline of one batch of pages; past it they are not stored."
    )
    lease_ms: Count = Field(
        5000, ge=0, description="Time that what a lookup found is kept from eviction for the load that follows."
    )
    max_call_ms: Count = Field(
        5000, ge=100, le=6000, description="Longest that any call of SGLang waits, whatever the other deadlines say."
    )


class LmcacheConnectorConfig(EngineConfig):
    """The L2 adapter of LMCache's server: every client key (from [client] or [lmcache]) and its own.

    LMCache knows a model by its name alone: what its weights are is found on this machine, or weights_id says it.
    """

    sections: ClassVar[tuple[str, ...]] = ("client", "lmcache")

    lease_ms: Count = Field(
        30000,
        ge=1000,
        le=60000,
        description="Longest time that what a lookup locked is kept from eviction, where nobody unlocks it.",
    )
    kv_cache_dtype: str = Field(
        "",
        max_length=64,
        description="The engines' kv_cache_dtype. Needed where KV is kept in 8 bits, of which LMCache only tells the size.",
    )


class LmcacheClassicConfig(LmcacheConnectorConfig):
    """LMCache's classic mode, a remote backend inside the engine: every key of [client] and [lmcache], and its own."""

    sections: ClassVar[tuple[str, ...]] = ("client", "lmcache", "lmcache_classic")

    accept_short_hashes: bool = Field(
        False,
        description="Share chunks that LMCache names by the first 64 bits of vLLM's SHA-256. Whoever may send prompts can "
        "find two with the same 64 bits: only where every user is trusted.",
    )


RECORDS: dict[str, type[Record]] = {
    "node": NodeConfig,
    "mds": MdsConfig,
    "client": ClientConfig,
    "vllm": VllmConnectorConfig,
    "sglang": SglangConnectorConfig,
    "lmcache": LmcacheConnectorConfig,
    "lmcache_classic": LmcacheClassicConfig,
}
R = TypeVar("R", bound=Record)


def load_config(
    record: type[R],
    section: str | None = None,
    *,
    flags: Mapping[str, Any] | None = None,
    flags_source: str = "flags",
    environ: Mapping[str, str] | None = None,
    file: str | os.PathLike[str] | None = None,
) -> Loaded[R]:
    """Fills `record` from file < environment < flags. Call it once, at start.

    flags: keys of the record; None means "not given". An engine passes its extra-config JSON here and names it in
    flags_source. environ: os.environ by default. file: the file named on the command line; it must exist.
    section: the record's own by default; it only exists to be checked against the record.
    Raises ConfigError with every fault found: key, source, what was found, what is expected, the nearest key.
    """
    if section is not None and section != record.sections[-1]:
        raise ValueError(f"{record.__name__} is section {record.sections[-1]!r}, not {section!r}")
    return load_record(record, RECORDS, flags=flags, flags_source=flags_source, environ=environ, file=file)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. Names other than localhost count as not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_secret(path: Path | None) -> bytes | None:
    """The secret in a file, without a final line break; None without a path. Raises ConfigError."""
    if path is None:
        return None
    try:
        secret = read_bytes(path, MAX_SECRET_BYTES).removesuffix(b"\n").removesuffix(b"\r")
    except (OSError, TooLargeError) as error:
        found = (isinstance(error, OSError) and error.strerror) or str(error)
        raise ConfigError([Problem("secret_file", str(path), found, "a readable file with a secret")]) from None
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            [
                Problem(
                    "secret_file",
                    str(path),
                    f"{len(secret)} bytes",
                    f"at least {MIN_SECRET_BYTES} bytes, for example from: openssl rand -hex 32",
                )
            ]
        )
    return secret


def _check_group(group: str) -> None:
    if not _NODE_ID.match(group):
        raise _invalid(f"group of {_NAME}, found {group[:150]!r}")


def _check_metrics(host: str, port: int | None, insecure: bool) -> None:
    if port is not None and not insecure and not is_loopback(host):
        raise _invalid(
            f"insecure = true when metrics_host is {host!r}, because the endpoint asks nobody for a "
            "secret (or a loopback address, with a proxy of your own before it)"
        )


def _invalid(expected: str) -> PydanticCustomError:
    return PydanticCustomError("dfkv", "{expected}", {"expected": expected})
