"""What the scheduler's half knows of each request: its chunk ids, its lookup, and how far it is stored."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field
from typing import Any

from dfkv_core._native import BlockChain, Operation

from .extras import Extra


class Phase(enum.Enum):
    """HASHING: owned by the lookup thread. READY: owned by the scheduler thread. EXCLUDED: takes no part."""

    HASHING = 0
    READY = 1
    EXCLUDED = 2


@dataclass(slots=True)
class RequestState:
    """One request. Fields are owned by the thread that `phase` names; `phase` itself moves forward once per lookup."""

    request: Any
    chunk_blocks: int
    block_tokens: int
    asked_at_s: float
    phase: Phase = Phase.HASHING
    exclusion: str = ""
    chain: BlockChain = field(default_factory=BlockChain)
    extras: list[Extra] = field(default_factory=list)
    hashed_blocks: int = 0
    chunk_ids: bytearray = field(default_factory=bytearray)  # 16 bytes per chunk
    lookup: Operation | None = None
    lookup_at_s: float = 0.0
    dropped: bool = False  # the scheduler has let go of it; a lookup thread that still has it gives the lease back
    answered: bool = False  # the lookup was evaluated
    counted_found: int = -1  # tokens that the counters have as found; -1: this lookup is not counted yet
    declined: bool = False  # computing was judged faster than loading
    prefix_chunks: int = 0
    stored: set[int] = field(default_factory=set)  # chunks known to be in the cache
    local_tokens: int = 0  # of the last question
    pages: list[int] = field(default_factory=list)  # being loaded into
    load_chunks: tuple[int, int] = (0, 0)
    loading: bool = False
    load_failed: bool = False  # not tried again for this request
    next_save: int = 0  # first chunk not yet considered for saving
    sent: bool = False  # a save was given to the workers

    @property
    def chunk_tokens(self) -> int:
        return self.chunk_blocks * self.block_tokens

    def chunk_id(self, chunk: int) -> bytes:
        return bytes(self.chunk_ids[16 * chunk : 16 * chunk + 16])

    def hash_blocks(self, until_block: int) -> None:
        """Extends chain and chunk ids to `until_block` blocks. The owner's thread; about 4 us per 1,000 tokens."""
        first = self.hashed_blocks
        if until_block <= first:
            return
        tokens = array("I", self.request.all_token_ids[first * self.block_tokens : until_block * self.block_tokens])
        extras = [(b - first, tag, value) for b, tag, value in self.extras if first <= b < until_block]
        ids = self.chain.append_blocks(tokens, self.block_tokens, extras)
        for block in range(first, until_block):
            if (block + 1) % self.chunk_blocks == 0:
                self.chunk_ids += ids[16 * (block - first) : 16 * (block - first) + 16]
        self.hashed_blocks = until_block

    def restart(self, now_s: float) -> None:
        """After a preemption: pages are gone, what is stored may have changed; tokens and chain stand."""
        self.asked_at_s = now_s
        self.lookup = None
        self.answered = False
        self.counted_found = -1
        self.declined = False
        self.prefix_chunks = 0
        self.stored.clear()
        self.pages = []
        self.next_save = 0
        self.sent = False
        if self.phase is Phase.READY:
            self.phase = Phase.HASHING


class RecentSaves:
    """Chunks given to the workers lately, so that requests that compute the same prefix together store it once.

    A lookup sent well after the save is authoritative: a chunk that it does not find is offered again.
    """

    SETTLE_S = 2.0

    def __init__(self, capacity: int = 65536) -> None:
        self._at: dict[bytes, float] = {}
        self._capacity = capacity

    def add(self, chunk_id: bytes, now_s: float) -> None:
        self._at.pop(chunk_id, None)
        self._at[chunk_id] = now_s
        while len(self._at) > self._capacity:
            del self._at[next(iter(self._at))]

    def covers(self, chunk_id: bytes, lookup_at_s: float) -> bool:
        """Whether a lookup sent at `lookup_at_s` may have missed a save that was on its way."""
        at = self._at.get(chunk_id)
        return at is not None and lookup_at_s <= at + self.SETTLE_S

    def forget(self, chunk_id: bytes) -> None:
        self._at.pop(chunk_id, None)

    def clear(self) -> None:
        self._at.clear()
