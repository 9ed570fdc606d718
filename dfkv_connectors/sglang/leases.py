"""Leases between a lookup and the load that follows it: SGLang makes them two unrelated calls."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

Leases = Sequence[tuple[str, int]]
MOST = 256


class LeaseBook:
    """Leases of lookups, by the last chunk that was found. Those that nobody collects end on the node with their time,
    and here when MOST newer ones have come. Any thread."""

    def __init__(self, release: Callable[[Leases], None]) -> None:
        self._release = release
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Leases] = OrderedDict()

    def keep(self, last_chunk: bytes, leases: Leases) -> None:
        if not leases:
            return
        with self._lock:
            given_up = [self._kept.pop(last_chunk, ())]
            self._kept[last_chunk] = leases
            while len(self._kept) > MOST:
                given_up.append(self._kept.popitem(last=False)[1])
        self._give_back(given_up)

    def loaded(self, last_chunk: bytes) -> None:
        """A load that ends with this chunk is over."""
        with self._lock:
            leases = self._kept.pop(last_chunk, ())
        self._give_back([leases])

    def close(self) -> None:
        with self._lock:
            kept, self._kept = list(self._kept.values()), OrderedDict()
        self._give_back(kept)

    def _give_back(self, many: Sequence[Leases]) -> None:
        for leases in many:
            if leases:
                self._release(leases)
