"""The membership service before a real etcd: joining, leaving, dying, restarts of everything, and errors that say what to do."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dfkv_core.client import Client, Item
from dfkv_core.keys import Status
from dfkv_core.membership.view import View
from tests.integration.etcd_process import EtcdProcess
from tests.integration.serve_process import ServeProcess, dfkv, serving

TTL_S = 3
POLL_S = 1.0
SECRET = "a secret for the tests of this file"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    process = EtcdProcess(tmp_path_factory.mktemp("etcd"))
    yield process
    process.stop()


class Cluster:
    """Processes of one group, ended with the test."""

    def __init__(self, etcd: EtcdProcess, folder: Path, stack: contextlib.ExitStack) -> None:
        self.etcd = etcd
        self.folder = folder
        self.group = "g" + folder.name.replace("_", "-")[-40:]
        self._stack = stack
        self._started = 0
        self.services: list[ServeProcess] = []

    def service(self, *arguments: str, ttl_s: int = TTL_S) -> ServeProcess:
        options = ("--etcd", self.etcd.address, "--group", self.group, "--ttl", str(ttl_s), *arguments)
        process = self._stack.enter_context(serving(self._log("mds"), *options, name="mds"))
        self.services.append(process)
        return process

    def node(self, node_id: str, *arguments: str, **environ: str) -> ServeProcess:
        services = [word for service in self.services for word in ("--mds", service.address)]
        options = (*services, "--group", self.group, "--node-id", node_id, *arguments)
        return self._stack.enter_context(serving(self._log(node_id), *options, name="node", **environ))

    def client(self, *seeds: str, **options: Any) -> Client:
        return self._stack.enter_context(Client.open(list(seeds) or [one.address for one in self.services], **options))

    def _log(self, name: str) -> Path:
        self._started += 1
        return self.folder / f"{name}-{self._started}.log"


@pytest.fixture
def cluster(etcd: EtcdProcess, tmp_path: Path) -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        yield Cluster(etcd, tmp_path, stack)


def states(client: Client) -> dict[str, str]:
    encoded = client.view()
    return {node.id: node.state.name.lower() for node in View.decode(encoded).nodes} if encoded else {}


def eventually(condition: Callable[[], Any], within_s: float, what: str = "") -> float:
    """Seconds until the condition held."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < within_s, f"not within {within_s} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - started


DESCRIPTOR = b"\x02\x00\x04\x00\x00\x00test"


def store(client: Client, count: int = 64) -> tuple[bytes, list[Item]]:
    namespace = client.add_namespace(DESCRIPTOR)
    items = [
        Item(i.to_bytes(8, "little") * 2, 0, bytes([i % 251]) * 5000, route=i * 0x9E3779B97F4A7C15 % 2**64)
        for i in range(count)
    ]
    return namespace, items


def test_the_first_operation_waits_for_the_first_view_and_finds_the_owners(cluster: Cluster) -> None:
    cluster.service()
    client = cluster.client()
    namespace, items = store(client)
    started = threading.Thread(target=lambda: [cluster.node("a"), cluster.node("b", "--weight", "200")])
    started.start()
    first = client.get(namespace, [Item(bytes(16), 0, bytearray(1))], deadline_ms=20_000)
    started.join()
    # Asked before anybody was there. After two seconds without a node keys would be a miss at once.
    assert first.statuses[0] in (Status.MISS_NOT_FOUND, Status.MISS_NAMESPACE_UNKNOWN, Status.MISS_NODE_DOWN)
    eventually(lambda: states(client) == {"a": "serving", "b": "serving"}, 10)
    assert set(client.put(namespace, items).statuses) <= {Status.OK, Status.ALREADY}
    stats = {node_id: counters or {} for node_id, counters in client.node_stats().items()}
    assert stats["a"]["objects"] + stats["b"]["objects"] == len(items)
    assert stats["b"]["objects"] > stats["a"]["objects"] > 0
    other = cluster.client()
    received = [Item(item.block_id, 0, bytearray(5000), item.route) for item in items]
    assert set(other.get(other.add_namespace(DESCRIPTOR), received).statuses) == {Status.OK}
    assert all(bytes(got.buffer) == item.buffer for got, item in zip(received, items, strict=True))


