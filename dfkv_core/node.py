"""A cache node as one object: the native server and store, membership, and metrics, started and stopped together."""

from __future__ import annotations

import errno
import logging
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dfkv_core.config import NodeConfig, join_address, read_secret, split_address
from dfkv_core.config_values import exact_size, format_size
from dfkv_core.host import available_memory_bytes
from dfkv_core.membership import (
    EmbeddedMembership,
    Membership,
    MembershipError,
    NodeEntry,
    NodeState,
    StaticMembership,
    View,
)

if TYPE_CHECKING:
    from dfkv_core import _native
    from dfkv_core.metrics import MetricsServer

_log = logging.getLogger(__name__)
_WILDCARDS = {"0.0.0.0", "::", ""}  # noqa: S104 - compared with, not bound to


class NodeError(RuntimeError):
    """The node cannot start. `hint` says what to do about it."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(f"{message}; {hint}")
        self.message = message
        self.hint = hint


class CacheNode:
    """Owns everything of one node in this process. start() and stop() once each; the rest from any thread."""

    def __init__(self, config: NodeConfig, *, membership: Membership | None = None) -> None:
        """Does nothing yet. membership: made from the configuration unless one is given; the node closes it."""
        self.config = config
        self.node_id = config.effective_node_id()
        self._membership = membership
        self._native: _native.Node | None = None
        self._metrics: MetricsServer | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Binds, publishes the first view, serves. Raises NodeError or ConfigError; nothing is left running then."""
        if self._native is not None:
            raise RuntimeError("start() was called before")
        secret = read_secret(self.config.secret_file)
        _check_memory(self.config.ram_bytes)
        self._native = self._create(secret)
        for found in self._native.recovery():
            _log.info("%s: %d objects found in %.2f s", found["path"], found["objects"], found["seconds"])
            if found["remark"] or found["faulty"] or found["quarantined"]:
                _log.warning(
                    "%s: %s%d damaged records, %d slots that were found corrupt; `dfkv scrub` checks the rest",
                    found["path"],
                    f"{found['remark']}; " if found["remark"] else "",
                    found["faulty"],
                    found["quarantined"],
                )
        try:
            self._join()
            self._native.start()
            if self.config.metrics_port is not None:
                self._start_metrics(self.config.metrics_port)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> bool:
        """Announces leaving, closes every connection, writes what is dirty, joins the threads, within stop_timeout_ms.
        Idempotent.

        False: something was still running at the end of that time."""
        with self._lock:
            if self._metrics is not None:
                self._metrics.close()
                self._metrics = None
            if self._membership is not None:
                self._membership.close()
            if self._native is None:
                return True
            return self._native.stop(self.config.stop_timeout_ms)

    def drain(self) -> None:
        """Announces that this node is leaving: clients still read from it and write elsewhere."""
        if self._membership is not None:
            self._membership.set_state(NodeState.DRAINING)

    @property
    def port(self) -> int:
        return self._running().port

    @property
    def address(self) -> str:
        """What it listens on, "host:port"."""
        return join_address(self.config.host, self.port)

    @property
    def metrics_address(self) -> str | None:
        return self._metrics.address if self._metrics is not None else None

    def stats(self) -> dict[str, Any]:
        """Counters and gauges, O(1) in objects (docs/metrics.md)."""
        return self._running().stats()

    def recovery(self) -> list[dict[str, Any]]:
        """What each directory held at the start; empty in memory only (see dfkv_core/_native.pyi)."""
        return self._running().recovery()

    def view(self) -> View:
        if self._membership is None:
            raise RuntimeError("the node was not started")
        return self._membership.view()

    def __enter__(self) -> CacheNode:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _running(self) -> _native.Node:
        if self._native is None:
            raise RuntimeError("the node was not started")
        return self._native

    def _create(self, secret: bytes | None) -> _native.Node:
        from dfkv_core import _native

        config = self.config
        try:
            return _native.Node(
                host=config.host,
                port=config.port,
                ram_bytes=config.ram_bytes,
                ram_ahead_bytes=config.effective_ram_ahead_bytes(),
                node_id=self.node_id,
                secret=secret,
                threads=config.threads,
                max_connections=config.max_connections,
                max_object_bytes=config.max_object_bytes,
                max_leased_fraction=config.max_leased_fraction,
                handshake_timeout_ms=config.handshake_timeout_ms,
                stall_timeout_ms=config.stall_timeout_ms,
                insecure=config.insecure,
                directories=[str(path) for path in config.dirs],
                directory_bytes=config.capacity_bytes or 0,
            )
        except MemoryError:
            raise _memory_error(config.ram_bytes, available_memory_bytes()) from None
        except ValueError as error:
            raise NodeError(str(error), "`dfkv config node` shows what was asked for") from None
        except OSError as error:
            raise _listen_error(error, join_address(config.host, config.port), config.ram_bytes) from None

    def _join(self) -> None:
        native = self._running()
        if self._membership is None:
            self._membership = self._configured_membership()
        self._membership.subscribe(lambda view: native.set_view(view.encode()))
        entry = NodeEntry(
            id=self.node_id,
            tcp=(self._advertised(),),
            incarnation=native.incarnation,
            boot_id=native.boot_id,
            read_weight=self.config.weight,
            write_weight=self.config.weight,
            zone=self.config.zone,
        )
        try:
            self._membership.join(entry)
        except MembershipError as error:
            raise NodeError(error.message, error.hint) from None

    def _configured_membership(self) -> Membership:
        config = self.config
        if config.mds:
            from dfkv_core.membership.remote import MdsMembership

            services = [split_address(address) for address in config.mds]
            return MdsMembership(services, group=config.group, secret=read_secret(config.secret_file))
        peers = config.peer_addresses()
        return StaticMembership(peers, revision=config.peers_revision) if peers else EmbeddedMembership()

    def _advertised(self) -> str:
        if self.config.advertise:
            return self.config.advertise
        host = self.config.host
        if host in _WILDCARDS:
            # Clients cannot dial a wildcard: give them a name that other machines resolve.
            import socket

            host = socket.gethostname()
        return join_address(host, self.port)

    def _start_metrics(self, port: int) -> None:
        from dfkv_core.metrics import MetricsServer
        from dfkv_core.metrics_table import NODE_TABLE

        host = self.config.metrics_host
        try:
            self._metrics = MetricsServer(
                self._running().stats, host, port, table=NODE_TABLE, info={"node_id": self.node_id}
            )
        except OSError as error:
            raise NodeError(
                f"cannot serve metrics on {join_address(host, port)}: {error.strerror or error}",
                "choose another --metrics-port",
            ) from None


def _check_memory(ram_bytes: int) -> None:
    available = available_memory_bytes()
    if available is not None and ram_bytes > available:
        raise _memory_error(ram_bytes, available)


def _memory_error(ram_bytes: int, available: int | None) -> NodeError:
    found = "less" if available is None else f"{format_size(available)} of it"
    return NodeError(
        f"not enough memory: {exact_size(ram_bytes)} was asked for and {found} can be had",
        "give a smaller --ram (node.ram_bytes)",
    )


def _listen_error(error: OSError, address: str, ram_bytes: int) -> NodeError:
    if error.errno == errno.ENOMEM:
        return _memory_error(ram_bytes, available_memory_bytes())
    if error.errno == errno.EADDRINUSE:
        hint = "stop the process that holds it (ss -ltnp shows it) or choose another --port"
        return NodeError(f"{address} is in use", hint)
    if error.errno == errno.EADDRNOTAVAIL:
        return NodeError(f"{address} is not an address of this machine", "choose another --host")
    if error.errno in (errno.EACCES, errno.EPERM):
        return NodeError(f"listening on {address} is not allowed", "choose a --port above 1023")
    return NodeError(f"cannot listen on {address}: {error.strerror or error}", "check --host and --port")
