"""One thread of a client process: the only one that writes its keys, and a reader of everybody's."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import TypeVar

from dfkv_core.client import Client, Item
from dfkv_core.keys import Status
from dfkv_core.results import BatchResult, Lookup
from tests.soak.content import Key, Record
from tests.soak.lateness import Overruns

T = TypeVar("T")

KEYS = 80  # of each writer
ARENA_BYTES = 8 << 20
ARENAS = 4  # each rests for three operations, poisoned, before it is used again
POISON = b"\xa5"
LEASE_MS = 3000
LEASED_BYTES = 1 << 20  # of one lookup, so that all of them stay below what a node lets be leased
LEASE_USED_S = 1.5
HANG_S = 10.0
MOST_FAULTS = 20
# What a spoiled wire, a full node or a dead one may answer.
EXPECTED = {
    *(Status.OK, Status.ALREADY, Status.MISS_NOT_FOUND, Status.MISS_EVICTED, Status.MISS_CORRUPT),
    *(Status.MISS_NODE_DOWN, Status.MISS_DEADLINE, Status.MISS_CANCELLED, Status.AGAIN_BUSY, Status.AGAIN_NO_MEMORY),
}
GONE = (Status.MISS_NOT_FOUND, Status.MISS_EVICTED)


class Writer:
    """run() until it is over, then read_everything(). One thread; what it counts may be read from others."""

    def __init__(self, seed: int, number: int, writers: int, client: Client, namespace: bytes) -> None:
        self._rng = random.Random(f"{seed}/{number}")
        self._client = client
        self._namespace = namespace
        self._keys = [Key.of(seed, number, i) for i in range(KEYS)]
        self._records = [Record() for _ in self._keys]
        others = [owner for owner in range(writers) if owner != number]
        self._foreign = [Key.of(seed, owner, i) for owner in others for i in range(KEYS)]
        self._arenas = [bytearray(ARENA_BYTES) for _ in range(ARENAS)]
        self._poisoned = [0] * ARENAS  # bytes from the start that must still be poison
        self._turn = 0
        self.overruns = Overruns()
        self.statuses: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        self.faults: list[str] = []
        self.verified_bytes = 0
        self.busy_since = time.monotonic()

    def run(self, until: float) -> None:
        kinds: list[tuple[Callable[[], None], int]] = [
            (self._get, 30),
            (self._get_foreign, 15),
            (self._put, 30),
            (self._replace, 8),
            (self._remove, 5),
            (self._lookup_and_get, 8),
            (self._cancel, 12),
        ]
        work, weights = [kind for kind, _ in kinds], [weight for _, weight in kinds]
        while time.monotonic() < until and len(self.faults) < MOST_FAULTS:
            self.busy_since = time.monotonic()
            self._rng.choices(work, weights)[0]()

    def read_everything(self) -> int:
        """After all faults have ended: every own key is right or absent. Returns how many are there."""
        there = 0
        for index in range(KEYS):
            memory = bytearray(self._keys[index].size_bytes)
            item = Item(self._keys[index].block_id, 0, memory)
            status = self._client.get(self._namespace, [item], deadline_ms=10_000).statuses[0]
            self._count([status])
            if status is Status.OK:
                there += 1
                self._check(self._keys[index], bytes(memory), self._records[index])
        return there

    # ---- kinds of operations

    def _get(self) -> None:
        chosen = self._choose(range(KEYS))
        views = self._places([self._keys[i] for i in chosen])
        deadline_s = self._deadline_s()
        result = self._timed(
            "get", deadline_s, lambda ms: self._client.get(self._namespace, self._items(chosen, views), deadline_ms=ms)
        )
        self._judge(chosen, views, result.statuses)

    def _get_foreign(self) -> None:
        keys: list[Key] = []
        for key in self._rng.sample(self._foreign, self._rng.randint(1, 8)):
            if sum(each.size_bytes for each in [*keys, key]) <= ARENA_BYTES:
                keys.append(key)
        views = self._places(keys)
        items = [Item(key.block_id, 0, view) for key, view in zip(keys, views, strict=True)]
        result = self._timed(
            "get", self._deadline_s(), lambda ms: self._client.get(self._namespace, items, deadline_ms=ms)
        )
        self._count(result.statuses)
        for key, view, status in zip(keys, views, result.statuses, strict=True):
            if status is Status.OK:
                self._check(key, bytes(view), None)

    def _put(self) -> None:
        self._write(self._choose(range(KEYS)), replace=False)

    def _replace(self) -> None:
        self._write(self._choose([i for i in range(KEYS) if self._keys[i].has_versions]), replace=True)

    def _write(self, chosen: list[int], *, replace: bool) -> None:
        versions, views = self._fill(chosen)
        items = self._items(chosen, views)
        before = self._disconnects()
        result = self._timed(
            "replace" if replace else "put",
            self._deadline_s(),
            lambda ms: self._client.put(self._namespace, items, deadline_ms=ms, replace=replace),
        )
        self._wrote(chosen, versions, list(result.statuses), before)

    def _disconnects(self) -> int:
        return int(self._client.stats()["disconnects"])

    def _remove(self) -> None:
        chosen = self._rng.sample(range(KEYS), self._rng.randint(1, 4))
        ids = [self._keys[i].block_id for i in chosen]
        result = self._timed(
            "remove", self._deadline_s(), lambda ms: self._client.remove(self._namespace, ids, 0, deadline_ms=ms)
        )
        self._count(result.statuses)
        for index, status in zip(chosen, result.statuses, strict=True):
            if status is Status.OK or status in GONE:
                self._records[index].removed()

    def _lookup_and_get(self) -> None:
        """What a lookup found and leased is there for the load that follows, unless its connection went."""
        chosen: list[int] = []
        for index in self._rng.sample(range(KEYS), 8):
            if sum(self._keys[i].size_bytes for i in [*chosen, index]) <= LEASED_BYTES:
                chosen.append(index)
        before = self._disconnects()
        started = time.monotonic()
        ids = [self._keys[i].block_id for i in chosen]
        found: Lookup = self._timed(
            "lookup",
            self._deadline_s(),
            lambda ms: self._client.lookup(self._namespace, ids, [0], deadline_ms=ms, lease_ms=LEASE_MS),
        )
        self._count(found.statuses)
        for index, status in zip(chosen, found.statuses, strict=True):
            if status is Status.OK and not self._records[index].may_be_there:
                self._fault(f"a lookup found a key that is not there: {index}")
        with found:
            leased = chosen[: found.prefix]
            if not leased:
                return
            views = self._places([self._keys[i] for i in leased])
            result = self._timed(
                "get", 1.0, lambda ms: self._client.get(found, self._items(leased, views), deadline_ms=ms)
            )
            self._judge(leased, views, result.statuses)
            whole = self._disconnects() == before and time.monotonic() - started < LEASE_USED_S
            lost = [status.label for status in result.statuses if status in GONE]
            if whole and lost:
                self._fault(f"leased objects were gone: {lost}")

    def _cancel(self) -> None:
        """Some operations at once, most of them cancelled on their way; their memory is nobody's from then on."""
        for _ in range(self._rng.randint(1, 4)):
            chosen = self._choose(range(KEYS))
            writes = self._rng.random() < 0.5
            if writes:
                versions, views = self._fill(chosen)
            else:
                versions, views = [], self._places([self._keys[i] for i in chosen])
            before = self._disconnects()
            start = self._client.put_future if writes else self._client.get_future
            future = start(self._namespace, self._items(chosen, views), deadline_ms=1000)
            self.operations["cancelled put" if writes else "cancelled get"] += 1
            time.sleep(self._rng.choice((0.0, 0.0005, 0.005)) * self._rng.random())
            result: BatchResult | None = None
            if not (self._rng.random() < 0.8 and future.cancel()):
                with contextlib.suppress(CancelledError):
                    result = future.result(HANG_S)
            statuses = [Status.MISS_CANCELLED] * len(chosen) if result is None else list(result.statuses)
            if writes:
                self._wrote(chosen, versions, statuses, before)
            else:
                self._judge(chosen, views, statuses)

    # ---- memory

    def _places(self, keys: list[Key]) -> list[memoryview]:
        """For each of the keys, which fit together, in memory that nothing may have touched since its last operation."""
        self._turn = (self._turn + 1) % ARENAS
        arena, poisoned = self._arenas[self._turn], self._poisoned[self._turn]
        if arena.count(POISON, 0, poisoned) != poisoned:
            self._fault("memory was written after its operation had ended")
        last = (self._turn - 1) % ARENAS  # the operation in it is over
        self._poison(last)
        views, at = [], 0
        whole = memoryview(arena)
        for key in keys:
            views.append(whole[at : at + key.size_bytes])
            at += key.size_bytes
        self._poisoned[self._turn] = -at  # in use
        return views

    def _poison(self, turn: int) -> None:
        used = -self._poisoned[turn]
        if used > 0:
            self._arenas[turn][:used] = POISON * used
            self._poisoned[turn] = used

    def _fill(self, chosen: list[int]) -> tuple[list[int], list[memoryview]]:
        """New versions of these keys, in memory."""
        views = self._places([self._keys[i] for i in chosen])
        versions = []
        for index, view in zip(chosen, views, strict=True):
            record = self._records[index]
            version = record.next_version
            record.next_version += self._keys[index].has_versions
            view[:] = self._keys[index].content(version)
            versions.append(version)
        return versions, views

    # ---- choices

    def _choose(self, indices: range | list[int]) -> list[int]:
        """A random batch that fits an arena."""
        chosen: list[int] = []
        total = 0
        for index in self._rng.sample(indices, self._rng.randint(1, 12)):
            total += self._keys[index].size_bytes
            if total > ARENA_BYTES:
                break
            chosen.append(index)
        return chosen

    def _deadline_s(self) -> float:
        return 0.001 * 100 ** self._rng.random() if self._rng.random() < 0.2 else 1.0

    def _items(self, chosen: list[int], views: list[memoryview]) -> list[Item]:
        return [Item(self._keys[i].block_id, 0, view) for i, view in zip(chosen, views, strict=True)]

    # ---- judgement

    def _timed(self, kind: str, deadline_s: float, ask: Callable[[float], T]) -> T:
        self.operations[kind] += 1
        started = time.monotonic()
        answer = ask(deadline_s * 1000)
        self.overruns.note(time.monotonic() - started, deadline_s)
        return answer

    def _wrote(self, chosen: list[int], versions: list[int], statuses: list[Status], disconnects: int) -> None:
        self._count(statuses)
        # A put whose connection went is sent again, and then finds what it has stored itself.
        sent_once = self._disconnects() == disconnects
        for index, version, status in zip(chosen, versions, statuses, strict=True):
            record = self._records[index]
            if status is Status.ALREADY and sent_once and not record.may_be_there:
                self._fault("a key that was never stored is there already")
            record.put_ended(version, acknowledged=status is Status.OK)

    def _judge(self, chosen: list[int], views: list[memoryview], statuses: Sequence[Status]) -> None:
        self._count(statuses)
        for index, view, status in zip(chosen, views, statuses, strict=True):
            if status is Status.OK:
                self._check(self._keys[index], bytes(view), self._records[index])

    def _check(self, key: Key, data: bytes, record: Record | None) -> None:
        self.verified_bytes += len(data)
        version = key.version_of(data)
        if version is None:
            self._fault(f"wrong bytes: {key.size_bytes} of {key.block_id.hex()}, from {data[:48].hex()}")
        elif record is not None and not record.may_be(version):
            self._fault(f"version {version} of {key.block_id.hex()}, which holds {record}")

    def _count(self, statuses: Sequence[Status]) -> None:
        for status in statuses:
            self.statuses[status.label] += 1
            if status not in EXPECTED:
                self._fault(f"unexpected status {status.label}")

    def _fault(self, text: str) -> None:
        self.faults.append(text)