def test_an_operation_right_after_open_succeeds(cluster: Cluster) -> None:
    cluster.service()
    cluster.node("a")
    client = cluster.client()
    namespace, items = store(client, 1)
    assert client.put(namespace, items).statuses[0] == Status.OK


def test_a_dead_node_is_gone_within_ttl_and_poll_and_one_that_stops_at_once(cluster: Cluster) -> None:
    cluster.service()
    dead, stopped = cluster.node("dead"), cluster.node("stopped")
    cluster.node("stays")
    client = cluster.client()
    eventually(lambda: len(states(client)) == 3, 10)
    stopped.stop()
    eventually(lambda: states(client).get("stopped") in ("gone", None), 2 * POLL_S, "the node said it leaves")
    # Leases end in whole seconds, and etcd looks for ended ones every half second.
    dead.kill()
    eventually(lambda: "dead" not in states(client), TTL_S + POLL_S + 3)
    assert states(client)["stays"] == "serving"


def test_a_restarted_node_is_the_same_node(cluster: Cluster) -> None:
    cluster.service(ttl_s=30)
    node = cluster.node("a")
    cluster.node("b")
    client = cluster.client()
    eventually(lambda: len(states(client)) == 2, 10)
    before = {entry.id: entry.incarnation for entry in View.decode(client.view() or b"").nodes}
    node.kill()
    # At once, although its first lease has half a minute to go.
    cluster.node("a", "--port", str(node.ready["port"]))
    eventually(lambda: {e.id: e.incarnation for e in View.decode(client.view() or b"").nodes}["a"] > before["a"], 10)
    assert states(client) == {"a": "serving", "b": "serving"}


def test_either_of_two_services_is_enough(cluster: Cluster) -> None:
    first, second = cluster.service(), cluster.service()
    cluster.node("a")
    cluster.node("b")
    client = cluster.client()
    eventually(lambda: len(states(client)) == 2, 10)
    views = [cluster.client(service.address) for service in (first, second)]
    eventually(lambda: len({one.view() for one in views}) == 1 and views[0].view(), 10, "both tell the same bytes")
    first.kill()
    time.sleep(2 * TTL_S)
    assert states(client) == {"a": "serving", "b": "serving"}
    cluster.services.remove(first)
    cluster.node("c")
    eventually(lambda: states(client).get("c") == "serving", 10, "the client follows the other service")
    # And with none of them the cluster goes on.
    second.kill()
    namespace, items = store(client)
    assert set(client.put(namespace, items).statuses) <= {Status.OK, Status.ALREADY}


def test_etcd_restarts_and_nobody_is_missed(cluster: Cluster) -> None:
    cluster.service()
    nodes = [cluster.node(node_id) for node_id in ("a", "b", "c")]
    client = cluster.client()
    eventually(lambda: len(states(client)) == 3, 10)
    seen: list[int] = []
    cluster.etcd.stop()
    nodes[2].kill()
    until = time.monotonic() + 2 * TTL_S
    while time.monotonic() < until:
        seen.append(len(states(client)))
        time.sleep(0.05)
    cluster.etcd.start()
    back = time.monotonic()
    eventually(lambda: "c" not in states(client), 4 * TTL_S + 10, "the one that died meanwhile goes in the end")
    assert time.monotonic() - back > TTL_S - 1, "nothing shrinks for a TTL"
    assert set(seen) == {3}
    for _ in range(20):
        assert {"a", "b"} <= states(client).keys()
        time.sleep(0.05)
    cluster.node("d")
    eventually(lambda: states(client).get("d") == "serving", 10)


def test_a_client_starts_with_its_last_view_when_nobody_answers(cluster: Cluster, tmp_path: Path) -> None:
    service = cluster.service()
    cluster.node("a")
    first = cluster.client(last_view_path=str(tmp_path / "last.view"))
    assert first.wait_ready(10_000)
    namespace, items = store(first, 4)
    assert set(first.put(namespace, items).statuses) == {Status.OK}
    first.close()
    service.kill()
    later = cluster.client(last_view_path=str(tmp_path / "last.view"))
    received = [Item(item.block_id, 0, bytearray(5000), item.route) for item in items]
    assert set(later.get(later.add_namespace(DESCRIPTOR), received).statuses) == {Status.OK}


# ---- errors


