"""The scheduler's half of the connector: what to look up, load and save. It never waits and does no I/O."""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Mapping
from typing import Any

from dfkv_core._native import Client
from dfkv_core.config import VllmConnectorConfig
from dfkv_core.keys import Status, pack_parts
from dfkv_core.namespace import TAG_NAMES
from dfkv_core.worth import WorthEstimator

from .counters import Counters
from .lookups import LookupThread, give_back, lookup_chunks
from .messages import Geometry, LoadJob, SaveJob, StepMetadata, WorkerReport
from .requests import Phase, RecentSaves, RequestState

logger = logging.getLogger("vllm.dfkv")

# A lookup that is older than this share of its lease is asked again before its answer is used.
_FRESH_LEASE_SHARE = 0.5
_GIVE_UP_SLACK_MS = 50.0
_MIN_LOAD_DEADLINE_MS = 250.0


class SchedulerSide:
    """All methods: the engine core's scheduler thread, in the order that vLLM documents for connectors."""

    def __init__(self, config: VllmConnectorConfig, *, reads: bool, writes: bool, world_size: int) -> None:
        self._config = config
        self._reads = reads
        self._writes = writes
        self._world_size = world_size
        self.counters = Counters()
        self.off_reason = "no worker has reported its KV cache yet"
        self._client: Client | None = None
        self._lookups: LookupThread | None = None
        self._namespace = b""
        self._geometry = Geometry()
        self._chunk_bytes = 0
        self._states: dict[str, RequestState] = {}
        self._recent = RecentSaves()
        self._worth = WorthEstimator()
        self._loads: list[LoadJob] = []
        self._finished: list[str] = []
        self._cancelled: list[str] = []
        self._kv_cache_manager: Any = None
        self._told_difference = False

    # ---- start and stop ----

    def set_geometry(self, ranks: Mapping[Any, Geometry]) -> None:
        """Every rank's report. Ranks that disagree, or one that failed, leave the connector off."""
        reports = list(ranks.values())
        if (reason := _disagreement(reports, self._world_size)) is not None:
            self.switch_off(reason)
            return
        self._geometry = first = reports[0]
        parts = sorted({part for report in reports for part in report.parts})
        self._chunk_bytes = len(parts) * first.part_bytes
        config = self._config
        self._client = Client(
            config.seeds,
            name=f"{config.effective_name()[:110]}/scheduler",
            secret=config.read_secret(),
            connections_per_node=1,
            connect_timeout_ms=config.connect_timeout_ms,
            cooldown_ms=config.cooldown_ms,
            last_view_path=config.last_view_path,
            group=config.group,
        )
        self._namespace = self._client.add_namespace(first.descriptor, first.label)
        self._lookups = LookupThread(
            self._client,
            self._namespace,
            pack_parts(parts),
            deadline_ms=config.lookup_deadline_ms,
            lease_ms=config.lease_ms if self._reads else 0,
        )
        self.off_reason = ""
        logger.info(
            "dfkv: sharing KV in namespace %s (%s): chunks of %d tokens, %d parts of %d bytes",
            self._namespace.hex(),
            first.label,
            first.chunk_blocks * first.block_tokens,
            len(parts),
            first.part_bytes,
        )

    def bind_kv_cache_manager(self, manager: Any) -> None:
        self._kv_cache_manager = manager

    def switch_off(self, reason: str) -> None:
        """No lookups and saves from here on; loads under way are still accounted for."""
        if self.off_reason != reason:
            self.off_reason = reason
            logger.error("dfkv: off, the engine runs without it: %s", reason)

    def reset_cache(self) -> bool:
        """The engine was told to forget external KV, as after new weights: nothing stored so far fits any more."""
        self.switch_off("the engine's caches were reset, so its weights may have changed; restart it to share again")
        return True

    def shutdown(self) -> None:
        self.off_reason = "the engine is shutting down"
        self._states.clear()
        if self._lookups is not None:
            self._lookups.close()
        if self._client is not None:
            self._client.close()

    # ---- lookups ----

    def on_new_request(self, request: Any) -> None:
        if not self.off_reason and request.request_id not in self._states:
            self._begin(request)

    def _begin(self, request: Any) -> RequestState:
        state = RequestState(
            request, self._geometry.chunk_blocks, self._geometry.block_tokens, asked_at_s=time.monotonic()
        )
        self._states[request.request_id] = state
        assert self._lookups is not None
        self._lookups.submit(state)
        return state

    def matched_tokens(self, request: Any, local_tokens: int) -> int | None:
        """Tokens beyond `local_tokens` (a multiple of the block) to load; None: ask again at the next step."""
        state = self._states.get(request.request_id)
        if self.off_reason or (state is not None and state.load_failed):
            return 0
        if state is None:
            state = self._begin(request)
        if not self._answered(state, local_tokens):
            return None
        if state.phase is not Phase.READY or not self._reads:
            return 0
        state.local_tokens = local_tokens
        usable = min(state.prefix_chunks, lookup_chunks(request.num_tokens, state.chunk_tokens)) * state.chunk_tokens
        gain = usable - local_tokens
        if gain > 0 and not state.declined:
            verdict = self._worth.judge(gain, gain * self._chunk_bytes // state.chunk_tokens)
            if gain >= self._config.min_restore_tokens and verdict.take:
                return gain
            # Final: the engine may ask again for want of pages, and each request's tokens are counted once.
            state.declined = True
            self.counters.add("tokens", gain, "not_taken")
        self._release(state)
        return 0

    def _answered(self, state: RequestState, local_tokens: int) -> bool:
        """Evaluates the lookup once it is there. False while it is not, up to its deadline."""
        now_s = time.monotonic()
        pending = state.phase is Phase.HASHING or (state.lookup is not None and not state.lookup.done())
        if pending:
            if (now_s - state.asked_at_s) * 1e3 < self._config.lookup_deadline_ms + _GIVE_UP_SLACK_MS:
                return False
            if not state.answered:
                self._count_lookup(state, local_tokens, 0, Status.MISS_DEADLINE.label)
            if state.phase is Phase.HASHING:
                # The lookup thread owns the state: this request goes its way without it.
                self._drop(state)
                self._states[state.request.request_id] = self._excluded(state)
                return True
            state.answered = True
            self._release(state)
            return True
        if state.answered and state.lookup is not None:
            age_ms = (now_s - state.lookup_at_s) * 1e3
            if self._config.lease_ms and age_ms > self._config.lease_ms * _FRESH_LEASE_SHARE:
                self._look_up_again(state, now_s)
                return False
            return True
        if not state.answered:
            state.answered = True
            self._evaluate(state, local_tokens)
        return True

    def _look_up_again(self, state: RequestState, now_s: float) -> None:
        self._release(state)
        counted_found = state.counted_found
        state.restart(now_s)
        state.counted_found = counted_found  # still the same question of the engine
        assert self._lookups is not None
        self._lookups.submit(state)

    def _excluded(self, state: RequestState) -> RequestState:
        twin = RequestState(state.request, state.chunk_blocks, state.block_tokens, state.asked_at_s)
        twin.phase, twin.exclusion, twin.answered = Phase.EXCLUDED, "lookup_deadline", True
        return twin

    def _evaluate(self, state: RequestState, local_tokens: int) -> None:
        if state.phase is Phase.EXCLUDED:
            self.counters.add("not_shared_requests", label=state.exclusion)
            return
        if state.lookup is None:
            return  # shorter than a chunk
        statuses = state.lookup.statuses()
        codes = struct.unpack(f"<{len(statuses) // 2}H", statuses)
        state.stored = {chunk for chunk, code in enumerate(codes) if code == Status.OK}
        state.prefix_chunks = state.lookup.prefix
        found = state.prefix_chunks * state.chunk_tokens
        self._count_lookup(state, local_tokens, found, "hit" if found else Status(codes[0]).label)
        self.counters.add("lookup_round_trips", state.lookup.round_trips)
        if not found:
            self._tell_difference()

    def _count_lookup(self, state: RequestState, local_tokens: int, found_tokens: int, result: str) -> None:
        """Once for each time that the engine wants to admit the request; a refreshed answer adds what it found more."""
        asked = lookup_chunks(state.request.num_tokens, state.chunk_tokens) * state.chunk_tokens
        if not asked:
            return
        beyond = max(0, found_tokens - local_tokens)
        if state.counted_found < 0:
            self.counters.add("tokens", asked, "asked")
            self.counters.add("tokens", min(asked, local_tokens), "local")
            self.counters.add("lookups", label=result)
        self.counters.add("tokens", max(0, beyond - max(0, state.counted_found)), "found")
        state.counted_found = max(beyond, state.counted_found)

    def _tell_difference(self) -> None:
        """Once: a namespace that is almost this one says what keeps the two apart."""
        if self._told_difference or self._client is None:
            return
        tags = self._client.namespace_difference(self._namespace)
        if tags is None:
            return
        self._told_difference = True
        if tags:
            names = ", ".join(TAG_NAMES.get(tag, str(tag)) for tag in tags)
            logger.info("dfkv: nothing is stored for this engine yet; the nearest namespace differs in: %s", names)

    # ---- loads ----

    def allocated(self, request: Any, block_ids: list[int], external_tokens: int) -> None:
        """Pages for what matched_tokens() promised are there (external_tokens > 0), or nothing is to be loaded."""
        state = self._states.get(request.request_id)
        if external_tokens <= 0:
            return
        if state is None:
            raise RuntimeError(f"pages allocated for unknown request {request.request_id}")
        bt, ct = state.block_tokens, state.chunk_tokens
        first_chunk = state.local_tokens // ct
        end_token = state.local_tokens + external_tokens
        end_chunk = end_token // ct
        first_page = state.local_tokens // bt
        pages = [
            block_ids[page] if page >= first_page else -1
            for page in range(first_chunk * state.chunk_blocks, -(-end_token // bt))
        ]
        # The engine took another length than the one promised: no chunk ids, so that every page is reported as failed.
        whole = end_token == end_chunk * ct and end_chunk <= state.prefix_chunks
        chunk_ids = bytes(state.chunk_ids[16 * first_chunk : 16 * end_chunk]) if whole else b""
        state.pages = pages
        state.load_chunks = (first_chunk, end_chunk)
        state.loading = True
        self.counters.add("tokens", external_tokens, "taken")
        self._loads.append(LoadJob(request.request_id, chunk_ids, pages, self._load_deadline_ms(external_tokens)))

    def _load_deadline_ms(self, tokens: int) -> float:
        """A load that runs past the time to compute the same tokens is abandoned."""
        limit = float(self._config.load_deadline_ms)
        rate = self._worth.prefill_tokens_per_s
        return min(limit, max(_MIN_LOAD_DEADLINE_MS, tokens / rate * 1e3)) if rate else limit

    # ---- saves ----

    def step_metadata(self, output: Any) -> StepMetadata:
        """Everything the workers are to do around this step's forward."""
        # All of them, also those that have ended since: their pages are about to be written by others.
        preempted = list(output.preempted_req_ids or ())
        now_s = time.monotonic()
        for request_id in preempted:
            state = self._states.get(request_id)
            if state is None:
                continue
            self._release(state)
            if state.phase is Phase.READY:
                state.restart(now_s)
                if not self.off_reason:
                    assert self._lookups is not None
                    self._lookups.submit(state)
        metadata = StepMetadata(
            loads=self._loads,
            preempted=preempted,
            finished=self._finished,
            cancelled=self._cancelled,
            scheduled_tokens=output.total_num_scheduled_tokens,
        )
        self._loads, self._finished, self._cancelled = [], [], []
        if self._writes and not self.off_reason:
            for request_id, scheduled in output.num_scheduled_tokens.items():
                try:
                    job = self._plan_save(request_id, scheduled, output, now_s)
                except Exception:
                    # The rest of the metadata must reach the workers whatever one request does.
                    logger.exception("dfkv: request %s is not stored", request_id)
                    self.counters.add("faults", label="plan_save")
                    self._states[request_id].phase = Phase.EXCLUDED
                    continue
                if job is not None:
                    metadata.saves.append(job)
        return metadata

    def _plan_save(self, request_id: str, scheduled: int, output: Any, now_s: float) -> SaveJob | None:
        """Chunks whose every token is known and computed once this step has run, and that are not stored yet."""
        state = self._states.get(request_id)
        if state is None or state.phase is not Phase.READY:
            return None
        request = state.request
        known = request.num_tokens if self._config.save_generated else request.num_prompt_tokens
        full = min(request.num_computed_tokens + scheduled, known) // state.chunk_tokens
        if full <= state.next_save:
            return None
        state.hash_blocks(full * state.chunk_blocks)
        chunks = [
            chunk
            for chunk in range(state.next_save, full)
            if chunk not in state.stored and not self._recent.covers(state.chunk_id(chunk), state.lookup_at_s)
        ]
        state.next_save = full
        if not chunks:
            return None
        block_ids = self._block_ids(request_id, output)
        pages: list[int] = []
        ids = b""
        for chunk in chunks:
            chunk_pages = block_ids[chunk * state.chunk_blocks : (chunk + 1) * state.chunk_blocks]
            if len(chunk_pages) != state.chunk_blocks or 0 in chunk_pages:
                continue  # the null page: not held by the request any more
            pages += chunk_pages
            ids += state.chunk_id(chunk)
            self._recent.add(state.chunk_id(chunk), now_s)
        if not pages:
            return None
        state.sent = True
        rate = self._worth.prefill_tokens_per_s
        return SaveJob(request_id, ids, pages, int(state.chunk_tokens / rate * 1e6) if rate else 0)

    def _block_ids(self, request_id: str, output: Any) -> list[int]:
        block_state = getattr(output, "kv_connector_block_state", None)
        tables = block_state.get_block_ids(request_id) if block_state is not None else None
        if tables is None:
            tables = self._kv_cache_manager.get_block_ids(request_id)
        return list(tables[0])

    # ---- ends ----

    def request_finished(self, request: Any) -> bool:
        """True: the pages stay until the workers report the request as sent."""
        state = self._states.pop(request.request_id, None)
        if state is None:
            return False
        self._drop(state)
        if state.loading:
            # The engine itself keeps the pages of an aborted load until it is reported as received.
            loadable = sum(1 for page in state.pages if page >= 0)
            self.counters.add("tokens", loadable * state.block_tokens, "abandoned")
            self._cancelled.append(request.request_id)
            return False
        if state.sent:
            self._finished.append(request.request_id)
        return state.sent

    def worker_output(self, output: Any) -> None:
        invalid = set(output.invalid_block_ids or ())
        for request_id in output.finished_recving or ():
            state = self._states.get(request_id)
            if state is None or not state.loading:
                continue
            state.loading = False
            self._release(state)
            pages = [page for page in state.pages if page >= 0]
            # The engine computes again from the first failed page on, whatever arrived behind it.
            loaded = next((index for index, page in enumerate(pages) if page in invalid), len(pages))
            bt = state.block_tokens
            self.counters.add("tokens", loaded * bt, "loaded")
            self.counters.add("tokens", (len(pages) - loaded) * bt, "failed")
            if loaded < len(pages):
                state.load_failed = True
                state.stored.difference_update(range(*state.load_chunks))
            state.pages = []
        report = getattr(output, "kv_connector_worker_meta", None)
        if isinstance(report, WorkerReport):
            for tokens, seconds in report.prefill:
                self._worth.observe_prefill(tokens, seconds)
            for payload_bytes, seconds in report.loaded:
                self._worth.observe_load(payload_bytes * self._world_size, seconds)
            for chunk_id in report.unsaved:
                self._recent.forget(chunk_id)

    def _release(self, state: RequestState) -> None:
        """Of a state that the scheduler owns."""
        if self._client is not None:
            give_back(self._client, state)

    def _drop(self, state: RequestState) -> None:
        """Lets go of a state, whichever thread owns it now."""
        state.dropped = True
        if state.phase is not Phase.HASHING:
            self._release(state)


def _disagreement(reports: list[Geometry], world_size: int) -> str | None:
    """Why these ranks cannot share, or None."""
    for report in reports:
        if report.error:
            return report.error
    if len(reports) != world_size:
        return f"{len(reports)} of {world_size} workers reported their KV cache"
    first = reports[0]
    for report in reports[1:]:
        for name in ("descriptor", "part_bytes", "chunk_blocks", "block_tokens"):
            if getattr(report, name) != getattr(first, name):
                return f"workers disagree on {name}"
    return None
