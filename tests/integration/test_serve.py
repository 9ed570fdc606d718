"""`dfkv serve` as a real process: start, stop, refusals, and the commands that look at it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import statistics
import struct
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dfkv_core import _native
from dfkv_core.config import split_address
from dfkv_core.keys import route_of
from dfkv_core.membership import NodeState, View
from dfkv_core.metrics_table import is_described
from dfkv_core.namespace import Group, GroupKind, NamespaceDescriptor
from tests.integration.serve_process import ServeProcess, dfkv, serving

DEADLINE_MS = 5000.0
OBJECT_BYTES = 64 * 1024
# Ready in under a second is promised on an idle machine; the tests' own machine is often busy.
READY_S = 1.0
READY_MARGIN = 3.0

DESCRIPTOR = NamespaceDescriptor(
    engine_family="test",
    kv_format=1,
    weights_digest=bytes(32),
    config_digest=bytes(32),
    compute_dtype="bfloat16",
    kv_dtype="bfloat16",
    block_tokens=16,
    chunk_tokens=16,
    groups=(Group(kind=GroupKind.FULL_ATTENTION, window=0, heads=4, head_size=64),),
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServeProcess]:
    with serving(tmp_path / "serve.log", "--node-id", "n-1") as running:
        yield running


@contextlib.contextmanager
def client_of(server: ServeProcess, secret: bytes | None = None) -> Iterator[_native.Client]:
    client = _native.Client([split_address(server.address)], name="test", secret=secret)
    try:
        assert client.wait_ready(DEADLINE_MS)
        yield client
    finally:
        client.close()


def finished(operation: _native.Operation) -> _native.Operation:
    assert operation.wait(DEADLINE_MS + 2000)
    return operation


def store(client: _native.Client, blocks: list[bytes]) -> bytes:
    """Stores one object for each block; returns the namespace."""
    namespace = client.add_namespace(DESCRIPTOR.encode(), "tests/model")
    data = np.arange(len(blocks) * OBJECT_BYTES, dtype=np.uint64).astype(np.uint8)
    items = b"".join(struct.pack("<16sQQII", block, 0, route_of(block), OBJECT_BYTES, 0) for block in blocks)
    base = data.ctypes.data
    segments = b"".join(struct.pack("<QQ", base + i * OBJECT_BYTES, OBJECT_BYTES) for i in range(len(blocks)))
    counts = struct.pack(f"<{len(blocks)}I", *[1] * len(blocks))
    operation = finished(client.put(namespace, items, segments, counts, DEADLINE_MS))
    assert operation.statuses() == bytes(2 * len(blocks))
    return namespace


def test_ready_line_and_time(tmp_path: Path) -> None:
    times = []
    for turn in range(3):
        with serving(tmp_path / f"{turn}.log", "--node-id", "n-1") as server:
            ready = server.ready
            times.append(ready["ready_s"])
            assert server.stop()[0] == 0
    assert ready["event"] == "ready"
    assert ready["node_id"] == "n-1"
    assert ready["address"] == f"127.0.0.1:{ready['port']}"
    assert ready["ram_bytes"] == 64 << 20
    assert ready["metrics_address"] is None
    assert statistics.median(times) < READY_S * READY_MARGIN, times
    # The effective configuration is one line, before the first connection can come.
    log = (tmp_path / "0.log").read_text().splitlines()
    assert len(log) == 1
    assert "ram_bytes=64MiB (flags)" in log[0]
    assert "threads=2 (default)" in log[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_stop_it_cleanly_with_clients_connected(tmp_path: Path, number: signal.Signals) -> None:
    with serving(tmp_path / "serve.log") as server, client_of(server) as client:
        store(client, [bytes([i]) * 16 for i in range(4)])
        code, event = server.stop(number)
        assert code == 0
        assert event == {"event": "stopped", "signal": number.name, "clean": True, "stop_s": event["stop_s"]}
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(split_address(server.address), timeout=2)
    assert "Traceback" not in server.log.read_text()


def test_the_port_is_free_at_once_for_the_next_one(tmp_path: Path) -> None:
    with serving(tmp_path / "first.log") as first:
        port = str(first.ready["port"])
        with client_of(first):
            assert first.stop()[0] == 0
    with serving(tmp_path / "second.log", "--port", port) as second:
        assert second.ready["port"] == int(port)


def test_port_in_use(server: ServeProcess) -> None:
    done = dfkv("serve", "--port", str(server.ready["port"]), "--ram", "64MiB")
    assert done.returncode == 1
    assert f"127.0.0.1:{server.ready['port']} is in use" in done.stderr
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr


def test_another_address_needs_a_secret(tmp_path: Path) -> None:
    done = dfkv("serve", "--host", "0.0.0.0", "--port", "0", "--ram", "64MiB")
    assert done.returncode == 2
    assert "secret_file" in done.stderr
    with serving(tmp_path / "open.log", "--host", "0.0.0.0", "--insecure") as server:
        assert server.ready["address"].startswith("0.0.0.0:")


def listening(pid: int) -> set[str]:
    """Local addresses, in hex as the kernel gives them, that a process listens on."""
    sockets = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in sockets and (fields[3] == "0A" or table.startswith("udp")):
                found.add(fields[1].partition(":")[0])
    return found


def test_everything_listens_on_loopback_by_default(tmp_path: Path) -> None:
    with serving(tmp_path / "serve.log", "--metrics-port", "0") as server, client_of(server):
        assert listening(server.pid) == {"0100007F"}
    with serving(tmp_path / "open.log", "--host", "0.0.0.0", "--insecure") as server:
        assert listening(server.pid) == {"00000000"}, "this test sees other addresses too"


def test_metrics_on_another_address_are_meant(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef\n")
    done = dfkv(
        "serve", "--port", "0", "--metrics-port", "0", "--secret-file", str(secret), DFKV_NODE__METRICS_HOST="0.0.0.0"
    )
    assert done.returncode == 2
    assert "metrics_host" in done.stderr
    assert "insecure" in done.stderr
    with serving(
        tmp_path / "open.log", "--metrics-port", "0", "--insecure", DFKV_NODE__METRICS_HOST="0.0.0.0"
    ) as server:
        assert server.ready["metrics_address"].startswith("0.0.0.0:")


def test_a_secret_is_needed_where_one_is_set(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef\n")
    other = tmp_path / "other"
    other.write_text("fedcba9876543210\n")
    with serving(tmp_path / "serve.log", "--secret-file", str(secret)) as server:
        good = dfkv("ping", "--node", server.address, "--secret-file", str(secret), "--json")
        assert good.returncode == 0, good.stderr
        for wrong in (["--secret-file", str(other)], []):
            bad = dfkv("ping", "--node", server.address, "--deadline-ms", "500", *wrong)
            assert bad.returncode == 1
            assert "--secret-file" in bad.stderr
            assert "Traceback" not in bad.stderr
        # Each attempt of theirs is counted where the operator looks.
        stats = json.loads(dfkv("stat", "--node", server.address, "--secret-file", str(secret), "--json").stdout)
        assert stats["nodes"][0]["stats"]["auth_failures"] >= 2


def test_stat_ls_erase_round_trip(server: ServeProcess) -> None:
    blocks = [bytes([i]) * 16 for i in range(5)]
    node = ["--node", server.address]
    assert "no namespaces" in dfkv("ls", *node).stdout
    with client_of(server) as client:
        namespace = store(client, blocks)
    assert namespace == DESCRIPTOR.id

    listed = json.loads(dfkv("ls", *node, "--json").stdout)["namespaces"]
    assert [entry["id"] for entry in listed] == [namespace.hex()]
    assert listed[0]["objects"] == 5
    assert listed[0]["stored_bytes"] == 5 * OBJECT_BYTES
    assert listed[0]["label"] == "tests/model"
    assert listed[0]["nodes"] == ["n-1"]
    assert listed[0]["last_used_s"] >= listed[0]["created_s"] > 0
    table = dfkv("ls", *node).stdout
    assert namespace.hex() in table
    assert "320 KiB" in table

    fields = json.loads(dfkv("ls", "tests/model", *node, "--json").stdout)["fields"]
    assert fields["engine_family"] == "test"
    assert fields["weights_digest"] == "00" * 32

    answer = json.loads(dfkv("stat", *node, "--json").stdout)["nodes"]
    assert [entry["node_id"] for entry in answer] == ["n-1"]
    stats = answer[0]["stats"]
    assert (stats["objects"], stats["stored_bytes"]) == (5, 5 * OBJECT_BYTES)
    assert stats["pins"] == 0
    assert [key for key, value in stats.items() if isinstance(value, int) and not is_described(key)] == []
    assert re.search(r"^stored_bytes +320 KiB", dfkv("stat", *node).stdout, re.MULTILINE)

    removed = json.loads(
        dfkv("rm", namespace.hex()[:8], blocks[0].hex(), bytes(16).hex()[:-1] + "7", *node, "--json").stdout
    )
    assert removed["blocks"][blocks[0].hex()] == "ok"
    assert len(removed["blocks"]) == 2

    refused = dfkv("erase", namespace.hex(), *node)
    assert refused.returncode != 0, "without an answer nothing is erased"
    done = dfkv("erase", namespace.hex(), *node, "--yes")
    assert done.returncode == 0, done.stderr
    assert "erased 4 objects" in done.stdout
    assert "second listing shows 0" in done.stdout
    with client_of(server) as client:
        chunks = b"".join(struct.pack("<16sQ", block, route_of(block)) for block in blocks)
        client.add_namespace(DESCRIPTOR.encode())
        operation = finished(client.exists(namespace, chunks, struct.pack("<Q", 0), DEADLINE_MS))
        assert operation.prefix == 0
        assert all(code >= 100 for code in struct.unpack("<5H", operation.statuses()))


def test_ping(server: ServeProcess) -> None:
    report = json.loads(dfkv("ping", "--count", "2", "--node", server.address, "--json").stdout)["nodes"]
    assert [entry["node_id"] for entry in report] == ["n-1"]
    best, mean, worst = report[0]["round_trip_ms"]
    assert 0 < best <= mean <= worst < 1000
    with socket.create_server(("127.0.0.1", 0)) as unused:
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    done = dfkv("ping", "--node", address, "--deadline-ms", "500")
    assert done.returncode == 1
    assert address in done.stderr
    assert "dfkv serve" in done.stderr


def test_unknown_namespaces_are_named(server: ServeProcess) -> None:
    for command in (["ls", "feed"], ["erase", "feed", "--yes"], ["rm", "feed", "00" * 16]):
        done = dfkv(*command, "--node", server.address)
        assert done.returncode == 1
        assert "no namespace 'feed'" in done.stderr
    done = dfkv("rm", "feed", "xyz", "--node", server.address)
    assert done.returncode == 2
    assert "32 hex digits" in done.stderr


def test_clients_get_a_view_of_one_serving_node(server: ServeProcess) -> None:
    with client_of(server) as client:
        data = client.view()
    assert data is not None
    view = View.decode(data)
    assert [(node.id, node.state, node.tcp) for node in view.nodes] == [("n-1", NodeState.SERVING, (server.address,))]
    assert view.nodes[0].incarnation > 0
    assert any(view.nodes[0].boot_id)


def test_a_static_list_of_two_nodes_is_one_cluster(tmp_path: Path) -> None:
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports.append(free.getsockname()[1])
    environ = {"DFKV_NODE__PEERS": ",".join(f"n-{i}=127.0.0.1:{port}" for i, port in enumerate(ports))}
    with contextlib.ExitStack() as stack:
        for i, port in enumerate(ports):
            stack.enter_context(serving(tmp_path / f"{i}.log", "--node-id", f"n-{i}", "--port", str(port), **environ))
        address = f"127.0.0.1:{ports[0]}"
        report = json.loads(dfkv("ping", "--node", address, "--json").stdout)["nodes"]
        assert {(entry["node_id"], entry["status"]) for entry in report} == {("n-0", "ok"), ("n-1", "ok")}
        client = stack.enter_context(contextlib.closing(_native.Client([("127.0.0.1", ports[1])])))
        assert client.wait_ready(DEADLINE_MS)
        store(client, [bytes([i]) * 16 for i in range(64)])
        listed = json.loads(dfkv("ls", "--node", address, "--json").stdout)["namespaces"]
        assert listed[0]["objects"] == 64
        assert sorted(listed[0]["nodes"]) == ["n-0", "n-1"]


def test_metrics_only_where_configured(tmp_path: Path, server: ServeProcess) -> None:
    assert server.ready["metrics_address"] is None
    with serving(tmp_path / "metrics.log", "--metrics-port", "0") as measured:
        address = measured.ready["metrics_address"]
        assert address.startswith("127.0.0.1:")
        with client_of(measured) as client:
            store(client, [bytes(16)])
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as reply:
            text = reply.read().decode()
        assert "dfkv_node_objects 1.0" in text
        assert measured.stop()[0] == 0


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    before = {path.name for path in Path("/dev/shm").iterdir()}
    with serving(tmp_path / "serve.log") as server:
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        assert children == []
        assert server.stop()[0] == 0
    left = {path.name for path in Path("/dev/shm").iterdir()} - before
    assert [name for name in left if "dfkv" in name] == []


def test_output_may_go_nowhere(tmp_path: Path) -> None:
    """A supervisor that closes standard output must not take the node down with it."""
    with serving(tmp_path / "serve.log") as server:
        assert server.process.stdout is not None
        server.process.stdout.close()
        with client_of(server) as client:
            assert finished(client.ping(DEADLINE_MS)).statuses() == bytes(2)
        server.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(10)
        assert server.process.returncode in (0, 1)
        assert "Traceback" not in server.log.read_text()
