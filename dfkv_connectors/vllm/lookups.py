"""Lookups off the scheduler's thread: hashing in slices, then one EXISTS, never a wait."""

from __future__ import annotations

import logging
import queue
import threading
import time

from dfkv_core._native import Client
from dfkv_core.keys import BLOCK_ID_BYTES, pack_chunks

from .extras import AdapterDigests, NotShareableError, request_extras
from .requests import Phase, RequestState

logger = logging.getLogger("vllm.dfkv")

SLICE_TOKENS = 4096  # hashed at a time, so that the interpreter lock is never held for long


class LookupThread:
    """One daemon thread that prepares requests: extras, chunk ids of the whole prompt, then the lookup itself.

    submit() is called by the scheduler thread and returns at once. A state handed over in phase HASHING comes back in
    READY or EXCLUDED; until then only this thread touches it, `dropped` apart.
    """

    def __init__(self, client: Client, namespace: bytes, parts: bytes, *, deadline_ms: float, lease_ms: int) -> None:
        self._client = client
        self._namespace = namespace
        self._parts = parts
        self._deadline_ms = deadline_ms
        self._lease_ms = lease_ms
        self._adapters = AdapterDigests()
        self._queue: queue.SimpleQueue[RequestState | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="dfkv-lookup", daemon=True)
        self._thread.start()

    def submit(self, state: RequestState) -> None:
        self._queue.put(state)

    def close(self, timeout_s: float = 2.0) -> None:
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (state := self._queue.get()) is not None:
            try:
                self._prepare(state)
            except NotShareableError as reason:
                state.exclusion = str(reason)
                state.phase = Phase.EXCLUDED
            except Exception:
                logger.exception("dfkv: request %s is not shared", state.request.request_id)
                state.exclusion = "error"
                state.phase = Phase.EXCLUDED

    def _prepare(self, state: RequestState) -> None:
        request = state.request
        if state.hashed_blocks == 0:
            state.extras = request_extras(request, state.block_tokens, self._adapters)
        blocks = request.num_tokens // state.block_tokens
        step = max(1, SLICE_TOKENS // state.block_tokens)
        for until in range(min(state.hashed_blocks + step, blocks), blocks + step, step):
            state.hash_blocks(min(until, blocks))
        chunks = lookup_chunks(request.num_tokens, state.chunk_tokens)
        if chunks and not state.dropped:
            table = pack_chunks(bytes(state.chunk_ids[: BLOCK_ID_BYTES * chunks]))
            state.lookup_at_s = time.monotonic()
            state.lookup = self._client.exists(self._namespace, table, self._parts, self._deadline_ms, self._lease_ms)
        state.phase = Phase.READY
        if state.dropped:  # whoever is second sees what the first has set: the scheduler sets this, then reads `phase`
            give_back(self._client, state)


def give_back(client: Client, state: RequestState) -> None:
    """Ends the lookup of a state, and with it the lease that it has or is about to get.

    Never raises: a lease that is not given back ends with its time.
    """
    lookup, state.lookup = state.lookup, None
    if lookup is None:
        return
    try:
        lookup.cancel()  # the client itself gives back what comes after that
        if leases := lookup.leases():
            client.release(leases)
    except Exception:
        logger.exception("dfkv: a lease could not be given back")


def lookup_chunks(num_tokens: int, chunk_tokens: int) -> int:
    """Chunks that a restore may use: at least one token is left to compute, as after a local prefix hit."""
    return max(0, num_tokens - 1) // chunk_tokens
