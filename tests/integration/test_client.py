"""The client against a real `dfkv serve`: round trips in every form, and every kind of memory."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dfkv_core import _native
from dfkv_core.client import Client, ClientClosedError, Item
from dfkv_core.config import ClientConfig
from dfkv_core.keys import ALL_PARTS, Status
from dfkv_core.memory import DeviceMemoryError, MemoryTypeError, segments_of
from dfkv_core.results import Lookup
from tests.integration.serve_process import ServeProcess, serving

DEADLINE_MS = 10_000.0
DESCRIPTOR = struct.pack("<HI", 1, 6) + b"client"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    with serving(tmp_path_factory.mktemp("client") / "serve.log", "--ram", "256MiB") as process:
        yield process


@pytest.fixture
def client(server: ServeProcess) -> Iterator[Client]:
    with Client.open([server.address]) as opened:
        yield opened


@pytest.fixture
def rng() -> random.Random:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    return random.Random(seed)


def blocks(rng: random.Random, count: int) -> list[bytes]:
    return [rng.randbytes(16) for _ in range(count)]


def cut(memory: memoryview, rng: random.Random) -> list[memoryview]:
    """`memory` as a few pieces."""
    places = sorted({0, len(memory), *(rng.randrange(len(memory) + 1) for _ in range(rng.randrange(4)))})
    return [memory[a:b] for a, b in itertools.pairwise(places)]


def test_round_trip_of_random_sizes(client: Client, rng: random.Random) -> None:
    namespace = client.add_namespace(DESCRIPTOR, "client tests")
    sizes = [1, 4096, 1 << 20, (1 << 20) + 1, 3_500_000, *(rng.randrange(1, 400_000) for _ in range(20))]
    ids = blocks(rng, len(sizes))
    stored = [rng.randbytes(size) for size in sizes]
    put = client.put(
        namespace,
        [Item(block, 7, cut(memoryview(data), rng)) for block, data in zip(ids, stored, strict=True)],
        deadline_ms=DEADLINE_MS,
    )
    assert put.ok, put.statuses
    assert put.payload_bytes == sum(sizes)

    missing = blocks(rng, 2)
    with client.lookup(namespace, [*ids, *missing], [7], deadline_ms=DEADLINE_MS, lease_ms=5000) as found:
        assert found.prefix == len(ids)
        assert found.statuses[len(ids)] is Status.MISS_NOT_FOUND
        assert found.owners() == [found.leases[0][0]] * len(found)
        received = [bytearray(size) for size in sizes]
        batch = [Item(block, 7, cut(memoryview(data), rng)) for block, data in zip(ids, received, strict=True)]
        get = client.get(found, [*batch, Item(missing[0], 7, bytearray(5))], deadline_ms=DEADLINE_MS)
    assert found.leases == []
    assert get.statuses.done() == [True] * len(ids) + [False]
    assert get.statuses.reasons() == {"ok": len(ids), "not_found": 1}
    assert [bytes(data) for data in received] == stored

    again = client.put(namespace, [Item(ids[0], 7, stored[0])], deadline_ms=DEADLINE_MS)
    assert again.statuses[0] is Status.ALREADY
    other = client.put(namespace, [Item(ids[0], 7, b"x")], deadline_ms=DEADLINE_MS, replace=True)
    assert other.statuses[0] is Status.OK
    wrong_length = client.get(namespace, [Item(ids[0], 7, bytearray(2))], deadline_ms=DEADLINE_MS)
    assert wrong_length.statuses[0] is Status.MISS_LENGTH

    gone = client.remove(namespace, ids[:2], [7, ALL_PARTS], deadline_ms=DEADLINE_MS)
    assert gone.ok
    assert client.lookup(namespace, ids, [7], deadline_ms=DEADLINE_MS).prefix == 0


def test_statistics_and_lists(client: Client, rng: random.Random) -> None:
    namespace = client.add_namespace(DESCRIPTOR, "client tests")
    block = blocks(rng, 1)[0]
    assert client.put(namespace, [Item(block, 0, b"abc")], deadline_ms=DEADLINE_MS).ok
    (listed,) = client.list_namespaces().values()
    assert listed is not None
    (mine,) = [entry for entry in listed if entry["id"] == namespace]
    assert mine["descriptor"] == DESCRIPTOR
    assert mine["label"] == "client tests"
    assert mine["objects"] >= 1
    (counters,) = client.node_stats().values()
    assert counters is not None
    assert counters["objects"] >= 1
    (microseconds,) = client.ping().values()
    assert microseconds is not None
    assert 0 < microseconds < 5_000_000
    stats = client.stats()
    assert stats["keys"]["put"] == {"ok": 1}
    assert stats["payload_bytes"]["put"] == 3
    assert stats["inflight_operations"] == 0
    assert [node["control_down"] for node in stats["nodes"]] == [False]
    assert client.native.namespace_difference(namespace) is not None
    (erased,) = client.erase(namespace).values()
    assert erased is not None
    assert erased >= 1


def test_at_most_two_gil_acquisitions_for_a_batch(client: Client, rng: random.Random) -> None:
    namespace = client.add_namespace(DESCRIPTOR)
    data = [bytearray(200_000) for _ in range(30)]
    batch = [Item(block, 0, each) for block, each in zip(blocks(rng, 30), data, strict=True)]
    assert client.put(namespace, batch, deadline_ms=DEADLINE_MS).ok
    before = client.stats()["gil_acquisitions"]
    assert client.get(namespace, batch, deadline_ms=DEADLINE_MS).ok
    after = client.stats()["gil_acquisitions"]
    assert after - before <= 2 + 1  # one for stats() itself


def test_asyncio(server: ServeProcess, rng: random.Random) -> None:
    ids = blocks(rng, 40)
    data = {block: rng.randbytes(30_000) for block in ids}

    async def use(client: Client, namespace: bytes) -> None:
        puts = [client.put_async(namespace, [Item(block, 0, data[block])], deadline_ms=DEADLINE_MS) for block in ids]
        assert all(result.ok for result in await asyncio.gather(*puts))
        found = await client.lookup_async(namespace, ids, [0], deadline_ms=DEADLINE_MS)
        assert found.prefix == len(ids)

        async def get(block: bytes) -> bool:
            memory = bytearray(30_000)
            result = await client.get_async(found, [Item(block, 0, memory)], deadline_ms=DEADLINE_MS)
            return result.ok and memory == data[block]

        assert all(await asyncio.gather(*[get(block) for block in ids]))

    with Client.open([server.address]) as client:
        namespace = client.add_namespace(DESCRIPTOR)
        asyncio.run(use(client, namespace))
        asyncio.run(use(client, namespace))  # another loop, the same client


def test_futures_of_threads_beside_asyncio(server: ServeProcess, rng: random.Random) -> None:
    block = blocks(rng, 1)[0]
    before = threading.active_count()
    with Client.open([server.address]) as client:
        namespace = client.add_namespace(DESCRIPTOR)
        stored = client.put_future(namespace, [Item(block, 0, b"data")], deadline_ms=DEADLINE_MS)
        assert stored.result(10).ok
        lookup = client.lookup_future(namespace, block, [0], deadline_ms=DEADLINE_MS).result(10)
        assert isinstance(lookup, Lookup)
        memories = [bytearray(4) for _ in range(200)]
        futures = [client.get_future(lookup, [Item(block, 0, memory)], deadline_ms=DEADLINE_MS) for memory in memories]

        async def beside() -> None:
            for _ in range(20):
                assert (await client.lookup_async(namespace, [block], [0], deadline_ms=DEADLINE_MS)).prefix == 1

        asyncio.run(beside())
        assert all(future.result(10).ok for future in futures)
        assert all(memory == b"data" for memory in memories)
        called: list[bool] = []
        future = client.lookup_future(namespace, [block], [0], deadline_ms=DEADLINE_MS)
        future.add_done_callback(lambda _: called.append(True))
        future.result(10)
    assert called == [True]
    assert threading.active_count() == before


def test_cancelling_ends_the_operation_first() -> None:
    # The kernel takes the connection, and nobody ever answers on it.
    listener = socket.create_server(("127.0.0.1", 0))
    silent = f"127.0.0.1:{listener.getsockname()[1]}"
    view: dict[str, Any] = {
        "cluster_id": bytes(16),
        "revision": 1,
        "placement_rule": 1,
        "nodes": [
            {
                "id": "silent", "incarnation": 0, "boot_id": bytes(16), "state": 1, "read_weight": 1, "write_weight": 1,
                "zone": "", "features": 0, "tcp": [silent], "rdma": [], "unix_path": "",
            }
        ],
    }  # fmt: skip
    native = _native.Client([], last_view=_native.encode_view(view), connect_timeout_ms=60_000)
    with listener, Client(native) as client:
        namespace = client.add_namespace(DESCRIPTOR)
        future = client.get_future(namespace, [Item(bytes(16), 0, bytearray(10))], deadline_ms=60_000)
        assert not future.done()
        assert future.cancel()
        assert future.cancelled()

        async def cancelled() -> None:
            memory = bytearray(10)
            task = asyncio.ensure_future(client.get_async(namespace, [Item(bytes(16), 0, memory)], deadline_ms=60_000))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancelled())
        assert client.stats()["cancelled"] == 2
        assert client.stats()["inflight_operations"] == 0


def test_a_configuration_opens_a_client(server: ServeProcess, tmp_path: Path) -> None:
    config = ClientConfig.model_validate({"addresses": [server.address], "lookup_deadline_ms": 1234, "lease_ms": 0})
    with Client.open(config) as client:
        assert client.deadlines.lookup_ms == 1234
        assert client.wait_ready(DEADLINE_MS)
        assert client.lookup(client.add_namespace(DESCRIPTOR), [bytes(16)], [0]).leases == []


def test_secrets(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"0123456789abcdef0123456789abcdef")
    secret.chmod(0o600)
    with serving(tmp_path / "serve.log", "--secret-file", str(secret)) as server:
        config = ClientConfig.model_validate({"addresses": [server.address], "secret_file": secret})
        with Client.open(config) as client:
            namespace = client.add_namespace(DESCRIPTOR)
            assert client.put(namespace, [Item(bytes(16), 0, b"x")], deadline_ms=DEADLINE_MS).ok
        for wrong in (None, b"another secret"):
            with Client.open([server.address], secret=wrong) as client:
                result = client.put(namespace, [Item(bytes(16), 0, b"x")], deadline_ms=DEADLINE_MS)
                assert result.statuses[0] is Status.MISS_NODE_DOWN
                assert "secret" in client.stats()["nodes"][0]["last_error"]


def test_a_closed_client_says_so(server: ServeProcess) -> None:
    client = Client.open([server.address])
    namespace = client.add_namespace(DESCRIPTOR)
    client.close()
    client.close()
    with pytest.raises(ClientClosedError):
        client.lookup(namespace, [bytes(16)], [0])
    with pytest.raises(RuntimeError, match="closed"):
        client.native.ping(100)


@pytest.mark.parametrize("address", ["host:0", "host:99999", "", "a b:1", "host:port"])
def test_wrong_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the text is the parser's
        Client.open([address])


def test_tables_that_do_not_fit_are_refused(client: Client) -> None:
    native = client.native
    namespace = client.add_namespace(DESCRIPTOR)
    item = bytes(32) + struct.pack("<II", 10, 0)
    memory = bytearray(10)
    segment = struct.pack("<QQ", segments_of(memory, writable=True)[0].address, 10)
    one = struct.pack("<I", 1)
    with pytest.raises(ValueError, match="entry"):
        native.get(namespace, item[:-1], segment, one, 100)
    with pytest.raises(ValueError, match="segments"):
        native.get(namespace, item, segment, struct.pack("<I", 2), 100)
    with pytest.raises(ValueError, match="items"):
        native.get(namespace, item * 2, segment, one, 100)
    with pytest.raises(ValueError, match="length"):
        native.put(namespace, bytes(32) + struct.pack("<II", 11, 0), segment, one, 100)
    with pytest.raises(ValueError, match="16 bytes"):
        native.get(b"short", item, segment, one, 100)
    with pytest.raises(ValueError, match="canonical"):
        native.add_namespace(b"\x01\x00")
    with pytest.raises(ValueError, match="not a number"):
        native.ping(float("nan"))


class TestMemory:
    """segments_of() on what engines have."""

    def test_bytes_and_buffers(self) -> None:
        data = bytearray(100)
        (whole,) = segments_of(data, writable=True)
        assert whole.length == 100
        (part,) = segments_of(memoryview(data)[10:30], writable=True)
        assert part == (whole.address + 10, 20)
        strided = segments_of(memoryview(data)[::50], writable=True)
        assert strided == [(whole.address, 1), (whole.address + 50, 1)]
        assert segments_of(b"", writable=False) == []
        assert segments_of((4096, 5), writable=True) == [(4096, 5)]
        assert segments_of([data, (0, 3)], writable=True) == [whole, (0, 3)]
        with pytest.raises(MemoryTypeError, match="only be read"):
            segments_of(b"constant", writable=True)
        with pytest.raises(MemoryTypeError, match="gives no memory"):
            segments_of(object(), writable=False)

    def test_numpy_pages(self) -> None:
        cache = np.zeros((2, 8, 16, 4), dtype=np.float16)
        base = cache.ctypes.data
        assert segments_of(cache, writable=True) == [(base, cache.nbytes)]
        page = segments_of(cache[:, 3], writable=True)
        assert page == [(base + half * 8 * 128 + 3 * 128, 128) for half in range(2)]
        cache.flags.writeable = False
        with pytest.raises(MemoryTypeError, match="only be read"):
            segments_of(cache, writable=True)
        with pytest.raises(MemoryTypeError):
            segments_of(np.array([object()]), writable=False)

    def test_dlpack(self) -> None:
        class Tensor:
            def __init__(self, array: np.ndarray[Any, Any], device: int) -> None:
                self.array = array
                self.device = device

            def __dlpack_device__(self) -> tuple[int, int]:
                return (self.device, 0)

            def __dlpack__(self) -> Any:
                return self.array.__dlpack__()

        array = np.arange(24, dtype=np.int32).reshape(4, 6)
        assert segments_of(Tensor(array, 1), writable=True) == [(array.ctypes.data, 96)]
        columns = segments_of(Tensor(array[:, 1:3], 1), writable=True)
        assert columns == [(array.ctypes.data + row * 24 + 4, 8) for row in range(4)]
        with pytest.raises(DeviceMemoryError, match="CUDA"):
            segments_of(Tensor(array, 2), writable=True)
