"""The measurement: stores take turns, medians of the repeats, and the ratio of each turn of dfkv to the other's beside it."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from bench_peers.dfkv_store import DfkvStore
from bench_peers.mooncake_store import MooncakeStore
from bench_peers.objects import Objects
from bench_peers.pipelined import MemcachedStore, RedisStore
from bench_peers.store import Store, StoreFailedError, StoreMissingError

KINDS: tuple[Callable[[int], Store], ...] = (DfkvStore, MooncakeStore, MemcachedStore, RedisStore)
RUN_S = 0.4  # of one turn, at least
CAPACITY_BATCHES = 3
LEAST_CAPACITY_BYTES = 512 << 20

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """ratio: the median over the repeats of dfkv's rate over this store's in the same repeat; 1 for dfkv itself."""

    store: str
    op: str
    size_bytes: int
    batch: int
    gb_per_s: float
    low_gb_per_s: float
    high_gb_per_s: float
    ratio: float
    repeats: int


@dataclass(frozen=True)
class Report:
    rows: list[Row]
    versions: dict[str, str]
    hows: dict[str, str]
    missing: list[str]


def measure(sizes_bytes: Sequence[int], batch: int, repeats: int, tell: Tell) -> Report:
    """Raises StoreFailedError when a store loses objects or gives back other bytes."""
    rows: list[Row] = []
    versions: dict[str, str] = {}
    hows: dict[str, str] = {}
    missing: list[str] = []
    kinds = list(KINDS)
    for size_bytes in sizes_bytes:
        with contextlib.ExitStack() as stack:
            stores: list[Store] = []
            for kind in list(kinds):
                tell(f"{size_bytes >> 10} KiB: starting the stores")
                try:
                    store = kind(_capacity_bytes(batch, size_bytes))
                except StoreMissingError as error:
                    missing.append(str(error))
                    kinds.remove(kind)
                    continue
                stack.callback(store.close)
                stores.append(store)
                versions[store.name], hows[store.name] = store.version, store.how
            objects = Objects(batch, size_bytes)
            stack.callback(objects.close)
            rows += _turns(stores, objects, repeats, tell)
    return Report(rows, versions, hows, missing)


def _capacity_bytes(batch: int, size_bytes: int) -> int:
    return max(CAPACITY_BATCHES * batch * size_bytes, LEAST_CAPACITY_BYTES)


def _turns(stores: list[Store], objects: Objects, repeats: int, tell: Tell) -> Iterator[Row]:
    names: dict[str, list[bytes]] = {}
    for store in stores:
        tell(f"{objects.size_bytes >> 10} KiB: filling {store.name}")
        for _ in range(-(-_capacity_bytes(objects.count, objects.size_bytes) // objects.total_bytes)):
            _put_anew(store, objects)
        names[store.name] = objects.ids
    rates: dict[tuple[str, str], list[float]] = {}
    for repeat in range(repeats):
        # Everybody is first, and everybody is last, equally often.
        order = stores[repeat % len(stores) :] + stores[: repeat % len(stores)]
        for store in order:
            tell(f"{objects.size_bytes >> 10} KiB: {store.name}, {repeat + 1} of {repeats}")
            objects.ids = names[store.name]
            rates.setdefault((store.name, "put"), []).append(_rate(objects, partial(_put_anew, store, objects)))
            names[store.name] = objects.ids
            objects.blank()
            rates.setdefault((store.name, "get"), []).append(_rate(objects, partial(store.get, objects)))
            if not objects.are_right():
                raise StoreFailedError(f"{store.name} gave back other bytes than it was given")
    for (name, op), each in rates.items():
        own = rates[DfkvStore.name, op]
        yield Row(
            store=name,
            op=op,
            size_bytes=objects.size_bytes,
            batch=objects.count,
            gb_per_s=round(statistics.median(each), 3),
            low_gb_per_s=round(min(each), 3),
            high_gb_per_s=round(max(each), 3),
            ratio=round(statistics.median(mine / theirs for mine, theirs in zip(own, each, strict=True)), 2),
            repeats=repeats,
        )


def _put_anew(store: Store, objects: Objects) -> float:
    """A put under new names; what was stored before it is no longer wanted."""
    store.forget(objects)
    objects.rename()
    return store.put(objects)


def _rate(objects: Objects, work: Callable[[], float]) -> float:
    seconds, rounds = 0.0, 0
    while seconds < RUN_S:
        seconds += work()
        rounds += 1
    return rounds * objects.total_bytes / seconds / 1e9
