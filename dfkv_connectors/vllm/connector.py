"""DfkvConnector: vLLM's connector interface over the scheduler's and the worker's halves.

A fault of ours never becomes a fault of the engine: every hook catches, counts, logs once and switches the connector
off, after which the engine computes everything itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from dfkv_core.config import VllmConnectorConfig, load_config

from .identity import IdentityError, WeightsError
from .inspect_engine import inspect_engine, tp_rank
from .layout import LayoutError
from .messages import Geometry, StepMetadata, WorkerReport
from .scheduler import SchedulerSide
from .stats import DfkvPromMetrics, DfkvStats
from .worker import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.dfkv")
T = TypeVar("T")


class DfkvConnector(KVConnectorBase_V1):
    """Restores and stores prefixes through dfkv. Configured by kv_connector_extra_config, environment or file.

    Threads: each hook is called by the engine on its scheduler's or worker's thread, one at a time.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        loaded = load_config(
            VllmConnectorConfig,
            flags=transfer.kv_connector_extra_config,
            flags_source="kv_connector_extra_config",
        )
        logger.setLevel(loaded.value.log_level.upper())
        self._config = loaded.value
        self._hook_ns = 0
        self._faulted: set[str] = set()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            logger.info("dfkv: %s", loaded.summary())
            if transfer.kv_load_failure_policy != "recompute":
                # vLLM reads it right after this constructor. With its default a lost cache node would end requests.
                transfer.kv_load_failure_policy = "recompute"
                logger.info("dfkv: kv_load_failure_policy is set to recompute, so that a failed load costs no request")
            parallel = vllm_config.parallel_config
            self._scheduler = SchedulerSide(
                loaded.value,
                reads=transfer.is_kv_consumer,
                writes=transfer.is_kv_producer,
                world_size=parallel.tensor_parallel_size * parallel.pipeline_parallel_size,
            )
        else:
            self._worker = WorkerSide(loaded.value)

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped save is a later miss, nothing more."""
        return False

    # ---- scheduler ----

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        if (side := self._scheduler) is not None:
            ranks = {rank: item for rank, item in metadata.items() if isinstance(item, Geometry)}
            self._hook("set_xfer_handshake_metadata", lambda: side.set_geometry(ranks), None)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): item for rank, item in metadata.items()})

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            self._scheduler.bind_kv_cache_manager(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        if (side := self._scheduler) is not None:
            self._hook("on_new_request", lambda: side.on_new_request(request), None)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if (side := self._scheduler) is None:
            return 0, False
        tokens = self._hook(
            "get_num_new_matched_tokens",
            lambda: side.matched_tokens(request, num_computed_tokens),
            cast("int | None", 0),
        )
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        # Not caught: the engine has promised pages to a load, and silence here would leave them unwritten.
        started_ns = time.perf_counter_ns()
        if self._scheduler is not None and num_external_tokens > 0:
            self._scheduler.allocated(request, list(blocks.get_block_ids()[0]), num_external_tokens)
        self._hook_ns += time.perf_counter_ns() - started_ns

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        if (side := self._scheduler) is None:
            return StepMetadata()
        return self._hook("build_connector_meta", lambda: side.step_metadata(scheduler_output), StepMetadata())

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if (side := self._scheduler) is not None:
            self._hook("update_connector_output", lambda: side.worker_output(connector_output), None)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if (side := self._scheduler) is None:
            return False, None
        return self._hook("request_finished", lambda: side.request_finished(request), False), None

    def reset_cache(self) -> bool | None:
        return self._scheduler.reset_cache() if self._scheduler is not None else None

    # ---- worker ----

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """A fault here leaves the connector off, with the reason in the scheduler's log."""
        if (side := self._worker) is None:
            return
        try:
            engine = inspect_engine(self._vllm_config, self._kv_cache_config, kv_caches, self._config)
            side.attach(engine, tp_rank())
        except (LayoutError, IdentityError, WeightsError) as error:
            side.refuse(str(error))
        except Exception as error:
            self._fault("register_kv_caches")
            side.refuse(f"{type(error).__name__}: {error}")

    def get_handshake_metadata(self) -> Any:
        return self._worker.geometry if self._worker is not None else None

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        if self._worker is not None and isinstance(kv_connector_metadata, StepMetadata):
            started_ns = time.perf_counter_ns()
            self._worker.begin_step(kv_connector_metadata)
            self._hook_ns += time.perf_counter_ns() - started_ns

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if (side := self._worker) is not None:
            metadata = self._metadata()
            self._hook("start_load_kv", lambda: side.start_loads(metadata), None)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end between steps: there is nothing to wait for inside one."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Saves start after the forward, from wait_for_save()."""

    def wait_for_save(self) -> None:
        if (side := self._worker) is not None and not side.off:
            metadata = self._metadata()
            self._hook("wait_for_save", lambda: side.start_saves(metadata), None)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if (side := self._worker) is None:
            return None, None
        nothing: tuple[set[str], set[str]] = (set(), set())
        return self._hook("get_finished", side.ended, nothing)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed_pages() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        return self._worker.take_report() if self._worker is not None else None

    # ---- both ----

    def get_kv_connector_stats(self) -> DfkvStats | None:
        side = self._scheduler or self._worker
        assert side is not None
        hook_ns, self._hook_ns = self._hook_ns, 0
        side.counters.add("hook_seconds", hook_ns / 1e9, "scheduler" if self._scheduler is not None else "worker")
        counted = side.counters.take()
        return DfkvStats(data=counted) if counted else None

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.shutdown()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> DfkvStats | None:
        return DfkvStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> DfkvPromMetrics:
        return DfkvPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _metadata(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata

    def _hook(self, name: str, call: Callable[[], T], fallback: T) -> T:
        started_ns = time.perf_counter_ns()
        try:
            return call()
        except Exception:
            self._fault(name)
            return fallback
        finally:
            self._hook_ns += time.perf_counter_ns() - started_ns

    def _fault(self, name: str) -> None:
        side = self._scheduler or self._worker
        assert side is not None
        side.counters.add("faults", label=name)
        if name not in self._faulted:
            self._faulted.add(name)
            logger.exception("dfkv: fault in %s", name)
        if self._scheduler is not None:
            self._scheduler.switch_off(f"fault in {name}")
