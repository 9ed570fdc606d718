"""The client when nodes stop, die and come back, when operations are cut short, and when the process forks or ends."""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dfkv_core.client import Client, Item
from dfkv_core.keys import Status
from tests.engines.stopping import stop_process
from tests.integration.serve_process import ServeProcess, clean_environ, serving

pytestmark = pytest.mark.slow

DEADLINE_MS = 10_000.0
# What a busy machine may add to a deadline before a test calls it late.
LATE_S = 0.5
DESCRIPTOR = struct.pack("<HI", 1, 6) + b"client"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServeProcess]:
    with serving(tmp_path / "serve.log", "--ram", "256MiB") as process:
        yield process


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def eventually_ok(client: Client, namespace: bytes, block: bytes, limit_s: float) -> float:
    """Seconds until a put of the block ends well."""
    start = time.monotonic()
    while time.monotonic() - start < limit_s:
        if client.put(namespace, [Item(block, 0, b"x")], deadline_ms=200).ok:
            return time.monotonic() - start
        time.sleep(0.01)
    raise AssertionError(f"not in use again after {limit_s} s: {client.stats()['nodes']}")


def test_a_stopped_node_costs_the_deadline_and_is_used_again(server: ServeProcess) -> None:
    data = os.urandom(8 << 20)
    with Client.open([server.address], connect_timeout_ms=300) as client:
        namespace = client.add_namespace(DESCRIPTOR)
        assert client.put(namespace, [Item(bytes(16), 0, data)], deadline_ms=DEADLINE_MS).ok
        stop_process(server.pid)
        try:
            memory = bytearray(len(data))
            kinds: list[Callable[[], Status]] = [
                lambda: client.get(namespace, [Item(bytes(16), 0, memory)], deadline_ms=100).statuses[0],
                lambda: client.put(namespace, [Item(os.urandom(16), 0, data)], deadline_ms=100).statuses[0],
                lambda: client.lookup(namespace, [bytes(16)], [0], deadline_ms=100).statuses[0],
            ]
            for ask in kinds:
                start = time.monotonic()
                assert ask() is Status.MISS_DEADLINE
                assert 0.09 < time.monotonic() - start < 0.1 + LATE_S
            # Not one deadline has put it out of use; being found dead does.
            assert client.stats()["cooldowns"] == 0
            start = time.monotonic()
            while client.lookup(namespace, [bytes(16)], [0], deadline_ms=100).statuses[0] is not Status.MISS_NODE_DOWN:
                assert time.monotonic() - start < 5
            start = time.monotonic()
            assert client.lookup(namespace, [bytes(16)], [0], deadline_ms=3000).statuses[0] is Status.MISS_NODE_DOWN
            assert time.monotonic() - start < LATE_S
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert eventually_ok(client, namespace, os.urandom(16), 2.0 + LATE_S) < 2.0 + LATE_S
        again = client.get(namespace, [Item(bytes(16), 0, memory)], deadline_ms=DEADLINE_MS)
        assert again.ok, again
        assert memory == data


def test_a_killed_node_is_in_use_within_two_seconds_of_its_return(tmp_path: Path) -> None:
    port = str(free_port())
    with serving(tmp_path / "first.log", "--port", port) as first, Client.open([first.address]) as client:
        namespace = client.add_namespace(DESCRIPTOR)
        assert client.put(namespace, [Item(bytes(16), 0, b"x")], deadline_ms=DEADLINE_MS).ok
        first.kill()
        deadline = time.monotonic() + 3
        while client.lookup(namespace, [bytes(16)], [0], deadline_ms=500).statuses[0] is not Status.MISS_NODE_DOWN:
            assert time.monotonic() < deadline
        start = time.monotonic()
        for _ in range(50):
            assert client.lookup(namespace, [bytes(16)], [0]).statuses[0] is Status.MISS_NODE_DOWN
        assert time.monotonic() - start < LATE_S
        with serving(tmp_path / "second.log", "--port", port):
            # Registered anew without being told to: the put is no miss for an unknown namespace.
            assert eventually_ok(client, namespace, os.urandom(16), 2.0 + LATE_S) < 2.0 + LATE_S
            assert client.lookup(namespace, [bytes(16)], [0], deadline_ms=DEADLINE_MS).prefix == 0


def test_a_client_opened_before_its_node(tmp_path: Path) -> None:
    port = free_port()
    with Client.open([f"127.0.0.1:{port}"]) as client:
        namespace = client.add_namespace(DESCRIPTOR)
        result = client.put(namespace, [Item(bytes(16), 0, b"x")], deadline_ms=DEADLINE_MS)
        assert result.statuses[0] is Status.MISS_NODE_DOWN
        with serving(tmp_path / "serve.log", "--port", str(port)):
            assert eventually_ok(client, namespace, bytes(16), 2.0 + LATE_S) < 2.0 + LATE_S


