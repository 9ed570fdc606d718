"""The membership service as one object: a listening socket, a clock, and steps that run on etcd.

Any number of them may run before one etcd; all that they share is there. Everything is on one event loop, and no request
waits for another's call to etcd.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
import time
from typing import Any, Protocol, TypeVar

from dfkv_core.config import MdsConfig, is_loopback
from dfkv_core.config_values import join_address
from dfkv_core.mds import registry
from dfkv_core.mds.guard import GuardPolicy
from dfkv_core.mds.registry import Accepted, Answer, Busy, Moment, Replica
from dfkv_core.mds.session import Session
from dfkv_core.mds.store import (
    Command,
    Consumer,
    DeleteConsumer,
    Grant,
    KeepAlive,
    ListConsumers,
    PutConsumer,
    Steps,
    StoreError,
)
from dfkv_core.membership.view import NodeEntry, NodeState, View

T = TypeVar("T")
SILENCE_S = 5.0
FIRST_VIEW_S = 2.0
STOP_S = 5.0
CONSUMER_SYNC_S = 2.0
MOST_CHANGES_LOGGED = 20
MAX_NODES = 2000
"""With MAX_ENTRY_BYTES of session.py, what fits in one frame."""

_log = logging.getLogger("dfkv.mds")


class Store(Protocol):
    """Runs commands; dfkv_core.mds.etcd.EtcdStore is the real one."""

    async def run(self, command: Command) -> Any: ...
    async def close(self) -> None: ...


class MembershipService:
    """start() and stop() once each; everything on one event loop."""

    def __init__(self, config: MdsConfig, store: Store, secret: bytes | None) -> None:
        self.group = config.group
        self.secret = secret
        self.ttl_s = config.ttl_s
        self.replica_id = ""
        self.listens_beyond_loopback = not is_loopback(config.host)
        self.counters = dict.fromkeys(
            (
                *("heartbeats", "refused", "views", "etcd_failures"),
                *("connections_total", "connections_refused", "connections_shed"),
            ),
            0,
        )
        self._config = config
        self._policy = GuardPolicy(ttl_s=float(config.ttl_s))
        self._store = store
        self._replica = Replica.fresh(time.monotonic())
        self._encoded = b""
        self._changed = asyncio.Event()
        self._nudged = asyncio.Event()
        self._etcd_error: str | None = "not asked yet"
        self._said_away = False
        self._consumers: dict[str, tuple[Consumer, int]] = {}
        self._server: asyncio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._sessions: set[asyncio.Task[Any]] = set()
        self._strangers: dict[asyncio.Task[Any], None] = {}
        """Sessions that have not introduced themselves, the oldest first."""

    async def start(self) -> str:
        """Listens and begins to read etcd. Returns the address. Raises OSError."""
        self._server = await asyncio.start_server(self._accept, self._config.host, self._config.port, backlog=1024)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.replica_id = f"mds-{os.urandom(6).hex()}"
        self._tasks = [asyncio.ensure_future(self._tick_always()), asyncio.ensure_future(self._sync_consumers())]
        return join_address(host, port)

    async def stop(self) -> None:
        """Closes every connection and ends every task. Idempotent."""
        if self._server is not None:
            self._server.close()
        left: set[asyncio.Task[Any]] = {*self._tasks, *self._sessions}
        deadline = time.monotonic() + STOP_S
        # Up to Python 3.11 a wait that ends just then loses the cancellation: whoever goes on is told again.
        while left and time.monotonic() < deadline:
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=0.2)
        await self._store.close()

    async def run(self, steps: Steps[T]) -> T:
        """Runs a computation of registry.py. Raises StoreError."""
        try:
            command = next(steps)
            while True:
                try:
                    result = await self._store.run(command)
                except StoreError as error:
                    self.counters["etcd_failures"] += 1
                    command = steps.throw(error)
                else:
                    command = steps.send(result)
        except StopIteration as end:
            value: T = end.value
            return value

    def stats(self) -> dict[str, int]:
        """Counters and gauges (docs/metrics.md). From any thread, with up to MAX_NODES nodes' worth of work."""
        replica = self._replica
        nodes = replica.view.nodes if replica.view is not None else ()
        read_at_s = replica.read_at_s
        return {
            **self.counters,
            **{f"nodes_{state.name.lower()}": sum(node.state == state for node in nodes) for state in NodeState},
            "registered": len(replica.snapshot.nodes),
            "missing": len(replica.memory.missing_since_s),
            "view_revision": replica.view.revision if replica.view is not None else 0,
            "etcd_reachable": int(self._etcd_error is None),
            "etcd_look_age_ms": -1 if read_at_s is None else int((time.monotonic() - read_at_s) * 1000),
            "connections_open": len(self._sessions),
            "clients": len(self._consumers),
        }

    # ---- what sessions ask for

    async def heartbeat(self, entry: NodeEntry, lease: int) -> Answer:
        self.counters["heartbeats"] += 1
        known = self._replica.snapshot.nodes
        held = known.get(entry.id)
        if held is None and len(known) >= MAX_NODES:
            self.counters["refused"] += 1
            return Busy(f"group {self.group!r} has {len(known)} nodes, which is the most")
        recent = self._replica.known(time.monotonic(), SILENCE_S)
        answer = await self.run(registry.heartbeat(recent, entry, lease, self.ttl_s))
        if not isinstance(answer, Accepted):
            self.counters["refused"] += 1
        elif held is None or held.entry != entry:
            self._nudged.set()  # others shall learn of it at once
        return answer

    async def drain(self, node_id: str, undo: bool) -> bool:
        found = await self.run(registry.drain(node_id, undo))
        self._nudged.set()
        return found is not None

    async def view_after(self, revision: int, wait_s: float) -> bytes | None:
        """The view, once it is not of that revision any more; b"" when the time is over; None: there is none at all."""
        deadline = time.monotonic() + wait_s
        patience = time.monotonic() + min(wait_s, FIRST_VIEW_S)
        while True:
            view, changed = self._replica.view, self._changed
            if view is not None and view.revision != revision:
                return self._encoded
            left = (deadline if view is not None else patience) - time.monotonic()
            if left <= 0:
                return b"" if view is not None else None
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(changed.wait(), left)

    def why_no_view(self) -> str:
        if self._etcd_error is not None:
            return f"the membership service has no view: etcd: {self._etcd_error}"
        return f"no node of group {self.group!r} has registered yet"

    def node_ids(self) -> list[str]:
        return sorted(self._replica.snapshot.nodes)

    async def consumers(self) -> list[Consumer]:
        found: list[Consumer] = await self._store.run(ListConsumers())
        return found

    def consumer_came(self, name: str, address: str) -> None:
        consumer, count = self._consumers.get(name, (Consumer(name, address, int(time.time())), 0))
        self._consumers[name] = (consumer, count + 1)

    def consumer_left(self, name: str) -> None:
        consumer, count = self._consumers[name]
        if count > 1:
            self._consumers[name] = (consumer, count - 1)
        else:
            del self._consumers[name]

    # ---- what goes on by itself

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._sessions) >= self._config.max_connections:
            if not self._strangers:
                self.counters["connections_refused"] += 1
                writer.close()
                return
            # Whoever says nothing keeps nobody out.
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cancel()
            self.counters["connections_shed"] += 1
        self._sessions.add(task)
        self._strangers[task] = None
        self.counters["connections_total"] += 1
        _notice_dead_peers(writer.get_extra_info("socket"))
        try:
            await Session(self, reader, writer).run(lambda: self._strangers.pop(task, None))
        except asyncio.CancelledError:
            pass  # shed, or the service stops: asyncio would log it as an error
        finally:
            self._sessions.discard(task)
            self._strangers.pop(task, None)

    async def _tick_always(self) -> None:
        period_s = self._config.poll_ms / 1000
        while True:
            self._nudged.clear()
            try:
                await self._tick()
            except StoreError as error:
                if not self._said_away:
                    stands = "the last view stands" if self._replica.view is not None else "there is no view until then"
                    _log.warning("etcd does not answer (%s); %s", error, stands)
                self._etcd_error, self._said_away = str(error), True
            except Exception:
                # Whatever it is, the last view stands and the next round may do better.
                _log.exception("the view could not be made")
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._nudged.wait(), period_s)

    async def _tick(self) -> None:
        # Seconds first, so that a cluster made anew has the higher id.
        cluster_id = struct.pack(">Q", time.time_ns() // 1_000_000) + os.urandom(8)
        moment = Moment(time.monotonic(), time.time_ns() // 1_000_000, cluster_id)
        before = self._replica.view
        self._replica = await self.run(registry.tick(self._replica, moment, self._policy, SILENCE_S))
        if self._etcd_error is not None:
            _log.info("etcd answers")
            self._etcd_error, self._said_away = None, False
        view = self._replica.view
        if view is not None and view is not before and (before is None or view != before):
            self.counters["views"] += 1
            self._tell(before, view)

    def _tell(self, before: View | None, view: View) -> None:
        self._encoded = view.encode()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        _log.info("view %d of %d nodes: %s", view.revision, len(view.nodes), describe_change(before, view))

    async def _sync_consumers(self) -> None:
        """Keeps this replica's consumers in etcd, under a lease that ends with it."""
        lease, renewed_at = 0, 0.0
        written: dict[str, Consumer] = {}
        while True:
            await asyncio.sleep(CONSUMER_SYNC_S)
            wanted = {name: consumer for name, (consumer, _) in self._consumers.items()}
            try:
                if lease and time.monotonic() - renewed_at > self.ttl_s / 3:
                    if not await self._store.run(KeepAlive(lease)):
                        lease, written = 0, {}
                    renewed_at = time.monotonic()
                if wanted and not lease:
                    lease, renewed_at = await self._store.run(Grant(self.ttl_s)), time.monotonic()
                for name in [name for name in written if name not in wanted]:
                    await self._store.run(DeleteConsumer(self.replica_id, name))
                    del written[name]
                for name, consumer in wanted.items():
                    if written.get(name) != consumer:
                        await self._store.run(PutConsumer(self.replica_id, consumer, lease))
                        written[name] = consumer
            except StoreError:
                continue  # the next round tries again
            except Exception:
                _log.exception("clients could not be registered")


def describe_change(before: View | None, view: View) -> str:
    """What is new in a view, as one line of a log that stays short however many nodes there are."""
    old = {node.id: node for node in before.nodes} if before is not None else {}
    changes = []
    for node in view.nodes:
        known = old.pop(node.id, None)
        if known is None or known.state != node.state:
            changes.append(f"{node.id} {node.state.name.lower()}")
        elif known != node:
            changes.append(f"{node.id} {'restarted' if known.incarnation != node.incarnation else 'changed'}")
    changes += [f"{node_id} lost" for node_id in old]
    more = len(changes) - MOST_CHANGES_LOGGED
    shown = ", ".join(changes[:MOST_CHANGES_LOGGED]) or "no change"
    return f"{shown} and {more} more" if more > 0 else shown


def _notice_dead_peers(connection: socket.socket) -> None:
    """A machine that has lost power says nothing: the kernel asks it after half a minute."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