def refused(cluster: Cluster, *arguments: str, command: str = "node", within_s: float = 5.0) -> str:
    """What `dfkv node` says when it cannot join; it says so in time, after the interpreter's own start."""
    start = time.monotonic()
    dfkv("version")
    start_s = time.monotonic() - start
    started = time.monotonic()
    done = dfkv(command, *arguments, "--ram", "64MiB", "--port", "0")
    took_s = time.monotonic() - started
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert took_s < within_s + 2 * start_s + 0.5, f"{took_s:.1f} s, of which {start_s:.1f} s is the start"
    return done.stderr


def test_a_wrong_address_of_the_service_is_said(cluster: Cluster, tmp_path: Path) -> None:
    with serving(tmp_path / "other.log") as cache_node:
        said = refused(cluster, "--mds", cache_node.address)
        assert "is a cache node, not a membership service" in said
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        said = refused(cluster, "--mds", f"127.0.0.1:{port}")
        assert f"127.0.0.1:{port}" in said
        assert "no answer" in said
    said = refused(cluster, "--mds", f"127.0.0.1:{port}")
    assert "nothing listens there" in said
    assert "--mds" in said


def test_what_is_no_dfkv_is_said(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for _ in range(50):
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
                    connection.close()

        threading.Thread(target=answer, daemon=True).start()
        said = refused(cluster, "--mds", f"127.0.0.1:{listener.getsockname()[1]}")
    assert "does not speak dfkv's protocol" in said


def test_a_wrong_group_is_said(cluster: Cluster) -> None:
    service = cluster.service()
    said = refused(cluster, "--mds", service.address, "--group", "other")
    assert cluster.group in said
    assert "'other'" in said
    cluster.node("a")
    client = cluster.client(service.address, group="other")
    assert not client.wait_ready(1500)
    assert "'other'" in client.stats()["nodes"][0]["last_error"]


def test_a_second_node_of_that_name_is_said(cluster: Cluster) -> None:
    service = cluster.service(ttl_s=30)
    first = cluster.node("a")
    said = refused(cluster, "--mds", service.address, "--group", cluster.group, "--node-id", "a")
    assert "node id 'a' is held by another node at " + first.address in said
    assert "--node-id" in said


def test_a_wrong_secret_is_said(cluster: Cluster, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    service = cluster.service("--secret-file", str(secret))
    said = refused(cluster, "--mds", service.address, "--group", cluster.group)
    assert "secret" in said
    wrong = tmp_path / "wrong"
    wrong.write_text(SECRET + "!")
    assert "secret" in refused(cluster, "--mds", service.address, "--group", cluster.group, "--secret-file", str(wrong))
    cluster.node("a", "--secret-file", str(secret))
    client = cluster.client(service.address, secret=SECRET.encode())
    assert client.wait_ready(10_000)


def test_an_address_that_others_cannot_reach_is_said(cluster: Cluster) -> None:
    service = cluster.service("--host", "0.0.0.0", "--insecure")
    said = refused(
        cluster, "--mds", f"127.0.0.1:{service.ready['address'].rpartition(':')[2]}", "--group", cluster.group
    )
    assert "which other machines cannot reach" in said
    assert "--advertise" in said


def test_a_service_without_etcd_is_said(cluster: Cluster, tmp_path: Path) -> None:
    with serving(tmp_path / "mds.log", "--etcd", "127.0.0.1:1", name="mds") as service:
        said = refused(cluster, "--mds", service.address)
    assert "etcd" in said
    assert "127.0.0.1:1" in said


@pytest.mark.parametrize("node_id", ["a/b", "a:b", "a b", "ü", "x" * 129])
def test_names_of_another_form_are_refused(node_id: str) -> None:
    done = dfkv("node", "--node-id", node_id)
    assert done.returncode == 2
    assert "node_id of 1 to 128 letters" in done.stderr
    done = dfkv("mds", "--group", node_id)
    assert done.returncode == 2
    assert "group of 1 to 128 letters" in done.stderr


# ---- the command line


def test_commands(cluster: Cluster) -> None:
    service = cluster.service(ttl_s=30)
    cluster.node("a")
    cluster.node("b", "--weight", "300", "--zone", "rack-2")
    at = ("--node", service.address)
    names = ["engine:1/x y", "ü" * 40, "plain"]
    engines = [cluster.client(name=name) for name in names]
    namespace, items = store(engines[0])
    eventually(lambda: len(states(engines[0])) == 2, 10)
    engines[0].put(namespace, items)

    table = dfkv("ring", *at).stdout
    assert "2 serving" in table
    assert "rack-2" in table
    ring = json.loads(dfkv("ring", "--json", *at).stdout)
    shares = {node["id"]: node["read_share"] for node in ring["nodes"]}
    assert shares["a"] == pytest.approx(0.25, rel=0.02)
    assert shares["b"] == pytest.approx(0.75, rel=0.02)
    assert all(node["round_trip_ms"] is not None for node in ring["nodes"])

    def listed() -> set[str]:
        return {one["name"] for one in json.loads(dfkv("clients", "--json", *at).stdout)["clients"]}

    eventually(lambda: listed() >= set(names), 15, "names of any form are listed as they are")
    assert "engine:1/x y" in dfkv("clients", *at).stdout
    engines[2].close()
    eventually(lambda: "plain" not in listed(), 15)

    done = dfkv("drain", "b", *at)
    assert done.returncode == 0, done.stderr
    assert "b is draining" in done.stdout
    ring = {node["id"]: node for node in json.loads(dfkv("ring", "--json", *at).stdout)["nodes"]}
    assert ring["b"]["state"] == "draining"
    assert (ring["a"]["write_share"], ring["b"]["write_share"]) == (1.0, 0.0)
    assert ring["b"]["read_share"] == pytest.approx(0.75, rel=0.02)
    assert json.loads(dfkv("drain", "b", "--undo", "--json", *at).stdout) == {"node": "b", "state": "serving"}
    unknown = dfkv("drain", "c", *at)
    assert unknown.returncode == 1
    assert "there are: a, b" in unknown.stderr

    looks = dfkv("top", "--count", "2", "--interval", "0.2", "--json", *at).stdout.splitlines()
    assert [line["node_id"] for line in json.loads(looks[1])["nodes"]] == ["a", "b"]
    assert "hits" in dfkv("top", "--count", "1", "--interval", "0.1", *at).stdout

    assert "objects" in dfkv("stat", "--all", *at).stdout
    assert json.loads(dfkv("ls", "--json", *at).stdout)["namespaces"][0]["objects"] == len(items)


def test_erase_of_a_tenant(cluster: Cluster) -> None:
    service = cluster.service(ttl_s=30)
    cluster.node("a")
    client = cluster.client()

    def descriptor(tenant: str, family: str) -> bytes:
        fields = ((1, tenant.encode()), (2, family.encode()))
        return b"".join(tag.to_bytes(2, "little") + len(v).to_bytes(4, "little") + v for tag, v in fields if v)

    spaces = [client.add_namespace(descriptor(*one)) for one in (("red", "x"), ("red", "y"), ("blue", "x"), ("", "x"))]
    for namespace in spaces:
        client.put(namespace, store(client, 5)[1])
    at = ("--node", service.address)
    done = json.loads(dfkv("erase", "--tenant", "red", "--yes", "--json", *at).stdout)
    assert (done["erased_objects"], done["objects_left"], len(done["namespaces"])) == (10, 0, 2)
    left = {one["id"]: one["objects"] for one in json.loads(dfkv("ls", "--json", *at).stdout)["namespaces"]}
    assert [left.get(namespace.hex(), 0) for namespace in spaces] == [0, 0, 5, 5]
    missing = dfkv("erase", "--tenant", "green", "--yes", *at)
    assert missing.returncode == 1
    assert "blue" in missing.stderr


def test_commands_without_a_service_say_so(tmp_path: Path) -> None:
    with serving(tmp_path / "node.log") as node:
        for command in (["clients"], ["drain", "x"]):
            done = dfkv(*command, "--node", node.address)
            assert done.returncode == 1
            assert "a cache node" in done.stderr
        ring = json.loads(dfkv("ring", "--json", "--node", node.address).stdout)
        assert ring["nodes"][0]["read_share"] == 1.0


def test_a_service_stops_cleanly(cluster: Cluster) -> None:
    service = cluster.service()
    cluster.node("a")
    status, last = service.stop(signal.SIGTERM)
    assert status == 0
    assert last["event"] == "stopped"
    assert last["counters"]["heartbeats"] >= 1
