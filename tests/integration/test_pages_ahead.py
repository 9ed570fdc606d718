"""How much memory a real node takes for what it does not hold yet."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from dfkv_core.client import Client, Item
from dfkv_core.config import NodeConfig
from tests.integration.serve_process import serving
from tests.integration.test_serve import DESCRIPTOR
from tests.soak.worker import rss_bytes

MIB = 1 << 20
OVERHEAD_BYTES = 96 * MIB  # interpreter and library
OBJECT_BYTES = MIB
DEADLINE_S = 20.0


def node(**values: int) -> NodeConfig:
    return NodeConfig.model_validate(values)


def comes_true(condition: Callable[[], bool]) -> bool:
    until_s = time.monotonic() + DEADLINE_S
    while not condition() and time.monotonic() < until_s:
        time.sleep(0.02)
    return condition()


def test_a_node_takes_what_it_holds_and_what_it_keeps_ahead(tmp_path: Path) -> None:
    ahead, stored = 192 * MIB, 64 * MIB
    with serving(tmp_path / "serve.log", "--ram", "2GiB", DFKV_NODE__RAM_AHEAD_BYTES=str(ahead)) as running:
        assert comes_true(lambda: rss_bytes(running.process.pid) >= ahead)
        time.sleep(0.3)
        assert rss_bytes(running.process.pid) <= ahead + OVERHEAD_BYTES
        with Client.open([running.address], name="test") as client:
            namespace = client.add_namespace(DESCRIPTOR.encode(), "test")
            payload = bytes(OBJECT_BYTES)
            items = [Item(number.to_bytes(16, "little"), 0, payload) for number in range(stored // OBJECT_BYTES)]
            assert client.put(namespace, items, deadline_ms=1e4).ok
        assert comes_true(lambda: rss_bytes(running.process.pid) >= stored + ahead * 3 // 4)
        time.sleep(0.3)
        assert rss_bytes(running.process.pid) <= stored + ahead + OVERHEAD_BYTES


def test_a_node_told_to_keep_none_ahead_takes_what_it_holds(tmp_path: Path) -> None:
    with serving(tmp_path / "serve.log", "--ram", "2GiB", DFKV_NODE__RAM_AHEAD_BYTES="0") as running:
        time.sleep(0.5)
        assert rss_bytes(running.process.pid) <= OVERHEAD_BYTES


def test_unless_told_otherwise_a_node_keeps_an_eighth_ahead_and_no_more_than_512_mib() -> None:
    assert node(ram_bytes=64 * MIB).effective_ram_ahead_bytes() == 8 * MIB
    assert node(ram_bytes=64 << 30).effective_ram_ahead_bytes() == 512 * MIB
    assert node(ram_bytes=64 << 30, ram_ahead_bytes=64 << 30).effective_ram_ahead_bytes() == 64 << 30
    assert node(ram_bytes=64 << 30, ram_ahead_bytes=0).effective_ram_ahead_bytes() == 0
