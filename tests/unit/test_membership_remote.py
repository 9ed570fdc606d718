"""A node's side of a membership service, against the real service over the simulator's model of etcd."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from dfkv_core.config import MdsConfig, load_config
from dfkv_core.config_values import split_address
from dfkv_core.mds.registry import Answer, Busy
from dfkv_core.mds.service import MembershipService, describe_change
from dfkv_core.mds.store import Command, ListConsumers
from dfkv_core.membership import MembershipError, NodeEntry, NodeState, View, remote
from dfkv_core.membership.remote import MdsMembership
from dfkv_core.membership.wire import Flag, Frame, Hello, Opcode, encode
from tests.simulation.world import Etcd, World


class ModelStore:
    """One etcd, as the simulator has it, in real time."""

    def __init__(self) -> None:
        self.world = World(1)
        self.etcd = Etcd(self.world)

    async def run(self, command: Command) -> Any:
        self.world.now_s = time.monotonic()
        return [] if isinstance(command, ListConsumers) else self.etcd.apply(command)

    async def close(self) -> None:
        pass


class CountingService(MembershipService):
    asked = 0

    async def view_after(self, revision: int, wait_s: float) -> bytes | None:
        self.asked += 1
        return await super().view_after(revision, wait_s)


class Running:
    """A service on a thread of its own."""

    def __init__(self, secret: bytes | None = None, **flags: int) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        config = load_config(MdsConfig, flags={"port": 0, "poll_ms": 50, **flags}, environ={}).value
        self.service = CountingService(config, ModelStore(), secret)
        self.address = self._run(self.service.start())

    def _run(self, steps: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(steps, self.loop).result(10)

    def register(self, entry: NodeEntry) -> None:
        self._run(self.service.heartbeat(entry, 0))

    def close(self) -> None:
        self._run(self.service.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


@pytest.fixture
def running() -> Iterator[Running]:
    service = Running()
    yield service
    service.close()


@pytest.fixture
def membership(running: Running) -> Iterator[MdsMembership]:
    node = MdsMembership([split_address(running.address)], group="default")
    node.join(NodeEntry("a", ("127.0.0.1:1",), 7))
    yield node
    node.close()


def eventually(condition: Any, deadline_s: float = 10.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_service_that_is_behind_is_not_asked_all_the_time(running: Running, membership: MdsMembership) -> None:
    view = membership.view()
    later = View(view.cluster_id, view.revision + 10**9, view.nodes)
    # As from another replica, while this one is cut off from etcd.
    asyncio.run_coroutine_threadsafe(_take(membership, later), running.loop).result(10)
    assert membership.view() == later
    before = running.service.asked
    # A change that is older than what the node knows is told, and not taken.
    running.register(NodeEntry("b", ("127.0.0.1:2",), 8))
    eventually(lambda: running.service.asked > before)
    time.sleep(0.5)
    assert running.service.asked - before <= 3
    assert membership.view() == later


async def _take(membership: MdsMembership, view: View) -> None:
    membership._take(view)


def test_what_nobody_thought_of_ends_neither_heartbeats_nor_views(
    running: Running, membership: MdsMembership, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = 3

    def decode(data: bytes) -> View:
        nonlocal broken
        broken -= 1
        if broken >= 0:
            raise KeyError("a fault of this program")
        return original(data)

    original = View.decode
    monkeypatch.setattr(View, "decode", decode)
    revision = membership.view().revision
    running.register(NodeEntry("b", ("127.0.0.1:2",), 8))
    eventually(lambda: membership.view().revision > revision)
    assert broken < 0

    heartbeats = running.service.counters["heartbeats"]
    monkeypatch.setattr(remote, "accepted", lambda *_: 1 / 0)
    membership._nudge()
    eventually(lambda: running.service.counters["heartbeats"] >= heartbeats + 2)
    monkeypatch.undo()
    eventually(lambda: membership._beat.failures == 0)


def test_a_view_is_one_short_line_of_the_log() -> None:
    nodes = [NodeEntry(f"n{index:04}", ("h:1",), 1) for index in range(1000)]
    first = View(bytes(16), 1, tuple(nodes))
    line = describe_change(None, first)
    assert line.startswith("n0000 serving, n0001 serving, ")
    assert line.endswith(" and 980 more")
    changed = [replace(nodes[0], state=NodeState.DRAINING), replace(nodes[1], incarnation=2), *nodes[3:]]
    assert describe_change(first, View(bytes(16), 2, tuple(changed))) == "n0000 draining, n0001 restarted, n0002 lost"
    assert describe_change(first, View(bytes(16), 3, first.nodes)) == "no change"


def test_a_service_that_does_not_prove_the_secret_is_not_believed(running: Running) -> None:
    """Otherwise whoever listens at the address could make up the cluster."""
    node = MdsMembership([split_address(running.address)], group="default", secret=bytes(32))
    with pytest.raises(MembershipError, match="does not prove that it knows the secret"):
        node.join(NodeEntry("a", ("127.0.0.1:1",), 7))
    node.close()


@pytest.mark.parametrize("nonce", [5, b"short", "text", [1]])
def test_a_malformed_hello_is_refused_and_fills_no_log(nonce: Any, caplog: pytest.LogCaptureFixture) -> None:
    service = Running(secret=bytes(32))
    try:
        with socket.create_connection(split_address(service.address), timeout=5) as peer:
            peer.sendall(encode(Frame(Opcode.HELLO, Flag.END_OF_REQUEST, 0, {Hello.NONCE: nonce})))
            answer = b"".join(iter(lambda: peer.recv(4096), b""))
    finally:
        service.close()
    assert b"the nonce of HELLO has 16 bytes" in answer
    assert not caplog.records


def test_a_node_that_cannot_be_registered_yet_says_so_and_when_it_is(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def busy(entry: NodeEntry, lease: int) -> Answer:
        return Busy("etcd is out of breath")

    running.register(NodeEntry("b", ("127.0.0.1:2",), 8))
    monkeypatch.setattr(remote, "JOIN_S", 1.0)
    monkeypatch.setattr(running.service, "heartbeat", busy)
    caplog.set_level("INFO", "dfkv.membership")
    node = MdsMembership([split_address(running.address)], group="default")
    try:
        node.join(NodeEntry("a", ("127.0.0.1:1",), 7))
        assert [entry.id for entry in node.view().nodes] == ["b"]
        assert "not registered yet" in caplog.text
        assert "etcd is out of breath" in caplog.text
        monkeypatch.undo()
        eventually(lambda: [entry.id for entry in node.view().nodes] == ["a", "b"])
        eventually(lambda: "announced again" in caplog.text)
    finally:
        node.close()


def test_connections_that_say_nothing_keep_nobody_out(caplog: pytest.LogCaptureFixture) -> None:
    service = Running(max_connections=4)
    node = MdsMembership([split_address(service.address)], group="default")
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(socket.create_connection(split_address(service.address), timeout=5))
        eventually(lambda: service.service.stats()["connections_open"] == 4)
        node.join(NodeEntry("a", ("127.0.0.1:1",), 7))
        stats = service.service.stats()
        assert stats["connections_shed"] == 2  # one for its heartbeats, one for its view
        assert stats["connections_refused"] == 0
        for _ in range(2):
            stack.enter_context(socket.create_connection(split_address(service.address), timeout=5))
        eventually(lambda: service.service.stats()["connections_shed"] == 4)
        # Those that are known stay.
        assert service.service.stats()["connections_open"] == 4
        service.register(NodeEntry("b", ("127.0.0.1:2",), 8))
        eventually(lambda: len(node.view().nodes) == 2)
    node.close()
    service.close()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
