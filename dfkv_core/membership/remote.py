"""Membership of a node through a membership service: announced by heartbeats, its view followed by a long poll."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from dfkv_core.config_values import join_address
from dfkv_core.keys import Status
from dfkv_core.membership.base import LocalMembership, MembershipError
from dfkv_core.membership.beat import Beat, accepted, busy, failed, growing_pause_s, refused
from dfkv_core.membership.view import NodeEntry, NodeState, View
from dfkv_core.membership.wire import Ask, Connection, Opcode, RefusedError, Tell, WireError

JOIN_S = 4.5
CALL_S = 3.0
POLL_S = 10.0
LEAVE_S = 1.0

_log = logging.getLogger("dfkv.membership")


class MdsMembership(LocalMembership):
    """One thread with an event loop: a heartbeat every third of the lease, and a view that follows the service's.

    With every service away the last view stays, and the node goes on. Heartbeats never wait for the view's poll."""

    def __init__(self, services: Sequence[tuple[str, int]], *, group: str, secret: bytes | None = None) -> None:
        super().__init__()
        self._services = list(services)
        self._group = group
        self._secret = secret
        self._entry: NodeEntry | None = None
        self._beat = Beat(len(self._services))
        self._joined = threading.Event()
        self._fatal: MembershipError | None = None
        self._last_failure = "no answer yet"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._connection: Connection | None = None
        self._step: asyncio.Task[None] | None = None
        self._stopping = False
        self._thread: threading.Thread | None = None

    def join(self, entry: NodeEntry) -> None:
        """Returns once the node is registered and the first view is there. Raises MembershipError within five seconds.

        A service that has a view and cannot register the node now, for want of etcd, ends the wait too: heartbeats go on."""
        self._entry = entry
        self._thread = threading.Thread(target=self._run, name="dfkv-membership", daemon=True)
        self._thread.start()
        self._joined.wait(JOIN_S)
        if self._fatal is None and self._current() is None:
            where = ", ".join(join_address(*service) for service in self._services)
            self._fatal = MembershipError(
                f"no membership service answered in {JOIN_S} s ({self._last_failure})",
                f"check that `dfkv mds` runs at {where}, or name another with --mds",
            )
        if self._fatal is not None:
            self.close()
            raise self._fatal
        if not self._joined.is_set():
            reason = self._last_failure or "no answer yet"
            _log.warning("this node is not registered yet (%s); clients learn of it once it is", reason)
            self._joined.set()

    def set_state(self, state: NodeState) -> None:
        with self._lock:
            if self._entry is None:
                raise RuntimeError("set_state() before join()")
            self._entry = replace(self._entry, state=state)
        self._nudge()

    def close(self) -> None:
        if not self._stopping:
            self._stopping = True
            self._nudge(self._interrupt)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(LEAVE_S + CALL_S)
        super().close()

    def _current(self) -> View | None:
        with self._lock:
            return self._view

    def _nudge(self, then: Callable[[], None] = lambda: None) -> None:
        loop, wake = self._loop, self._wake
        if loop is not None and wake is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(wake.set)
                loop.call_soon_threadsafe(then)

    # ---- on the thread

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        follower = asyncio.ensure_future(self._follow())
        try:
            while not self._stopping and not self._beat.ended:
                self._wake.clear()
                self._step = asyncio.ensure_future(self._announce())
                await asyncio.wait([self._step])
                if self._step.cancelled():
                    break  # close() does not wait for an answer that may not come
                self._step.result()
                pause = max(0.0, self._beat.due_s - time.monotonic())
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), pause)
            await self._leave()
            while not self._stopping:
                await self._wake.wait()
                self._wake.clear()
        finally:
            follower.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await follower
            await self._hang_up()

    def _interrupt(self) -> None:
        if self._step is not None:
            self._step.cancel()

    async def _open(self, endpoint: int) -> Connection:
        host, port = self._services[endpoint]
        return await Connection.open(host, port, secret=self._secret, group=self._group, timeout_s=CALL_S)

    async def _announce(self) -> None:
        """One heartbeat, over the connection of the last one where it still stands."""
        endpoint = self._beat.endpoint
        missed = self._beat.failures > 0 and self._joined.is_set()
        try:
            self._connection = self._connection or await self._open(endpoint)
            await self._send(self._connection, CALL_S)
            self._last_failure = ""
            if missed:
                _log.info(
                    "membership service %s: this node is announced again", join_address(*self._services[endpoint])
                )
        except (WireError, RefusedError) as error:
            self._failed(endpoint, error)
            await self._hang_up()
        except Exception:
            # Whatever it is, the next heartbeat may do better, and without one the cluster forgets this node.
            _log.exception("a heartbeat failed")
            self._beat = failed(self._beat, time.monotonic())
            await self._hang_up()

    async def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _send(self, connection: Connection, timeout_s: float) -> None:
        with self._lock:
            entry = self._entry
        assert entry is not None
        payload = View(bytes(16), 0, (entry,)).encode()
        reply = await connection.ask(
            Opcode.ANNOUNCE, {Ask.LEASE_ID: self._beat.lease} if self._beat.lease else {}, payload, timeout_s=timeout_s
        )
        lease_s = reply.meta.get(Tell.LEASE_MS, 30_000) / 1000
        self._beat = accepted(self._beat, time.monotonic(), reply.meta.get(Tell.LEASE_ID, 0), lease_s)
        self._settle()

    def _failed(self, endpoint: int, error: WireError | RefusedError) -> None:
        host, port = self._services[endpoint]
        where = join_address(host, port)
        now = time.monotonic()
        if isinstance(error, RefusedError) and error.final:
            reason, hint = _explain(where, error)
            # Only the id's owner makes a service refuse a node that it knew; anything else may be mended.
            if error.status == Status.REFUSED_BAD_REQUEST or (len(self._services) == 1 and not self._joined.is_set()):
                if self._joined.is_set():
                    _log.error("%s; this node is announced no more", reason)
                self._fatal = MembershipError(reason, hint)
                self._beat = refused(self._beat)
                self._joined.set()
                return
            error = RefusedError(error.status, reason)
        reason = f"{where}: {error}"
        if not self._beat.failures and self._joined.is_set():
            _log.warning("membership service %s; going on with the last view", reason)
        self._last_failure = reason
        self._beat = busy(self._beat, now) if isinstance(error, RefusedError) else failed(self._beat, now)

    async def _leave(self) -> None:
        """Best effort: otherwise the lease ends by itself."""
        if self._connection is None or not self._beat.lease:
            return
        with self._lock:
            assert self._entry is not None
            self._entry = replace(self._entry, state=NodeState.GONE)
        with contextlib.suppress(WireError, RefusedError):
            await self._send(self._connection, LEAVE_S)

    async def _follow(self) -> None:
        """Takes every newer view, from whichever service answers."""
        endpoint, connection, failures = 0, None, 0
        told = 0  # by this service: one that is behind would answer a question about a later revision at once
        while True:
            try:
                connection = connection or await self._open(endpoint)
                meta: dict[int, int] = {Ask.KNOWN_REVISION: told, Ask.WAIT_MS: int(POLL_S * 1000)}
                reply = await connection.ask(Opcode.SUBSCRIBE, meta, timeout_s=POLL_S + CALL_S)
                if reply.payload:
                    view = View.decode(reply.payload)
                    told = view.revision
                    self._take(view)
                failures = 0
                continue
            except (WireError, RefusedError, ValueError):
                pass  # heartbeats say what is wrong with a service
            except Exception:
                _log.exception("the view could not be followed")
            if connection is not None:
                await connection.close()
            connection, endpoint, told = None, (endpoint + 1) % len(self._services), 0
            failures += 1
            await asyncio.sleep(growing_pause_s(0.1, failures))

    def _take(self, view: View) -> None:
        if view.follows(self._current()):
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._publish(lambda _: view)
            self._settle()

    def _settle(self) -> None:
        if self._beat.lease and self._current() is not None:
            self._joined.set()


def _explain(where: str, error: RefusedError) -> tuple[str, str]:
    if error.status == Status.REFUSED_UNSUPPORTED:
        return f"{where} is a cache node, not a membership service", "name the address of `dfkv mds` with --mds"
    if error.status == Status.REFUSED_UNAUTHENTICATED:
        return f"{where} refused this node: {error.reason}", "name the service's secret with --secret-file"
    return f"{where} refused this node: {error.reason}", "see --node-id, --group and --advertise"
