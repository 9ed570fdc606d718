"""The same commands on a real etcd and on the simulator's model of it: what histories in virtual time stand on."""

from __future__ import annotations

import asyncio
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dfkv_core.config_values import split_address
from dfkv_core.mds import store
from dfkv_core.mds.etcd import EtcdStore
from dfkv_core.mds.store import Held, Snapshot
from dfkv_core.membership.view import NodeEntry, NodeState, View
from tests.integration.etcd_process import EtcdProcess
from tests.simulation.world import Etcd, World

COMMANDS = 600
IDS = ("a", "b.c", "d_e")


@dataclass
class Pair:
    """The real one and the model. Leases and revisions of one are known by those of the other."""

    real: EtcdStore
    model: Etcd
    leases: dict[int, int] = field(default_factory=lambda: {0: 0})
    revisions: dict[int, int] = field(default_factory=lambda: {0: 0})

    async def run(self, command: store.Command, real: store.Command | None = None) -> Any:
        """Runs it on both; asserts that they agree, and returns the model's result."""
        found, expected = await self.real.run(real or command), self.model.apply(command)
        assert self._plain(found, expected) == self._plain(expected, expected), command
        return expected

    def _plain(self, value: Any, expected: Any) -> Any:
        """`value` with leases and revisions of the model, as far as both have them."""
        real = value is not expected
        if isinstance(value, Held):
            if real and isinstance(expected, Held):
                self.revisions.setdefault(expected.revision, value.revision)
                assert self.revisions[expected.revision] == value.revision
                assert self.leases[expected.lease] == value.lease
            return value.entry
        if isinstance(value, Snapshot):
            theirs: Snapshot = expected
            if real:
                self.revisions.setdefault(theirs.view_revision, value.view_revision)
                assert self.revisions[theirs.view_revision] == value.view_revision
            nodes = {
                name: self._plain(held, theirs.nodes.get(name) if real else held) for name, held in value.nodes.items()
            }
            return nodes, value.drained, value.view
        return value


@pytest.mark.parametrize("seed", [random.SystemRandom().randrange(1 << 32)])
def test_the_model_of_etcd_is_like_etcd(tmp_path: Path, seed: int) -> None:
    etcd = EtcdProcess(tmp_path)
    try:
        asyncio.run(_compare(etcd, random.Random(seed)))
    finally:
        etcd.stop()


def test_an_etcd_that_lost_its_data_is_noticed(tmp_path: Path) -> None:
    etcd = EtcdProcess(tmp_path)
    try:
        asyncio.run(_lose_data(etcd, tmp_path / "data"))
    finally:
        etcd.stop()


async def _lose_data(etcd: EtcdProcess, data: Path) -> None:
    real = EtcdStore([split_address(etcd.address)], "lost", call_timeout_s=20)
    try:
        await real.run(store.PutDrain("a", 1))
        before = await real.run(store.Read())
        etcd.stop()
        etcd.start()
        # A restart alone loses nothing.
        assert await real.run(store.Read()) == before
        etcd.stop()
        shutil.rmtree(data)
        etcd.start()
        after = await real.run(store.Read())
        assert after.drained == {}
        assert after.epoch != before.epoch
    finally:
        await real.close()


async def _compare(etcd: EtcdProcess, chance: random.Random) -> None:
    pair = Pair(EtcdStore([split_address(etcd.address)], "model", call_timeout_s=20), Etcd(World(1)))
    try:
        for number in range(COMMANDS):
            await _step(pair, chance, number)
    finally:
        await pair.real.close()


async def _step(pair: Pair, chance: random.Random, number: int) -> None:
    node_id = chance.choice(IDS)
    lease = chance.choice(list(pair.leases))
    known = pair.model.nodes.get(node_id)
    fresh = known.revision if known is not None else 0
    revision = chance.choice([fresh, fresh, *list(pair.revisions)[-3:]])
    kind = chance.randrange(9)
    if kind == 0 and len(pair.leases) < 5:
        granted, expected = await pair.real.run(store.Grant(600)), pair.model.apply(store.Grant(600))
        pair.leases[expected] = granted
    elif kind == 1 and lease:
        await pair.run(store.KeepAlive(lease), store.KeepAlive(pair.leases[lease]))
    elif kind in (2, 3) and lease:
        entry = NodeEntry(node_id, (f"h:{1 + number}",), number, state=chance.choice(list(NodeState)))
        real = store.PutNode(entry, pair.leases[lease], pair.revisions[revision])
        await pair.run(store.PutNode(entry, lease, revision), real)
    elif kind == 4:
        view = View(bytes(16), number, (NodeEntry(node_id, ("h:1",), number),))
        revision = chance.choice([pair.model.view_revision, revision])
        found = await pair.real.run(store.PutView(view, pair.revisions[revision]))
        expected = pair.model.apply(store.PutView(view, revision))
        assert bool(found) == bool(expected)
    elif kind == 5:
        await pair.run(store.PutDrain(node_id, chance.choice((0, 1, 2))))
    elif kind == 6:
        await pair.run(store.DropDrain(node_id, chance.choice((1, 2))))
    elif kind == 7:
        await pair.run(store.GetNode(node_id))
    await pair.run(store.GetNode(node_id))
    await pair.run(store.Read())
