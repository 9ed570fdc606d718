"""`dfkv bench`: real nodes, real streams, figures that add up."""

from __future__ import annotations

import shutil

import pytest

from dfkv_core.bench import cold, wire
from dfkv_core.bench.ceilings import copy_gb_per_s
from dfkv_core.bench.contention import PingPong, repeated
from dfkv_core.bench.nodes import LocalNodes, NodeStartError
from dfkv_core.bench.workload import Batch
from tests.integration.serve_process import dfkv

pytestmark = pytest.mark.slow

SMALL = wire.Plan(sizes_bytes=(64 << 10,), batch=4, threads=(1, 2), nodes=(1, 2), repeats=1)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "RUN_S", 0.02)
    monkeypatch.setattr(wire, "EXISTS_CHUNKS", (32,))
    monkeypatch.setattr(wire, "LEAST_NODE_RAM_BYTES", 32 << 20)
    monkeypatch.setattr(wire, "BUSY_BYTES", 64 << 10)
    monkeypatch.setattr(cold, "LEAST_RAM_BYTES", 16 << 20)
    monkeypatch.setattr(wire, "copy_gb_per_s", lambda: copy_gb_per_s(64 << 20))


@pytest.mark.skipif(shutil.which("iperf3") is None, reason="iperf3, which gives the ceiling, is not installed")
def test_every_case_is_measured_beside_its_ceiling(short: None) -> None:
    told: list[str] = []
    report = wire.measure(SMALL, told.append)
    cases = {(row.case, row.op, row.threads, row.nodes) for row in report.rows}
    transfers = {("hot", op, threads, nodes) for op in ("put", "get") for threads in (1, 2) for nodes in (1, 2)}
    lookups = {
        (case, "exists", 1, nodes) for case in ("hot", "beside gets", "beside gets, no pause") for nodes in (1, 2)
    }
    disk = set() if shutil.which("fio") is None else {("cold", op, 1, 1) for op in ("put", "get")}
    assert cases == transfers | lookups | disk
    assert bool(report.left_out) == (not disk)
    for row in report.rows:
        assert 0 < row.p50_us <= row.p99_us
        if row.op != "exists":
            assert row.gb_per_s is not None
            assert row.gb_per_s > 0
            assert row.ceiling_gb_per_s is not None
            assert row.ceiling_gb_per_s > 0
    assert report.memcpy_gb_per_s > 0
    assert told[0] == "memcpy"
    # What the design promises of every batch: one call into the client, payload straight into the caller's memory.
    assert report.gil_acquisitions_per_batch <= 2
    assert report.gil_held_us_per_batch > 0
    assert report.node_copied_bytes == 0
    assert report.client_copied_bytes < report.payload_bytes / 100


def test_a_batch_that_is_not_stored_has_no_figure(short: None) -> None:
    from dfkv_core import _native
    from dfkv_core.bench.workload import DESCRIPTOR, OperationFailedError
    from dfkv_core.config_values import split_address

    with LocalNodes(1, 16 << 20) as nodes:
        client = _native.Client([split_address(nodes.addresses[0])], name="test")
        try:
            namespace = client.add_namespace(DESCRIPTOR.encode(), "test")
            with pytest.raises(OperationFailedError, match="statuses"):
                Batch(2, 4096).get(client, namespace)
        finally:
            client.close(1000)


def test_what_fails_in_the_background_comes_out() -> None:
    def fail() -> None:
        raise ValueError("as it should")

    with pytest.raises(ValueError, match="as it should"), repeated(fail):
        pass
    with PingPong() as peer:
        assert peer.round_trip() > 0


def test_nodes_that_cannot_start_are_said_so() -> None:
    with pytest.raises(NodeStartError), LocalNodes(1, 1 << 10):
        pass


def test_an_address_without_a_node_is_an_error_at_the_prompt() -> None:
    done = dfkv("bench", "--quick", "--repeats", "1", "--address", "127.0.0.1:9", timeout_s=60)
    assert done.returncode == 1
    assert "no node answers" in done.stderr or "iperf3 is not installed" in done.stderr
    assert "Traceback" not in done.stderr
