"""The client in numbers: operations cancelled by the hundred thousand, closed in mid-operation, forked, ended with Python."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from dfkv_core.client import Client, Item
from dfkv_core.keys import Status, pack_chunks, pack_items, pack_parts
from dfkv_core.memory import pack_segments, segments_of
from tests.integration.serve_process import ServeProcess, serving
from tests.integration.test_client_faults import run_script

pytestmark = pytest.mark.slow

DEADLINE_MS = 10_000.0
DESCRIPTOR = struct.pack("<HI", 1, 6) + b"client"
CANCELLED = 100_000
MIB = 1024 * 1024
# close() waits 2 s for its thread; the rest is for a machine that is out of breath.
CLOSE_S = 2.0 + 1.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServeProcess]:
    with serving(tmp_path / "serve.log", "--ram", "256MiB") as process:
        yield process


@pytest.fixture
def rng() -> random.Random:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    return random.Random(seed)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def native_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def memory_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def wait_until_gone(descriptors_before: int, threads_before: int) -> None:
    """Nothing of a closed client is left in this process."""
    end = time.monotonic() + 5
    while (descriptors(), native_threads()) != (descriptors_before, threads_before):
        assert time.monotonic() < end, (descriptors(), descriptors_before, native_threads(), threads_before)
        time.sleep(0.01)


def check_node_at_rest(client: Client) -> None:
    end = time.monotonic() + 10
    while True:
        (stats,) = client.node_stats(deadline_ms=DEADLINE_MS).values()
        assert stats is not None
        left = {
            name: stats[name] for name in ("pins", "leases", "filling", "condemned", "request_bytes") if stats[name]
        }
        if not left:
            return
        assert time.monotonic() < end, left
        time.sleep(0.05)


def test_a_hundred_thousand_cancelled_operations(server: ServeProcess, rng: random.Random) -> None:
    """Of every kind, at every stage, cancelled by call or by being dropped; the connections outlive them."""
    before = descriptors(), native_threads()
    with Client.open([server.address], connections_per_node=1) as client:
        native = client.native
        namespace = client.add_namespace(DESCRIPTOR)
        ids = [rng.randbytes(16) for _ in range(4)]
        data = [rng.randbytes(size) for size in (1000, 100_000, 3000, 10_000)]
        assert client.put(
            namespace, [Item(i, 0, d) for i, d in zip(ids, data, strict=True)], deadline_ms=DEADLINE_MS
        ).ok
        memory = bytearray(200_000)
        tables = []
        for block, stored in zip(ids, data, strict=True):
            segments = pack_segments(segments_of(memoryview(memory)[: len(stored)], writable=True))
            tables.append((pack_items(block, 0, len(stored)), segments, struct.pack("<I", 1)))
        new = pack_items(bytes(16), 0, 3000), pack_segments(segments_of(data[2], writable=False)), struct.pack("<I", 1)
        chunks, parts = pack_chunks(b"".join(ids)), pack_parts([0])
        settled = 0
        done = 0
        for number in range(CANCELLED // 50):
            operations = []
            for _ in range(50):
                kind = rng.random()
                if kind < 0.5:
                    operations.append(native.get(namespace, *rng.choice(tables), 60_000))
                elif kind < 0.7:
                    operations.append(native.exists(namespace, chunks, parts, 60_000, 5000))
                elif kind < 0.9:
                    operations.append(native.put(namespace, *new, 60_000, replace=True))
                else:
                    operations.append(native.ping(60_000))
            if number % 7 == 0:
                time.sleep(0.001)
            if number % 3:
                # The last first: the others go on meanwhile.
                for operation in reversed(operations):
                    operation.cancel()
                done += sum(not any(operation.statuses()) for operation in operations)
            else:
                operations.clear()
            if number == 200:
                gc.collect()
                settled = memory_bytes()
        memory[:] = b"\xa5" * len(memory)
        stats = client.stats()
        print(f"{done} were done before; {stats['cancels_sent']} cancels sent, {stats['connects']} connects")
        assert stats["inflight_operations"] == stats["inflight_bytes"] == 0
        assert stats["disconnects"] == stats["protocol_faults"] == stats["checksum_failures"] == 0
        assert stats["cancels_sent"] > 1000
        received = [bytearray(len(stored)) for stored in data]
        again = client.get(
            namespace, [Item(i, 0, r) for i, r in zip(ids, received, strict=True)], deadline_ms=DEADLINE_MS
        )
        assert again.ok, again
        assert [bytes(each) for each in received] == data
        assert memory.count(b"\xa5") == len(memory)
        check_node_at_rest(client)
        grown = memory_bytes() - settled
        print(f"memory of this process: {grown / MIB:.1f} MiB more than after a tenth of them")
        assert grown < 32 * MIB
    del client, native, operations, operation  # any of them keeps the client's descriptors
    wait_until_gone(*before)


def test_closing_in_mid_operation(server: ServeProcess, rng: random.Random) -> None:
    """Waiters of every form come back at once, with what was done or why it was not; nothing is left of the client."""
    data = rng.randbytes(2 * MIB)
    with Client.open([server.address]) as first:
        namespace = first.add_namespace(DESCRIPTOR)
        assert first.put(namespace, [Item(bytes(16), 0, data)], deadline_ms=DEADLINE_MS).ok
    gc.collect()
    before = descriptors(), native_threads()
    statuses: dict[Status, int] = {}
    ends = {Status.OK, Status.ALREADY, Status.MISS_CANCELLED, Status.MISS_NODE_DOWN, Status.AGAIN_BUSY}

    refusals: list[str] = []

    def count(status: Status) -> None:
        assert status in ends, status
        statuses[status] = statuses.get(status, 0) + 1

    def work(client: Client) -> None:
        memory = bytearray(2 * MIB)
        try:
            while True:
                count(client.get(namespace, [Item(bytes(16), 0, memory)], deadline_ms=60_000).statuses[0])
        except RuntimeError as error:  # ClientClosedError is one
            refusals.append(str(error))

    async def tasks(client: Client, closing_s: float) -> None:
        async def one() -> None:
            memory = bytearray(2 * MIB)
            result = await client.get_async(namespace, [Item(bytes(16), 0, memory)], deadline_ms=60_000)
            count(result.statuses[0])
            assert not result.ok or memory == data

        under_way = [asyncio.ensure_future(one()) for _ in range(8)]
        await asyncio.sleep(closing_s)
        if rng.random() < 0.5:
            client.close()  # on the loop's own thread
        else:
            await asyncio.to_thread(client.close)
        await asyncio.wait_for(asyncio.gather(*under_way), CLOSE_S)

    for turn in range(60):
        client = Client.open([server.address])
        client.add_namespace(DESCRIPTOR)
        closing_s = rng.random() * 0.01
        if turn % 3 == 0:
            threads = [threading.Thread(target=work, args=(client,)) for _ in range(3)]
            for thread in threads:
                thread.start()
            time.sleep(closing_s)
            start = time.monotonic()
            client.close()
            for thread in threads:
                thread.join(CLOSE_S)
                assert not thread.is_alive()
        elif turn % 3 == 1:
            memories = [bytearray(2 * MIB) for _ in range(8)]
            futures = [
                client.get_future(namespace, [Item(bytes(16), 0, memory)], deadline_ms=60_000) for memory in memories
            ]
            time.sleep(closing_s)
            start = time.monotonic()
            client.close()
            for future in futures:
                try:
                    count(future.result(CLOSE_S).statuses[0])
                except CancelledError:
                    count(Status.MISS_CANCELLED)
        else:
            start = time.monotonic() + closing_s
            asyncio.run(tasks(client, closing_s))
        assert time.monotonic() - start < CLOSE_S
        del client
    print({status.label: number for status, number in statuses.items()})
    assert len(refusals) >= 60
    assert all("closed" in refusal for refusal in refusals), refusals
    assert statuses.get(Status.MISS_CANCELLED, 0) > 20, statuses
    del futures, future, threads, thread  # each keeps its client's descriptors
    gc.collect()
    wait_until_gone(*before)
    with Client.open([server.address]) as last:
        check_node_at_rest(last)


def test_a_child_forked_with_operations_in_flight(server: ServeProcess) -> None:
    """The child gets a clear error from every form of call, ends when it wants to, and takes nothing from its parent."""
    script = """
        import asyncio, os, sys, time
        from dfkv_core.client import Client, Item
        client = Client.open([sys.argv[1]])
        namespace = client.add_namespace(bytes([1, 0, 1, 0, 0, 0, 65]))
        data = bytearray(4 << 20)
        assert client.put(namespace, [Item(bytes(16), 0, data)], deadline_ms=5000).ok
        memories = [bytearray(4 << 20) for _ in range(20)]
        futures = [client.get_future(namespace, [Item(bytes(16), 0, memory)], deadline_ms=60000) for memory in memories]
        child = os.fork()
        if child == 0:
            attempts = [
                lambda: client.get(namespace, [Item(bytes(16), 0, memories[0])]),
                lambda: client.get_future(namespace, [Item(bytes(16), 0, memories[0])]),
                lambda: asyncio.run(client.lookup_async(namespace, [bytes(16)], [0])),
                lambda: client.ping(),
                lambda: client.add_namespace(bytes([1, 0, 1, 0, 0, 0, 66])),
                lambda: client.wait_ready(10),
                lambda: client.native.take_completed(10),
            ]
            for attempt in attempts:
                try:
                    attempt()
                except RuntimeError as error:
                    assert "fork" in str(error) and "after the fork" in str(error), error
                else:
                    raise AssertionError("no error")
            if sys.argv[2] == "exit":
                sys.exit(7)
            if sys.argv[2] == "drop":
                del futures, client, attempts
                import gc
                gc.collect()
            os._exit(7)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7, status
        assert all(future.result(10).ok for future in futures)
        assert client.stats()["disconnects"] == 0
        print("parent")
    """
    for ending in ("exit", "drop", "at once"):
        done = run_script(script, server.address, ending)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["parent"]
        assert done.stderr == ""


@pytest.mark.parametrize("ending", ["return", "exit inside", "pending at the end", "in a thread", "closing at exit"])
def test_the_interpreter_ends_amid_asyncio(server: ServeProcess, ending: str) -> None:
    script = """
        import asyncio, atexit, sys, threading, time
        from dfkv_core.client import Client, Item
        ending = sys.argv[2]
        client = Client.open([sys.argv[1]])
        namespace = client.add_namespace(bytes([1, 0, 1, 0, 0, 0, 65]))
        data = bytearray(4 << 20)
        assert client.put(namespace, [Item(bytes(16), 0, data)], deadline_ms=5000).ok
        if ending == "closing at exit":
            atexit.register(client.close)
        started = threading.Event()
        async def one():
            while True:
                await client.get_async(namespace, [Item(bytes(16), 0, bytearray(4 << 20))], deadline_ms=60000)
        async def main(stay=False):
            tasks = [asyncio.ensure_future(one()) for _ in range(20)]
            await asyncio.sleep(0.05)
            print("ending", flush=True)
            started.set()
            if ending == "exit inside":
                sys.exit(0)
            if stay:
                await asyncio.sleep(60)
            return tasks
        if ending == "in a thread":
            def run():
                try:
                    asyncio.run(main(stay=True))
                except RuntimeError as error:  # the client, or the interpreter, ends under it
                    assert "closed" in str(error) or "shutdown" in str(error), error
            threading.Thread(target=run, daemon=True).start()
            started.wait(30)
            time.sleep(0.05)
        elif ending == "pending at the end":
            loop = asyncio.new_event_loop()
            tasks = loop.run_until_complete(main())
        else:
            asyncio.run(main())
    """
    for _ in range(2):
        done = run_script(script, server.address, ending)
        assert done.returncode == 0, (done.returncode, done.stderr)
        assert done.stdout.split() == ["ending"]
        # Python itself says that a loop was left with tasks in it.
        left = [line for line in done.stderr.splitlines() if "Task was destroyed but it is pending" not in line]
        if ending in ("pending at the end", "in a thread"):
            left = [line for line in left if not line.startswith(("task: ", "sys:1: ", "Exception ignored"))]
        assert left == [], done.stderr