def test_deadlines_and_cancels_never_touch_memory_late(server: ServeProcess) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    sizes = [rng.randrange(1, 200_000) for _ in range(12)]
    ids = [rng.randbytes(16) for _ in sizes]
    stored = [rng.randbytes(size) for size in sizes]
    counts: dict[Status, int] = {}
    with Client.open([server.address]) as client:
        namespace = client.add_namespace(DESCRIPTOR)
        items = [Item(block, 0, data) for block, data in zip(ids, stored, strict=True)]
        assert client.put(namespace, items, deadline_ms=DEADLINE_MS).ok
        canaries: list[bytearray] = []
        for _ in range(1000):
            under_way = []
            start = time.monotonic()
            for _ in range(10):
                chosen = rng.sample(range(len(ids)), 2)
                memories = [bytearray(sizes[i]) for i in chosen]
                batch = [Item(ids[i], 0, memory) for i, memory in zip(chosen, memories, strict=True)]
                future = client.get_future(namespace, batch, deadline_ms=rng.expovariate(0.5))
                under_way.append((future, chosen, memories))
            for number, (future, chosen, memories) in enumerate(under_way):
                cancelled = number % 3 == 0
                if not (cancelled and future.cancel()):
                    for i, memory, status in zip(chosen, memories, future.result(5).statuses, strict=True):
                        counts[status] = counts.get(status, 0) + 1
                        assert status is not Status.OK or memory == stored[i]
                        assert status in (Status.OK, Status.MISS_DEADLINE, Status.MISS_CANCELLED), status
                        assert status is not Status.MISS_CANCELLED or cancelled
                for memory in memories:
                    memory[:] = b"\xa5" * len(memory)
                canaries += memories
            assert time.monotonic() - start < 1 + LATE_S
            if len(canaries) > 200:
                assert all(memory.count(b"\xa5") == len(memory) for memory in canaries)
                canaries.clear()
        assert counts[Status.OK] > 100, counts
        assert counts[Status.MISS_DEADLINE] > 100, counts
        stats = client.stats()
        assert stats["checksum_failures"] == stats["protocol_faults"] == stats["disconnects"] == 0
        assert stats["inflight_operations"] == stats["inflight_bytes"] == 0
        # The connections are whole: everything still works on them.
        received = [bytearray(size) for size in sizes]
        batch = [Item(block, 0, memory) for block, memory in zip(ids, received, strict=True)]
        assert client.get(namespace, batch, deadline_ms=DEADLINE_MS).ok
        assert [bytes(memory) for memory in received] == stored


def run_script(script: str, *arguments: str, timeout_s: float = 20) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        env={**clean_environ(), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_a_forked_child_is_told_and_does_not_hang(server: ServeProcess) -> None:
    script = """
        import os, sys
        from dfkv_core.client import Client, Item
        client = Client.open([sys.argv[1]])
        namespace = client.add_namespace(bytes([1, 0, 1, 0, 0, 0, 65]))
        assert client.put(namespace, [Item(bytes(16), 0, b"x")], deadline_ms=5000).ok
        operation = client.native.ping(5000)
        child = os.fork()
        if child == 0:
            for attempt in (
                lambda: client.lookup(namespace, [bytes(16)], [0]),
                lambda: client.close(),
                lambda: client.native.stats(),
                lambda: operation.wait(10),
            ):
                try:
                    attempt()
                except RuntimeError as error:
                    assert "fork" in str(error), error
                else:
                    raise AssertionError("no error")
            own = Client.open([sys.argv[1]])
            assert own.lookup(own.add_namespace(bytes([1, 0, 1, 0, 0, 0, 65])), [bytes(16)], [0], deadline_ms=5000).prefix == 1
            print("child", flush=True)
            sys.exit(7)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7, status
        # The parent's connections have survived the child.
        assert client.lookup(namespace, [bytes(16)], [0], deadline_ms=5000).prefix == 1
        assert client.stats()["disconnects"] == 0
        print("parent")
    """
    done = run_script(script, server.address)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["child", "parent"]
    assert done.stderr == ""


@pytest.mark.parametrize("ending", ["fall off the end", "exit in a thread's midst", "dropped operations", "exception"])
def test_the_interpreter_ends_with_operations_in_flight(server: ServeProcess, ending: str) -> None:
    script = """
        import sys, threading, time
        from dfkv_core.client import Client, Item
        ending = sys.argv[2]
        client = Client.open([sys.argv[1]])
        namespace = client.add_namespace(bytes([1, 0, 1, 0, 0, 0, 65]))
        data = bytearray(4 << 20)
        assert client.put(namespace, [Item(bytes(16), 0, data)], deadline_ms=5000).ok
        futures = [client.get_future(namespace, [Item(bytes(16), 0, bytearray(4 << 20))], deadline_ms=60000) for _ in range(20)]
        operations = [client.native.ping(60000) for _ in range(50)]
        if ending == "exit in a thread's midst":
            def work():
                try:
                    while True:
                        client.get(namespace, [Item(bytes(16), 0, bytearray(4 << 20))], deadline_ms=60000)
                except Exception as error:  # the client closes under it, where the thread gets to see that
                    assert "closed" in str(error), error
            for _ in range(4):
                threading.Thread(target=work, daemon=True).start()
            time.sleep(0.05)
        if ending == "dropped operations":
            del futures, operations
        print("ending", flush=True)
        if ending == "exception":
            raise SystemExit(0)
    """
    for _ in range(3):
        done = run_script(script, server.address, ending)
        assert done.returncode == 0, (done.returncode, done.stderr)
        assert done.stdout.split() == ["ending"]
        assert done.stderr == ""


def test_a_dropped_operation_lets_go_of_the_memory(server: ServeProcess) -> None:
    with Client.open([server.address]) as client:
        namespace = client.add_namespace(DESCRIPTOR)
        data = os.urandom(4 << 20)
        assert client.put(namespace, [Item(bytes(16), 0, data)], deadline_ms=DEADLINE_MS).ok
        item = bytes(32) + struct.pack("<II", len(data), 0)
        from dfkv_core.memory import pack_segments, segments_of

        for _ in range(50):
            memory = bytearray(len(data))
            segments = pack_segments(segments_of(memory, writable=True))
            operation = client.native.get(namespace, item, segments, struct.pack("<I", 1), 60_000)
            del operation
            memory[:] = bytes(len(memory))
            time.sleep(0.002)
            assert memory.count(0) == len(memory)
        assert client.stats()["inflight_operations"] == 0
