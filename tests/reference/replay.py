"""A slow and obvious simulator: lists of names, coldest first, and the rules as sentences would have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

Requests = Sequence[Sequence[int]]


def lru_ref(requests: Requests, capacity: int) -> list[int]:
    """Head first, each block looked up and then inserted before the next one."""
    held: list[int] = []
    hits = []
    for request in requests:
        count, unbroken = 0, True
        for block in request:
            if block in held:
                count += unbroken
                held.remove(block)
            else:
                unbroken = False
                del held[: max(0, len(held) + 1 - capacity)]
            held.append(block)
        hits.append(count)
    return hits


def lru_tail(requests: Requests, capacity: int) -> list[int]:
    """Hits are counted first; then the whole request is touched and inserted from its tail on."""
    held: list[int] = []
    hits = []
    for request in requests:
        hits.append(_prefix(request, held))
        for block in reversed(request):
            if block in held:
                held.remove(block)
            else:
                del held[: max(0, len(held) + 1 - capacity)]
            held.append(block)
    return hits


def unbounded(requests: Requests) -> list[int]:
    seen: set[int] = set()
    hits = []
    for request in requests:
        hits.append(_prefix(request, seen))
        seen.update(request)
    return hits


class Policy(Protocol):
    """What a store of single blocks asks of its policy. Names stand for chunks."""

    def insert(self, block: int) -> None: ...
    def touch(self, batch: Sequence[int]) -> None: ...
    def stored(self, batch: Sequence[int]) -> None: ...
    def evict(self) -> int: ...


def node(requests: Requests, capacity: int, make: Callable[[], Policy]) -> list[int]:
    """A node: the leading held blocks are read in one batch, the others written in one batch, in their order."""
    policy = make()
    held: set[int] = set()
    hits = []
    for request in requests:
        count = _prefix(request, held)
        hits.append(count)
        if count:
            policy.touch(request[:count])
        for block in request[count:]:
            if block not in held:
                if len(held) == capacity:
                    held.remove(policy.evict())
                policy.insert(block)
                held.add(block)
            policy.stored([block])
        policy.stored([block for block in request[count:] if block in held])
    return hits


@dataclass
class Lru:
    order: list[int] = field(default_factory=list)

    def insert(self, block: int) -> None:
        self.order.append(block)

    def touch(self, batch: Sequence[int]) -> None:
        for block in reversed(batch):
            self.order.remove(block)
            self.order.append(block)

    def stored(self, batch: Sequence[int]) -> None:
        self.touch(batch)

    def evict(self) -> int:
        return self.order.pop(0)


@dataclass
class AdaptiveLru:
    """Two lists; native/slab/eviction_adaptive.cpp says why."""

    once: list[int] = field(default_factory=list)
    again: list[int] = field(default_factory=list)
    used_at: dict[int, int] = field(default_factory=dict)
    ghosts: list[tuple[int, bool, int]] = field(default_factory=list)  # block, was on again, when; oldest first
    now: int = 0
    lead: float = 0.0

    def insert(self, block: int) -> None:
        self.now += 1
        known = [ghost for ghost in self.ghosts if ghost[0] == block]
        if known:
            self._learn(*known[0][1:])
            self.ghosts.remove(known[0])
        (self.again if known else self.once).append(block)
        self.used_at[block] = self.now

    def touch(self, batch: Sequence[int]) -> None:
        for block in reversed(batch):
            self._move(block, self.again)

    def stored(self, batch: Sequence[int]) -> None:
        for block in reversed(batch):
            self._move(block, self.once if block in self.once else self.again)

    def evict(self) -> int:
        most = 3 * (len(self.once) + len(self.again))
        from_again = not self.once or (
            bool(self.again) and self.used_at[self.once[0]] > self.used_at[self.again[0]] + max(self.lead, 0.0)
        )
        block = (self.again if from_again else self.once).pop(0)
        self.ghosts.append((block, from_again, self.now))
        del self.ghosts[: max(0, len(self.ghosts) - most)]
        return block

    def _move(self, block: int, to: list[int]) -> None:
        (self.once if block in self.once else self.again).remove(block)
        to.append(block)
        self.used_at[block] = self.now

    def _learn(self, was_on_again: bool, evicted_at: int) -> None:
        turnover = len(self.once) + len(self.again) + 1
        same = sum(ghost[1] == was_on_again for ghost in self.ghosts)
        other = len(self.ghosts) - same
        near = self.now - evicted_at <= 0.25 * turnover
        step = 2.0 * (1.0 if near else 0.25) * max(1.0, other / same)
        self.lead += step if was_on_again else -step
        self.lead = min(max(self.lead, -1.0 * turnover), 16.0 * turnover)


@dataclass
class Sieve:
    order: list[int] = field(default_factory=list)
    read: set[int] = field(default_factory=set)
    hand: int | None = None

    def insert(self, block: int) -> None:
        self.order.append(block)

    def touch(self, batch: Sequence[int]) -> None:
        self.read.update(batch)

    def stored(self, batch: Sequence[int]) -> None:
        pass

    def evict(self) -> int:
        at = self.order.index(self.hand) if self.hand is not None else 0
        while self.order[at] in self.read:
            self.read.remove(self.order[at])
            at = (at + 1) % len(self.order)
        block = self.order.pop(at)
        self.hand = self.order[at] if at < len(self.order) else None
        return block


@dataclass
class S3Fifo:
    small: list[int] = field(default_factory=list)
    main: list[int] = field(default_factory=list)
    ghosts: list[int] = field(default_factory=list)
    reads: dict[int, int] = field(default_factory=dict)

    def insert(self, block: int) -> None:
        if block in self.ghosts:
            self.ghosts.remove(block)
            self.main.append(block)
        else:
            self.small.append(block)
        self.reads[block] = 0

    def touch(self, batch: Sequence[int]) -> None:
        for block in batch:
            self.reads[block] = min(3, self.reads[block] + 1)

    def stored(self, batch: Sequence[int]) -> None:
        pass

    def evict(self) -> int:
        while True:
            size = len(self.small) + len(self.main)
            if self.small and (len(self.small) >= max(1, size // 10) or not self.main):
                block = self.small.pop(0)
                if self.reads[block] > 1:
                    self.reads[block] = 0
                    self.main.append(block)
                    continue
                size -= 1
                self.ghosts.append(block)
                del self.ghosts[: max(0, len(self.ghosts) - (size - size // 10))]
                return block
            block = self.main.pop(0)
            if self.reads[block] == 0:
                return block
            self.reads[block] -= 1
            self.main.append(block)


def _prefix(request: Sequence[int], held: Sequence[int] | set[int]) -> int:
    count = 0
    while count < len(request) and request[count] in held:
        count += 1
    return count
