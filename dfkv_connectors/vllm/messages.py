"""What the scheduler's half and the workers' half of the connector tell each other, step by step.

Everything here is pickled by the engine between its own processes; nothing of it ever comes from a network.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorWorkerMetadata,
    )
except ModuleNotFoundError:  # the halves run, and are tested, without the engine
    KVConnectorHandshakeMetadata = KVConnectorMetadata = KVConnectorWorkerMetadata = object


@dataclass
class Geometry(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once: what this rank stores. `error` says why it stores nothing."""

    descriptor: bytes = b""  # canonical namespace descriptor
    label: str = ""  # for operators
    parts: tuple[int, ...] = ()  # held by this rank, each of chunk_bytes
    part_bytes: int = 0
    chunk_blocks: int = 0
    block_tokens: int = 0
    error: str = ""


@dataclass
class LoadJob:
    """Scheduler to workers: fetch these chunks into these pages.

    page_ids: chunk_blocks per chunk; -1 for pages that hold live tokens and are not to be written.
    """

    request_id: str
    chunk_ids: bytes
    page_ids: list[int]
    deadline_ms: float


@dataclass
class SaveJob:
    """Scheduler to workers: store these chunks from these pages once this step's forward has run.

    The scheduler keeps the pages from reuse until the request is reported as sent, or tells in `preempted` first.
    """

    request_id: str
    chunk_ids: bytes
    page_ids: list[int]
    recompute_us: int


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to workers, every step."""

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)  # their saves stop before any page is written again
    finished: list[str] = field(default_factory=list)  # to be reported as sent once their saves have ended
    cancelled: list[str] = field(default_factory=list)  # aborted while loading
    scheduled_tokens: int = 0


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Workers to scheduler, when there is something to learn. Ranks are merged by aggregate()."""

    prefill: list[tuple[int, float]] = field(default_factory=list)  # tokens, seconds of a step
    loaded: list[tuple[int, float]] = field(default_factory=list)  # payload bytes of one rank, seconds
    unsaved: list[bytes] = field(default_factory=list)  # chunk ids that did not get stored

    def aggregate(self, other: Any) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        return WorkerReport(
            self.prefill or other.prefill,
            self.loaded + other.loaded,
            self.unsaved + other.unsaved,
        )
