"""What the connector's counters must be, from what the engine was told and what a fault proxy saw on the wire.

Nothing of the connector is asked: chunk ids come from the independent implementation in tests/reference.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from dfkv_core.keys import Status
from tests.integration.fault_proxy import FaultProxy
from tests.reference.identity import chain_next, chain_start

_CACHE_SALT = 2


class Question(Protocol):
    """What the oracle reads of an engine's request."""

    request_id: str
    all_token_ids: list[int]
    cache_salt: str | None


class FunnelOracle:
    """`expected` has the names of the connector's counters. The engine's thread."""

    def __init__(self, proxy: FaultProxy, block_tokens: int, chunk_blocks: int) -> None:
        self.expected: Counter[str] = Counter()
        self._proxy = proxy
        self._block_tokens = block_tokens
        self._chunk_tokens = block_tokens * chunk_blocks
        self._answered: set[str] = set()
        self._declined: set[str] = set()

    def answered(self, request: Question, local: int, external: int) -> None:
        """The connector has said that `external` tokens can be loaded beyond `local`; maybe not for the first time."""
        asked = (len(request.all_token_ids) - 1) // self._chunk_tokens * self._chunk_tokens
        if not asked:
            assert external == 0
            return
        seen = self._proxy.latest_lookup(self._chunk_id(request, asked))
        status, prefix = (Status.MISS_NODE_DOWN, 0) if seen is None else (seen.status, seen.prefix)
        assert status is not None
        found = max(0, prefix * self._chunk_tokens - local)
        assert external in (0, found), f"{request.request_id}: {external} offered beyond {local}; on the wire: {seen}"
        if request.request_id not in self._answered:
            self._answered.add(request.request_id)
            self.expected["tokens:asked"] += asked
            self.expected["tokens:local"] += min(asked, local)
            self.expected["tokens:found"] += found
            self.expected[f"lookups:{'hit' if prefix else status.label}"] += 1
            self.expected["lookup_round_trips"] += status not in (Status.MISS_NODE_DOWN, Status.MISS_DEADLINE)
        if found and not external and request.request_id not in self._declined:
            self._declined.add(request.request_id)
            self.expected["tokens:not_taken"] += found

    def asked_anew(self, request: Question) -> None:
        """The request was preempted: the engine will ask once more."""
        self._answered.discard(request.request_id)
        self._declined.discard(request.request_id)

    def _chunk_id(self, request: Question, until_token: int) -> bytes:
        tip = chain_start()
        for first in range(0, until_token, self._block_tokens):
            salt = [(_CACHE_SALT, request.cache_salt.encode())] if request.cache_salt and first == 0 else []
            tip = chain_next(tip, request.all_token_ids[first : first + self._block_tokens], salt)
        return tip[:16]
