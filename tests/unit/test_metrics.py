"""Every number of a node is exported once, under a described name."""

from __future__ import annotations

import urllib.request
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from dfkv_core.config import MdsConfig, load_config
from dfkv_core.mds.service import MembershipService
from dfkv_core.mds.store import Command
from dfkv_core.metrics import MetricsServer
from dfkv_core.metrics_table import MDS_TABLE, NODE_TABLE, is_described, locate

STATS = {
    "objects": 3,
    "evicted_objects": 5,
    "connections_total": 2,
    "requests_get": 7,
    "requests_put_ns": 1,
    "requests_busy": 4,
    "items_get_miss_not_found": 11,
    "items_exists_ok": 13,
    "frame_faults_crc": 1,
    "a_new_number": 17,
    "node_id": "not a number",
}


class _NoStore:
    async def run(self, command: Command) -> Any:
        raise AssertionError(command)

    async def close(self) -> None:
        pass


def scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as reply:
        return str(reply.read().decode())


def test_endpoint_exports_every_number() -> None:
    server = MetricsServer(lambda: STATS, "127.0.0.1", 0, table=NODE_TABLE, info={"node_id": "n-1"})
    try:
        text = scrape(server.address)
    finally:
        server.close()
        server.close()
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples[("dfkv_node_objects", ())] == 3
    assert samples[("dfkv_node_evicted_objects_total", ())] == 5
    assert samples[("dfkv_node_connections_total", ())] == 2
    assert samples[("dfkv_node_requests_total", (("op", "get"),))] == 7
    assert samples[("dfkv_node_requests_total", (("op", "put_ns"),))] == 1
    assert samples[("dfkv_node_requests_busy_total", ())] == 4
    assert samples[("dfkv_node_items_total", (("op", "get"), ("status", "miss_not_found")))] == 11
    assert samples[("dfkv_node_items_total", (("op", "exists"), ("status", "ok")))] == 13
    assert samples[("dfkv_node_frame_faults_total", (("fault", "crc"),))] == 1
    assert samples[("dfkv_node_a_new_number", ())] == 17
    info = [labels for name, labels in samples if name == "dfkv_node_info"]
    assert ("node_id", "n-1") in info[0]


def test_a_membership_service_has_metrics_of_its_own() -> None:
    service = MembershipService(load_config(MdsConfig, environ={}).value, _NoStore(), None)
    stats = service.stats()
    assert all(is_described(key, MDS_TABLE) for key in stats)
    assert set(MDS_TABLE.metrics) <= set(stats)
    server = MetricsServer(service.stats, "127.0.0.1", 0, table=MDS_TABLE, info={"group": "default"})
    try:
        text = scrape(server.address)
    finally:
        server.close()
    lines = text.splitlines()
    for line in (
        'dfkv_mds_nodes{state="serving"} 0.0',
        "dfkv_mds_connections_open 0.0",
        "dfkv_mds_connections_total 0.0",
        "dfkv_mds_etcd_reachable 0.0",
        "dfkv_mds_etcd_look_age_ms -1.0",
    ):
        assert line in lines, text
    assert 'group="default"' in next(line for line in lines if line.startswith("dfkv_mds_info"))


def test_undescribed_keys_are_told_apart() -> None:
    assert is_described("objects")
    assert is_described("requests_get")
    assert not is_described("a_new_number")
    assert locate("a_new_number").spec.kind == "gauge"
