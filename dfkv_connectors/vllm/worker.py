"""A worker's half of the connector: moves bytes between the engine's pages and the cache, off the engine's thread.

Payload goes straight from the pages to the sockets and back. The engine's promise that makes this right: pages of a
running or finishing request are not reused before it is reported as sent, or named in `preempted` before they are
written.
"""

from __future__ import annotations

import logging
import struct
import time
from dataclasses import dataclass

from dfkv_core._native import Client, Operation
from dfkv_core.config import VllmConnectorConfig
from dfkv_core.keys import Status, StatusRange, status_range

from .counters import Counters
from .layout import ChunkMap, EngineView
from .messages import Geometry, LoadJob, SaveJob, StepMetadata, WorkerReport

logger = logging.getLogger("vllm.dfkv")

_CLOSE_TIMEOUT_MS = 2000


@dataclass(slots=True)
class _Load:
    job: LoadJob
    operation: Operation | None  # None: could not be submitted, every page failed


@dataclass(slots=True)
class _Save:
    job: SaveJob
    operation: Operation


class WorkerSide:
    """All methods: the worker's thread, in the order that vLLM documents for connectors."""

    def __init__(self, config: VllmConnectorConfig) -> None:
        self._config = config
        self.counters = Counters()
        self.off = True
        self.geometry = Geometry(error="the engine has not registered its KV cache")
        self._client: Client | None = None
        self._namespace = b""
        self._chunks: ChunkMap | None = None
        self._writes = False
        self._loads: dict[str, _Load] = {}
        self._saves: dict[str, list[_Save]] = {}
        self._finishing: set[str] = set()
        self._failed_pages: set[int] = set()
        self._report = WorkerReport()
        self._step_started_ns = 0

    # ---- start and stop ----

    def attach(self, engine: EngineView, rank: int) -> None:
        """Connects, now that identity and layout are known."""
        config = self._config
        self._chunks, self._writes = engine.chunks, engine.writes
        self._client = Client(
            config.seeds,
            name=f"{config.effective_name()[:110]}/worker{rank}",
            secret=config.read_secret(),
            connections_per_node=config.connections_per_node,
            connect_timeout_ms=config.connect_timeout_ms,
            cooldown_ms=config.cooldown_ms,
            max_inflight_bytes=config.max_inflight_bytes,
            last_view_path=config.last_view_path,
            group=config.group,
        )
        self._namespace = self._client.add_namespace(engine.descriptor, engine.label)
        self.geometry = Geometry(
            descriptor=engine.descriptor,
            label=engine.label,
            parts=engine.chunks.parts,
            part_bytes=engine.chunks.part_bytes,
            chunk_blocks=engine.chunks.chunk_blocks,
            block_tokens=engine.chunks.layout.block_tokens,
        )
        self.off = False

    def refuse(self, reason: str) -> None:
        """This engine's KV cannot be shared; the scheduler's half is told why."""
        self.geometry = Geometry(error=reason)

    def shutdown(self) -> None:
        for load in self._loads.values():
            if load.operation is not None:
                load.operation.cancel()
        for request_id in list(self._saves):
            self._abandon_saves(request_id, "shutdown")
        if self._client is not None:
            self._client.close(_CLOSE_TIMEOUT_MS)
            self._client = None

    # ---- a step, in order ----

    def begin_step(self, metadata: StepMetadata) -> None:
        """Before anything of this step writes a page: saves of preempted requests end here and now."""
        self._step_started_ns = time.perf_counter_ns()
        for request_id in metadata.preempted:
            self._abandon_saves(request_id, "preempted")
        self._finishing.update(metadata.finished)

    def start_loads(self, metadata: StepMetadata) -> None:
        for job in metadata.loads:
            operation = None
            if job.chunk_ids:
                try:
                    operation = self._submit_load(job)
                except Exception:
                    logger.exception("dfkv: load of request %s could not be started", job.request_id)
            self._loads[job.request_id] = _Load(job, operation)
        for request_id in metadata.cancelled:
            load = self._loads.get(request_id)
            if load is not None and load.operation is not None:
                load.operation.cancel()

    def _submit_load(self, job: LoadJob) -> Operation:
        client, layout = self._client, self._chunks
        assert client is not None
        assert layout is not None
        chunks = len(job.chunk_ids) // 16
        return client.get(
            self._namespace,
            layout.items(job.chunk_ids),
            layout.segments(job.page_ids).data,
            layout.counts(chunks).data,
            job.deadline_ms,
        )

    def start_saves(self, metadata: StepMetadata) -> None:
        """After the forward: every token of these pages is computed."""
        if metadata.scheduled_tokens:
            self._observe_step(metadata.scheduled_tokens)
        if not self._writes:
            return  # another rank holds the same heads and stores them
        client, layout = self._client, self._chunks
        assert client is not None
        assert layout is not None
        for job in metadata.saves:
            chunks = len(job.chunk_ids) // 16
            operation = client.put(
                self._namespace,
                layout.items(job.chunk_ids),
                layout.segments(job.page_ids).data,
                layout.counts(chunks).data,
                float(self._config.save_deadline_ms),
                recompute_us=job.recompute_us,
            )
            self._saves.setdefault(job.request_id, []).append(_Save(job, operation))

    def _observe_step(self, tokens: int) -> None:
        seconds = (time.perf_counter_ns() - self._step_started_ns) / 1e9
        self.counters.add("step_seconds", seconds)
        self._report.prefill.append((tokens, seconds))

    def ended(self) -> tuple[set[str], set[str]]:
        """Requests whose saves have ended (of those that are finishing), and requests whose loads have."""
        for request_id in list(self._saves):
            self._reap_saves(request_id)
        sent = {request_id for request_id in self._finishing if request_id not in self._saves}
        self._finishing -= sent
        received = {
            request_id for request_id, load in self._loads.items() if load.operation is None or load.operation.done()
        }
        for request_id in received:
            load = self._loads.pop(request_id)
            try:
                self._finish_load(load)
            except Exception:
                logger.exception("dfkv: load of request %s counts as failed", request_id)
                self._fail(load.job)
        return sent, received

    def take_failed_pages(self) -> set[int]:
        failed, self._failed_pages = self._failed_pages, set()
        return failed

    def take_report(self) -> WorkerReport | None:
        report, self._report = self._report, WorkerReport()
        return report if report.prefill or report.loaded or report.unsaved else None

    # ---- ends of transfers ----

    def _finish_load(self, load: _Load) -> None:
        job, operation = load.job, load.operation
        if operation is None or self._chunks is None:
            self._fail(job)
            return
        codes = _codes(operation)
        self._count("load_objects", codes)
        parts, blocks = len(self._chunks.parts), self._chunks.chunk_blocks
        for chunk in range(len(job.chunk_ids) // 16):
            if any(status_range(code) is not StatusRange.DONE for code in codes[chunk * parts : (chunk + 1) * parts]):
                pages = job.page_ids[chunk * blocks : (chunk + 1) * blocks]
                self._failed_pages.update(page for page in pages if page >= 0)
        seconds = operation.elapsed_us / 1e6
        self.counters.add("bytes", operation.payload_bytes, "load")
        self.counters.add("load_seconds", seconds)
        self._report.loaded.append((operation.payload_bytes, seconds))

    def _fail(self, job: LoadJob) -> None:
        """Every page of the load is to be computed again."""
        self._failed_pages.update(page for page in job.page_ids if page >= 0)
        self.counters.add("load_objects", label="not_submitted")

    def _reap_saves(self, request_id: str) -> None:
        left = []
        for save in self._saves[request_id]:
            if save.operation.done():
                self._finish_save(save)
            else:
                left.append(save)
        if left:
            self._saves[request_id] = left
        else:
            del self._saves[request_id]

    def _finish_save(self, save: _Save) -> None:
        """Counts a save that has ended. Never raises: what matters, that its pages are free, is already true."""
        try:
            self._count_save(save)
        except Exception:
            logger.exception("dfkv: a save of request %s was not counted", save.job.request_id)

    def _count_save(self, save: _Save) -> None:
        operation = save.operation
        codes = _codes(operation)
        self._count("save_objects", codes)
        self.counters.add("bytes", operation.payload_bytes, "save")
        self.counters.add("save_seconds", operation.elapsed_us / 1e6)
        parts = len(codes) * 16 // len(save.job.chunk_ids)
        for chunk in range(len(codes) // parts):
            if any(status_range(code) is not StatusRange.DONE for code in codes[chunk * parts : (chunk + 1) * parts]):
                self._report.unsaved.append(save.job.chunk_ids[16 * chunk : 16 * chunk + 16])

    def _abandon_saves(self, request_id: str, reason: str) -> None:
        """Returns once nothing reads the request's pages any more."""
        for save in self._saves.pop(request_id, ()):
            if not save.operation.done():
                save.operation.cancel()
                self.counters.add("abandoned_saves", label=reason)
            self._finish_save(save)

    def _count(self, family: str, codes: tuple[int, ...]) -> None:
        for code in set(codes):
            self.counters.add(family, codes.count(code), Status(code).label)


def _codes(operation: Operation) -> tuple[int, ...]:
    statuses = operation.statuses()
    return struct.unpack(f"<{len(statuses) // 2}H", statuses)
