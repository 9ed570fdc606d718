"""`dfkv mds --metrics-port`: what a membership service counts, and that it is told while etcd is away."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from pathlib import Path

from dfkv_core.membership.wire import Connection
from tests.integration.serve_process import dfkv, serving


def _scrape(address: str) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as reply:
        lines = reply.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


async def _connect(address: str) -> None:
    host, port = address.rsplit(":", 1)
    connection = await Connection.open(host, int(port), secret=None, group="", timeout_s=5)
    await connection.close()


def test_a_service_without_etcd_says_so_in_its_metrics(tmp_path: Path) -> None:
    options = ("--etcd", "127.0.0.1:1", "--port", "0", "--metrics-port", "0")
    with serving(tmp_path / "mds.log", *options, name="mds") as service:
        asyncio.run(_connect(service.ready["address"]))
        deadline = time.monotonic() + 10
        while not (found := _scrape(service.ready["metrics_address"]))["dfkv_mds_etcd_failures_total"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert found["dfkv_mds_etcd_reachable"] == 0
        assert found["dfkv_mds_etcd_look_age_ms"] == -1
        assert found["dfkv_mds_connections_total"] == 1
        assert found['dfkv_mds_nodes{state="serving"}'] == 0
        time.sleep(0.2)  # the log line follows the counter
        log = (tmp_path / "mds.log").read_text()
        assert "WARNING dfkv.mds: etcd does not answer (127.0.0.1:1: " in log
        assert "there is no view until then" in log


def test_no_port_is_opened_unasked_and_none_beyond_loopback(tmp_path: Path) -> None:
    with serving(tmp_path / "mds.log", "--etcd", "127.0.0.1:1", "--port", "0", name="mds") as service:
        assert service.ready["metrics_address"] is None
    done = dfkv("mds", "--port", "0", "--metrics-port", "0", DFKV_MDS__METRICS_HOST="0.0.0.0")
    assert done.returncode == 2
    assert "metrics_host" in done.stderr
