"""Locks of lookups: LMCache unlocks key by key, a node keeps one lease for all that a lookup found there.

A lease is given back when the last of its keys is unlocked. Until then every key that is still locked is under a lease.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

Leases = Sequence[tuple[str, int]]


@dataclass(eq=False)
class _Lock:
    """One lookup's leases, and how many of its keys are still locked."""

    leases: Leases
    keys: Sequence[Hashable]
    ends_s: float
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = len(self.keys)


class LockBook:
    """Any thread. What nobody unlocks ends on the node with its time, and here too: at the next call."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._locks: deque[_Lock] = deque()  # in the order in which they end
        self._of: dict[Hashable, deque[_Lock]] = {}  # oldest first

    def lock(self, keys: Sequence[Hashable], leases: Leases, now_s: float, lease_s: float) -> None:
        """leases: over all of `keys`, from now on for lease_s."""
        if not keys or not leases:
            return
        taken = _Lock(leases, keys, now_s + lease_s)
        with self._mutex:
            self._expire(now_s)
            self._locks.append(taken)
            for key in keys:
                self._of.setdefault(key, deque()).append(taken)

    def unlock(self, keys: Sequence[Hashable], now_s: float) -> list[tuple[str, int]]:
        """One lock of each key ends, the oldest; unknown keys are passed over. Returns the leases to give back."""
        over: list[tuple[str, int]] = []
        with self._mutex:
            self._expire(now_s)
            for key in keys:
                of_key = self._of.get(key)
                if not of_key:
                    continue
                oldest = of_key.popleft()
                if not of_key:
                    del self._of[key]
                oldest.left -= 1
                if not oldest.left:
                    over += oldest.leases
        return over

    def take_all(self) -> list[tuple[str, int]]:
        """Every lease that is held, given up."""
        with self._mutex:
            held = [lease for lock in self._locks if lock.left for lease in lock.leases]
            self._locks.clear()
            self._of.clear()
        return held

    @property
    def locked_keys(self) -> int:
        with self._mutex:
            return sum(map(len, self._of.values()))

    def _expire(self, now_s: float) -> None:
        while self._locks and (not self._locks[0].left or self._locks[0].ends_s <= now_s):
            ended = self._locks.popleft()
            if not ended.left:
                continue
            for key in set(ended.keys):
                kept = deque(lock for lock in self._of.get(key, ()) if lock is not ended)
                if kept:
                    self._of[key] = kept
                else:
                    self._of.pop(key, None)
