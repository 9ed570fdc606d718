"""A thousand nodes' heartbeats through one membership service: what they cost, and that nobody waits for a slow call."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dfkv_core.config import MdsConfig
from dfkv_core.config_values import split_address
from dfkv_core.mds import store
from dfkv_core.mds.etcd import EtcdStore
from dfkv_core.mds.service import MembershipService
from dfkv_core.membership.view import NodeEntry, View
from dfkv_core.membership.wire import Ask, Connection, Opcode, RefusedError, Tell
from tests.integration.etcd_process import EtcdProcess
from tests.integration.serve_process import serving

NODES = 1000
HEARTBEAT_S = 10.0

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    process = EtcdProcess(tmp_path_factory.mktemp("etcd"))
    yield process
    process.stop()


class SimulatedNode:
    """Registers, and renews when it is told to."""

    def __init__(self, number: int) -> None:
        self.entry = NodeEntry(f"node-{number}", (f"10.{number >> 8}.{number & 255}.1:7440",), 1)
        self.lease = 0
        self.connection: Connection | None = None

    async def beat(self, address: tuple[str, int]) -> float:
        """Seconds until the answer."""
        if self.connection is None:
            self.connection = await Connection.open(*address, secret=None, group="", timeout_s=20)
        started = time.monotonic()
        payload = View(bytes(16), 0, (self.entry,)).encode()
        for _ in range(10):
            try:
                reply = await self.connection.ask(Opcode.ANNOUNCE, {Ask.LEASE_ID: self.lease}, payload, timeout_s=20)
            except RefusedError as error:
                if error.final:
                    raise
                # etcd is out of breath: a node asks again.
                await asyncio.sleep(0.2)
                continue
            self.lease = reply.meta[Tell.LEASE_ID]
            return time.monotonic() - started
        raise AssertionError("busy ten times")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_thousand_nodes_take_a_small_part_of_a_core(etcd: EtcdProcess, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), hard), hard))
    options = ("--etcd", etcd.address, "--group", "thousand")
    with serving(tmp_path / "mds.log", *options, name="mds") as service:
        address = split_address(service.address)

        async def run() -> tuple[float, list[float], int]:
            nodes = [SimulatedNode(number) for number in range(NODES)]
            for start in range(0, NODES, 50):
                await asyncio.gather(*(node.beat(address) for node in nodes[start : start + 50]))
            await asyncio.sleep(2)  # the view with all of them is made
            watcher = await Connection.open(*address, secret=None, group="", timeout_s=5)
            view = await watcher.ask(Opcode.SUBSCRIBE, {Ask.WAIT_MS: 5000}, timeout_s=10)
            before, began = cpu_seconds(service.pid), time.monotonic()

            async def in_turn(index: int) -> float:
                await asyncio.sleep(HEARTBEAT_S * index / NODES)
                return await nodes[index].beat(address)

            waits = await asyncio.gather(*(in_turn(index) for index in range(NODES)))
            share = (cpu_seconds(service.pid) - before) / (time.monotonic() - began)
            for node in nodes:
                assert node.connection is not None
                await node.connection.close()
            await watcher.close()
            return share, list(waits), len(View.decode(view.payload).nodes)

        share, waits, listed = asyncio.run(run())
    print(f"{share:.1%} of a core; an answer took {sorted(waits)[NODES // 2] * 1000:.1f} ms in the middle")
    assert listed == NODES
    assert share < 0.20  # it is under 0.10 where nothing else runs: seconds of CPU grow with what shares the core


class SlowFor:
    """A real store whose calls for one node take their time."""

    def __init__(self, inner: EtcdStore, node_id: str, delay_s: float) -> None:
        self._inner, self._id, self._delay_s = inner, node_id, delay_s

    async def run(self, command: store.Command) -> Any:
        if isinstance(command, store.GetNode) and command.id == self._id:
            await asyncio.sleep(self._delay_s)
        return await self._inner.run(command)

    async def close(self) -> None:
        await self._inner.close()


def test_a_slow_call_to_etcd_holds_up_nobody_else(etcd: EtcdProcess) -> None:
    delay_s = 2.0

    async def run() -> tuple[float, list[float]]:
        config = MdsConfig.model_validate({"port": 0, "etcd": etcd.address, "group": "slow"})
        inner = EtcdStore([split_address(etcd.address)], "slow")
        service = MembershipService(config, SlowFor(inner, "node-0", delay_s), None)
        address = split_address(await service.start())
        try:
            nodes = [SimulatedNode(number) for number in range(40)]
            slow = asyncio.ensure_future(nodes[0].beat(address))
            quick: list[float] = []
            while not slow.done():
                quick += await asyncio.gather(*(node.beat(address) for node in nodes[1:]))
                await asyncio.sleep(0.1)
            return await slow, quick
        finally:
            await service.stop()

    slow_s, quick = asyncio.run(run())
    assert slow_s >= delay_s
    assert len(quick) >= 39
    # All of them together took less than the one: none waited for it.
    assert max(quick) < delay_s / 2
