"""`dfkv serve --dir` as a real process: warm after kill -9, what is refused, and the commands that look at a directory."""

from __future__ import annotations

import json
import random
import re
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dfkv_core.client import Client, Item
from dfkv_core.keys import Status
from dfkv_core.metrics_table import is_described
from tests.integration.serve_process import ServeProcess, dfkv, serving

pytestmark = pytest.mark.slow

DEADLINE_MS = 10_000.0
DESCRIPTOR = struct.pack("<HI", 1, 4) + b"disk"
CAPACITY = "64MiB"


def arguments(*directories: Path, ram: str = "8MiB", node_id: str = "n-1") -> list[str]:
    flags = ["--node-id", node_id, "--ram", ram, "--capacity", CAPACITY]
    for directory in directories:
        directory.mkdir(exist_ok=True)
        flags += ["--dir", str(directory)]
    return flags


@pytest.fixture
def rng() -> random.Random:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture
def objects(rng: random.Random) -> dict[bytes, bytes]:
    return {rng.randbytes(16): rng.randbytes(rng.randrange(1, 400_000)) for _ in range(60)}


def put(client: Client, objects: dict[bytes, bytes]) -> bytes:
    namespace = client.add_namespace(DESCRIPTOR, "disk tests")
    for block, data in objects.items():
        result = client.put(namespace, [Item(block, 0, memoryview(data))], deadline_ms=DEADLINE_MS)
        assert result.ok, result.statuses
    return namespace


def check(client: Client, objects: dict[bytes, bytes]) -> None:
    namespace = client.add_namespace(DESCRIPTOR, "disk tests")
    with client.lookup(namespace, list(objects), [0], deadline_ms=DEADLINE_MS) as found:
        assert found.prefix == len(objects)
        for block, data in objects.items():
            into = bytearray(len(data))
            assert client.get(found, [Item(block, 0, into)], deadline_ms=DEADLINE_MS).ok
            assert bytes(into) == data


def wait_until_written(server: ServeProcess, client: Client) -> dict[str, int]:
    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        stats = client.node_stats(deadline_ms=DEADLINE_MS)[server.ready["node_id"]]
        assert stats is not None
        if stats["dirty_objects"] == 0:
            return stats
        time.sleep(0.02)
    raise AssertionError("objects stay dirty")


def test_a_node_is_warm_after_kill_9(tmp_path: Path, objects: dict[bytes, bytes]) -> None:
    flags = arguments(tmp_path / "a", tmp_path / "b")
    with serving(tmp_path / "1.log", *flags) as server, Client.open([server.address]) as client:
        assert server.ready["disk_objects"] == 0
        assert server.ready["disk_bytes"] == 128 << 20
        namespace = put(client, objects)
        check(client, objects)
        gone = next(iter(objects))
        assert client.remove(namespace, [gone], [0], deadline_ms=DEADLINE_MS).ok
        stats = wait_until_written(server, client)
        assert stats["disk_objects"] == len(objects) - 1
        assert stats["disk_directories"] == 2
        assert all(is_described(name) for name in stats)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(10)
    left = {block: data for block, data in objects.items() if block != gone}
    with serving(tmp_path / "2.log", *flags) as server, Client.open([server.address]) as client:
        assert server.ready["disk_objects"] == len(left)
        assert re.search(r"INFO dfkv_core.node: \S+: \d+ objects found in", (tmp_path / "2.log").read_text())
        check(client, left)
        with client.lookup(namespace, [gone], [0], deadline_ms=DEADLINE_MS) as found:
            assert found.prefix == 0
        assert client.erase(namespace, deadline_ms=DEADLINE_MS) == {"n-1": len(left)}
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(10)
    with serving(tmp_path / "3.log", *flags) as server:
        assert server.ready["disk_objects"] == 0


def test_what_was_acknowledged_from_disk_or_synced_outlives_kill_9(tmp_path: Path, objects: dict[bytes, bytes]) -> None:
    flags = arguments(tmp_path / "a", ram="64MiB")
    blocks = list(objects)
    durable, synced = {b: objects[b] for b in blocks[:30]}, {b: objects[b] for b in blocks[30:]}
    with serving(tmp_path / "1.log", *flags) as server, Client.open([server.address]) as client:
        namespace = client.add_namespace(DESCRIPTOR, "disk tests")
        batch = [Item(block, 0, memoryview(data)) for block, data in durable.items()]
        assert client.put(namespace, batch, ack="disk", deadline_ms=DEADLINE_MS).ok
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(10)
    with serving(tmp_path / "2.log", *flags) as server, Client.open([server.address]) as client:
        check(client, durable)
        put(client, synced)
        assert client.sync() == {"n-1": True}
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(10)
    with serving(tmp_path / "3.log", *flags) as server, Client.open([server.address]) as client:
        check(client, objects)


