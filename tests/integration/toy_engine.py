"""A small engine that keeps vLLM's promises to a connector, with an oracle that knows every byte of every page.

It has pages, chunked prefill, decoding, preemption, aborts and asynchronous loads, in vLLM's order of hooks. "Computing" a
block writes bytes that are a function of the tokens up to its end, so that whatever a page or a stored object holds
can be checked. Pages are scribbled over as soon as they are handed to somebody else.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt

from dfkv_connectors.vllm.layout import ChunkMap, EngineView, HeadShare, PagedLayout
from dfkv_connectors.vllm.messages import StepMetadata
from dfkv_connectors.vllm.scheduler import SchedulerSide
from dfkv_connectors.vllm.worker import WorkerSide
from dfkv_core.config import VllmConnectorConfig
from tests.integration.funnel_oracle import FunnelOracle

BLOCK_TOKENS = 16
CHUNK_BLOCKS = 2
LAYERS = 3
HEADS = 4
HEAD_BYTES = 2048


@dataclass(eq=False)
class ToyRequest:
    """The attributes of vLLM's Request that the connector reads, and the toy's own bookkeeping."""

    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int
    cache_salt: str | None = None
    num_computed_tokens: int = 0
    max_new_tokens: int = 8
    pages: list[int] = field(default_factory=list)
    status: str = "waiting"  # waiting, loading, running, finished
    load_failed: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class ToyEngine:
    """One engine process: scheduler half, worker half, `num_pages` pages. Single-threaded; step() is one engine step."""

    def __init__(
        self, config: VllmConnectorConfig, seed: int, num_pages: int = 64, granules: int = 4, descriptor: bytes = b""
    ) -> None:
        self.random = random.Random(seed)
        self.memory: npt.NDArray[np.uint8] = np.zeros((LAYERS, num_pages, HEADS, HEAD_BYTES), dtype=np.uint8)
        layout = PagedLayout(
            num_blocks=num_pages,
            block_tokens=BLOCK_TOKENS,
            head_bytes=HEAD_BYTES,
            bases=tuple(self.memory[layer].ctypes.data for layer in range(LAYERS)),
            block_strides=(HEADS * HEAD_BYTES,) * LAYERS,
            head_strides=(HEAD_BYTES,) * LAYERS,
            shape=(HEADS, BLOCK_TOKENS, HEAD_BYTES // BLOCK_TOKENS),
            dtype="uint8",
        )
        heads = HeadShare(HEADS, HEADS, granules, 0, granules, True)
        self.chunks = ChunkMap(layout, heads, CHUNK_BLOCKS, 0)
        self.worker = WorkerSide(config)
        self.worker.attach(EngineView(self.chunks, True, descriptor, "toy"), 0)
        self.scheduler = SchedulerSide(config, reads=True, writes=True, world_size=1)
        self.scheduler.set_geometry({(0, 0): self.worker.geometry})
        self.scheduler.bind_kv_cache_manager(SimpleNamespace(get_block_ids=lambda rid: (self.requests[rid].pages,)))
        assert self.scheduler.off_reason == ""
        self.free = list(range(1, num_pages))
        self.requests: dict[str, ToyRequest] = {}
        self.preempted_now: set[str] = set()
        self.new_pages: list[int] = []
        self.local_hits: list[ToyRequest] = []
        self.received: set[str] = set()
        self.oracle: dict[bytes, npt.NDArray[np.uint8]] = {}  # chunk id -> [granule, bytes]
        self.loads_checked = 0
        self.tokens_loaded = 0
        self.tokens_failed = 0
        self.preemptions = 0
        self.funnel: FunnelOracle | None = None

    # ---- the oracle ----

    def block_bytes(self, request: ToyRequest, block: int) -> npt.NDArray[np.uint8]:
        """[layer, head, bytes] of a block: a function of every token up to its end, and of the salt."""
        tokens = array("I", request.all_token_ids[: (block + 1) * BLOCK_TOKENS])
        seed = hashlib.sha256(tokens.tobytes() + (request.cache_salt or "").encode()).digest()
        raw = hashlib.shake_128(seed).digest(LAYERS * HEADS * HEAD_BYTES)
        return np.frombuffer(raw, dtype=np.uint8).reshape(LAYERS, HEADS, HEAD_BYTES)

    def remember_chunks(self, request: ToyRequest) -> None:
        """Records what each full chunk of `request` must be wherever it is found."""
        state = self.scheduler._states.get(request.request_id)
        if state is None:
            return
        for chunk in range(len(state.chunk_ids) // 16):
            chunk_id = state.chunk_id(chunk)
            if chunk_id not in self.oracle:
                blocks = [self.block_bytes(request, chunk * CHUNK_BLOCKS + b) for b in range(CHUNK_BLOCKS)]
                # Object bytes: block, layer, head of the granule (one head each here).
                stacked = np.stack(blocks)  # [block, layer, head, bytes]
                self.oracle[chunk_id] = stacked.transpose(2, 0, 1, 3).reshape(HEADS, -1)

    def check_load(self, request: ToyRequest) -> None:
        """Live pages were left alone, and every other one below num_computed_tokens holds its own bytes."""
        self.memory[:, request.pages[: self.local_hit(request) // BLOCK_TOKENS]] ^= 0xFF
        self.check_pages(request, request.num_computed_tokens)
        self.loads_checked += 1

    def check_pages(self, request: ToyRequest, until_token: int) -> None:
        for block in range(until_token // BLOCK_TOKENS):
            got = self.memory[:, request.pages[block]]
            assert np.array_equal(got, self.block_bytes(request, block)), (
                f"{request.request_id}: block {block} holds bytes that are not its own"
            )

    # ---- pages ----

    def take_pages(self, count: int) -> list[int] | None:
        if len(self.free) < count:
            return None
        taken = [self.free.pop() for _ in range(count)]
        self.new_pages += taken
        return taken

    def pages_to_run(self, request: ToyRequest) -> int:
        """What `request` still needs until its first new token is computed."""
        return -(-(request.num_tokens + 1) // BLOCK_TOKENS) - len(request.pages)

    def pages_promised(self) -> int:
        """To requests that wait while holding loaded pages: they could wait for each other's for ever."""
        holders = [r for r in self.requests.values() if r.status in ("waiting", "loading") and r.pages]
        return sum(self.pages_to_run(holder) for holder in holders)

    def give_pages(self, request: ToyRequest) -> None:
        self.free += request.pages
        request.pages = []

    # ---- requests ----

    def add(self, request: ToyRequest) -> None:
        self.requests[request.request_id] = request
        self.scheduler.on_new_request(request)

    def abort(self, request: ToyRequest) -> None:
        self.finish(request)

    def finish(self, request: ToyRequest) -> None:
        loading = request.status == "loading" and request.request_id not in self.received
        request.status = "finished"
        keep = self.scheduler.request_finished(request) or loading
        if not keep:
            self.give_pages(request)
            del self.requests[request.request_id]

    def preempt(self, request: ToyRequest) -> None:
        self.give_pages(request)
        request.num_computed_tokens = 0
        request.status = "waiting"
        self.preempted_now.add(request.request_id)
        self.preemptions += 1
        if self.funnel is not None:
            self.funnel.asked_anew(request)

    # ---- a step ----

    def step(self, budget: int = 96) -> None:
        scheduled: dict[str, int] = {}
        for request in [r for r in self.requests.values() if r.status == "running"]:
            if request.status != "running":
                continue  # preempted for the sake of another one in this very step
            count = min(budget, request.num_tokens - request.num_computed_tokens)
            if count <= 0 or not self.grow(request, request.num_computed_tokens + count):
                continue
            scheduled[request.request_id] = count
            budget -= count
        # A step that preempts admits nobody.
        waiting = [r for r in self.requests.values() if r.status in ("waiting", "loading") and not self.preempted_now]
        # Those that hold loaded pages first, so that nobody waits for pages that somebody waits with.
        for request in sorted(waiting, key=lambda r: not r.pages):
            budget -= self.admit(request, budget, scheduled)
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            preempted_req_ids=self.preempted_now,
            kv_connector_block_state=None,
        )
        metadata = self.scheduler.step_metadata(output)
        self.preempted_now = set()
        for request_id, count in scheduled.items():
            self.requests[request_id].num_computed_tokens += count
        self.execute(metadata, scheduled)

    def admit(self, request: ToyRequest, budget: int, scheduled: dict[str, int]) -> int:
        if request.status == "loading":
            if request.request_id not in self.received:
                return 0
            self.received.discard(request.request_id)
            request.status = "waiting"
            if request.num_computed_tokens == 0:
                self.give_pages(request)
        if request.num_computed_tokens == 0 and not request.pages:
            local = self.local_hit(request)
            external = self.scheduler.matched_tokens(request, local)
            if external is None:
                return 0
            if self.funnel is not None and not request.load_failed:
                self.funnel.answered(request, local, external)
            if external:
                if len(self.free) < self.pages_to_run(request) + self.pages_promised():
                    return 0
                pages = self.take_pages((local + external) // BLOCK_TOKENS)
                if pages is None:
                    return 0
                request.pages = pages
                self.local_hits.append(request)
                self.scheduler.allocated(request, pages, external)
                if self.funnel is not None:
                    self.funnel.expected["tokens:taken"] += external
                request.num_computed_tokens = local + external
                request.status = "loading"
                return 0
        count = min(budget, request.num_tokens - request.num_computed_tokens)
        if count <= 0 or not self.grow(request, request.num_computed_tokens + count, preempt=False):
            return 0
        self.scheduler.allocated(request, request.pages, 0)
        request.status = "running"
        scheduled[request.request_id] = count
        return count

    def local_hit(self, request: ToyRequest) -> int:
        """Blocks that the engine's own prefix cache would hold; stable for a request."""
        limit = (request.num_tokens - 1) // BLOCK_TOKENS
        return random.Random(request.request_id).randrange(limit + 1) // 3 * BLOCK_TOKENS

    def grow(self, request: ToyRequest, until_token: int, *, preempt: bool = True) -> bool:
        need = -(-until_token // BLOCK_TOKENS) - len(request.pages)
        while (pages := self.take_pages(max(0, need))) is None:
            if not preempt:
                return False
            # The youngest goes, be it this one: otherwise two that do not fit together would preempt each other for ever.
            youngest = [r for r in self.requests.values() if r.status == "running"][-1]
            self.preempt(youngest)
            if youngest is request:
                return False
        request.pages += pages
        return True

    def fill(self, request: ToyRequest, first_token: int, until_token: int) -> None:
        """ "Computes" tokens: a block's bytes stand once its last token is computed; before that it holds filler."""
        for block in range(first_token // BLOCK_TOKENS, -(-until_token // BLOCK_TOKENS)):
            whole = (block + 1) * BLOCK_TOKENS <= until_token
            self.memory[:, request.pages[block]] = self.block_bytes(request, block) if whole else 0x5A

    def execute(self, metadata: StepMetadata, scheduled: dict[str, int]) -> None:
        self.worker.begin_step(metadata)
        for page in self.new_pages:  # a new owner: from here on the old content is gone
            self.memory[:, page] = self.random.randrange(256)
        self.new_pages = []
        for request in self.local_hits:
            # Live pages of the engine's own hit: inverted while the load runs, so that a write to one shows.
            self.fill(request, 0, self.local_hit(request))
            self.memory[:, request.pages[: self.local_hit(request) // BLOCK_TOKENS]] ^= 0xFF
        self.local_hits = []
        for request_id, count in scheduled.items():
            request = self.requests[request_id]
            before = request.num_computed_tokens - count
            self.fill(request, before, request.num_computed_tokens)
        self.worker.start_loads(metadata)
        self.worker.start_saves(metadata)
        sent, received = self.worker.ended()
        output = SimpleNamespace(
            finished_sending=sent,
            finished_recving=received,
            invalid_block_ids=self.worker.take_failed_pages(),
            kv_connector_worker_meta=self.worker.take_report(),
        )
        self.update(output, scheduled)

    def update(self, output: SimpleNamespace, scheduled: dict[str, int]) -> None:
        for request in self.requests.values():
            if request.status != "loading":
                continue
            bad = [i for i, page in enumerate(request.pages) if page in output.invalid_block_ids]
            if bad:
                request.load_failed = True
                self.tokens_failed += request.num_computed_tokens - bad[0] * BLOCK_TOKENS
                request.num_computed_tokens = bad[0] * BLOCK_TOKENS
        for request_id in scheduled:
            request = self.requests[request_id]
            self.remember_chunks(request)
            if request.num_computed_tokens == request.num_tokens:
                if request.num_tokens - request.num_prompt_tokens >= request.max_new_tokens:
                    self.finish(request)
                else:
                    request.all_token_ids.append(self.random.randrange(1000))
        self.scheduler.worker_output(output)
        for request_id in output.finished_recving:
            request = self.requests[request_id]
            if request.status == "loading":
                self.received.add(request_id)
                self.check_load(request)
                self.tokens_loaded += request.num_computed_tokens - self.local_hit(request)
            else:
                assert request.status == "finished"
                self.give_pages(request)
                del self.requests[request_id]
        for request_id in output.finished_sending:
            assert self.requests[request_id].status == "finished"
            self.give_pages(self.requests[request_id])
            del self.requests[request_id]

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()
