"""Many clients with large batches against a node with little memory: all of them succeed, none starves, and neither side takes
more memory than it was given."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dfkv_core.client import Client, Item
from tests.integration.crowd import OBJECT_BYTES, content, key
from tests.integration.serve_process import ServeProcess, clean_environ, serving
from tests.integration.test_client_faults import DESCRIPTOR
from tests.soak.worker import rss_bytes

pytestmark = pytest.mark.slow

MIB = 1 << 20
LEASE_MS = 30_000
NODE_OVERHEAD_BYTES = 160 * MIB  # interpreter, library, connections and requests in flight
CLIENT_OVERHEAD_BYTES = 96 * MIB  # interpreter and library; the payload lies in a file


@dataclass(frozen=True)
class Size:
    processes: int
    clients_each: int
    objects: int
    budget_bytes: int
    seconds: float
    deadline_s: float

    @property
    def kept(self) -> int:
        """Objects that stay on the node, in a quarter of its memory: the place i of a batch holds what i % kept does."""
        return min(self.objects, self.budget_bytes // 4 // OBJECT_BYTES)


GATE = Size(processes=4, clients_each=4, objects=16, budget_bytes=64 * MIB, seconds=4, deadline_s=60)
FULL = Size(processes=16, clients_each=4, objects=64, budget_bytes=256 * MIB, seconds=1, deadline_s=280)


@contextlib.contextmanager
def payload(size: Size) -> Iterator[str]:
    """The memory that all clients share: with one each they would need more than the machine has."""
    file = os.memfd_create("crowd")
    try:
        for number in range(size.objects):
            os.pwrite(file, content(number % size.kept), number * OBJECT_BYTES)
        yield f"/proc/{os.getpid()}/fd/{file}"
    finally:
        os.close(file)


@contextlib.contextmanager
def leased(client: Client, namespace: bytes, blocks: list[bytes]) -> Iterator[None]:
    """The blocks stay for the length of a `with`."""
    stop = threading.Event()
    lookup = client.lookup(namespace, blocks, [0], deadline_ms=10_000, lease_ms=LEASE_MS)
    assert lookup.prefix == len(blocks)

    def renew() -> None:
        held = lookup
        while not stop.wait(LEASE_MS / 1000 / 5):
            newer = client.lookup(namespace, blocks, [0], deadline_ms=LEASE_MS / 2, lease_ms=LEASE_MS)
            if newer.prefix == len(blocks):
                held.release()
                held = newer
        held.release()

    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def crowd(server: ServeProcess, path: str, size: Size, number: int) -> subprocess.Popen[str]:
    counts = (
        number * size.clients_each,
        size.clients_each,
        size.objects,
        size.kept,
        size.seconds,
        size.deadline_s * 1000,
    )
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.integration.crowd",
            server.address,
            path,
            *map(str, counts),
            str(size.budget_bytes),
        ],
        env={**clean_environ(), "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    "size", [GATE, pytest.param(FULL, marks=[pytest.mark.torture, pytest.mark.timeout(900)])], ids=["gate", "full"]
)
def test_many_clients_share_a_small_budget(tmp_path: Path, size: Size) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(tmp_path / "serve.log", "--ram", str(size.budget_bytes)))
        path = stack.enter_context(payload(size))
        client = stack.enter_context(Client.open([server.address]))
        namespace = client.add_namespace(DESCRIPTOR)
        stop, most = threading.Event(), [0]

        def sample() -> None:
            while not stop.wait(0.1):
                most[0] = max(most[0], rss_bytes(server.pid))

        sampler = threading.Thread(target=sample, daemon=True)
        sampler.start()
        stack.callback(stop.set)
        processes = [crowd(server, path, size, number) for number in range(size.processes)]
        for process in processes:
            stack.callback(process.communicate)
            stack.callback(process.kill)
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        kept = [Item(key("kept", i), 0, content(i)) for i in range(size.kept)]
        assert client.put(namespace, kept, deadline_ms=60_000).ok
        stack.enter_context(leased(client, namespace, [item.block_id for item in kept]))
        lines: list[dict[str, Any]] = []
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        for process in processes:
            output, _ = process.communicate(timeout=3 * size.deadline_s)
            assert process.returncode == 0
            lines += [json.loads(line) for line in output.splitlines()]
        stop.set()
        sampler.join()
    clients = [line for line in lines if "batches" in line]
    statuses = sum((Counter(line["statuses"]) for line in clients), Counter())
    batches = sorted(line["batches"] for line in clients)
    slowest = {op: max(line["slowest_s"][op] for line in clients) for op in ("put", "get")}
    anonymous = max(line["anonymous_bytes"] for line in lines if "anonymous_bytes" in line)
    print(
        f"{len(clients)} clients x {size.objects} x {OBJECT_BYTES // MIB} MiB against {size.budget_bytes // MIB} MiB: {dict(statuses)}"
    )
    print(f"batches of a client {batches[0]} to {batches[-1]}, slowest {slowest}")
    print(f"memory: node {most[0] // MIB} MiB, a process of clients {anonymous // MIB} MiB")
    assert len(clients) == size.processes * size.clients_each
    assert set(statuses) == {"put ok", "get ok"}, statuses
    assert batches[0] * 4 >= statistics.median(batches)
    assert most[0] < size.budget_bytes + NODE_OVERHEAD_BYTES
    assert anonymous < CLIENT_OVERHEAD_BYTES