def test_a_node_without_disks_promises_none(tmp_path: Path, objects: dict[bytes, bytes]) -> None:
    with serving(tmp_path / "1.log", "--ram", "64MiB") as server, Client.open([server.address]) as client:
        namespace = client.add_namespace(DESCRIPTOR, "disk tests")
        block, data = next(iter(objects.items()))
        result = client.put(namespace, [Item(block, 0, memoryview(data))], ack="disk", deadline_ms=DEADLINE_MS)
        assert not result.ok
        assert list(result.statuses) == [Status.REFUSED_UNSUPPORTED]
        assert list(client.sync(deadline_ms=DEADLINE_MS).values()) == [False]


def test_a_clean_stop_writes_what_is_dirty(tmp_path: Path, objects: dict[bytes, bytes]) -> None:
    flags = arguments(tmp_path / "a", ram="64MiB")
    with serving(tmp_path / "1.log", *flags) as server, Client.open([server.address]) as client:
        put(client, objects)
        assert server.stop()[0] == 0
    with serving(tmp_path / "2.log", *flags) as server, Client.open([server.address]) as client:
        check(client, objects)


def test_what_cannot_be_used_is_refused_with_what_to_do(tmp_path: Path) -> None:
    flags = arguments(tmp_path / "a")
    with serving(tmp_path / "1.log", *flags):
        second = dfkv("serve", "--port", "0", *flags)
    assert second.returncode == 1
    assert "another node" in second.stderr
    assert "Traceback" not in second.stderr
    other = dfkv("serve", "--port", "0", *arguments(tmp_path / "a", node_id="n-2"))
    assert "--node-id n-1" in other.stderr
    larger = dfkv("serve", "--port", "0", "--node-id", "n-1", "--dir", str(tmp_path / "a"), "--capacity", "128MiB")
    assert "old capacity" in larger.stderr
    missing = dfkv("serve", "--port", "0", "--node-id", "n-1", "--dir", str(tmp_path / "none"), "--capacity", "64MiB")
    assert "mkdir -p" in missing.stderr
    unsized = dfkv("serve", "--port", "0", "--node-id", "n-1", "--dir", str(tmp_path / "a"))
    assert unsized.returncode == 2
    assert "--capacity" in unsized.stderr
    unnamed = dfkv("serve", "--port", "0", "--dir", str(tmp_path / "a"), "--capacity", "64MiB")
    assert "node_id" in unnamed.stderr


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    home = tmp_path / "tmpfs"
    home.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(home)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield home
    subprocess.run(["umount", str(home)], check=True)


def test_a_tmpfs_without_room_is_refused_at_once(small_tmpfs: Path) -> None:
    refused = dfkv("serve", "--port", "0", "--node-id", "n-1", "--dir", str(small_tmpfs), "--capacity", "64MiB")
    assert refused.returncode == 1
    assert str(small_tmpfs) in refused.stderr
    assert "No space left" in refused.stderr
    assert "give a smaller --capacity" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize("command", ["inspect", "scrub"])
def test_a_directory_without_a_store_is_said(tmp_path: Path, command: str) -> None:
    done = dfkv(command, str(tmp_path / "elsewhere"))
    assert done.returncode == 1
    assert "holds no store" in done.stderr


def test_inspect_and_scrub(tmp_path: Path, objects: dict[bytes, bytes]) -> None:
    home = tmp_path / "a"
    with serving(tmp_path / "1.log", *arguments(home)) as server, Client.open([server.address]) as client:
        namespace = put(client, objects)
        assert server.stop()[0] == 0
    shown = json.loads(dfkv("inspect", str(home), "--json").stdout)
    assert shown["node_id"] == "n-1"
    assert shown["objects"] == len(objects)
    assert shown["stored_bytes"] == sum(map(len, objects.values()))
    assert [(space["id"], space["label"]) for space in shown["namespaces"]] == [(namespace.hex(), "disk tests")]
    assert "disk tests" in dfkv("inspect", str(home)).stdout
    clean = dfkv("scrub", str(home), "--json")
    assert clean.returncode == 0
    assert json.loads(clean.stdout)["objects"] == len(objects)
    assert f"{len(objects)} of {len(objects)} objects" in clean.stderr

    victim = objects[next(iter(objects))][:64]
    payload = (home / "extents.dat").read_bytes()
    at = payload.index(victim)
    with (home / "extents.dat").open("r+b") as file:
        file.seek(at)
        file.write(bytes([payload[at] ^ 1]))
    found = dfkv("scrub", str(home), "--json")
    assert found.returncode == 1
    assert json.loads(found.stdout)["corrupt"] == 1
    assert json.loads(dfkv("inspect", str(home), "--json").stdout)["quarantined"] == 1
    nothing = dfkv("inspect", str(tmp_path))
    assert nothing.returncode == 1
    assert "Traceback" not in nothing.stderr
