"""The connector's counters on vLLM's own /metrics endpoint: merged over ranks, then into Prometheus counters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from .counters import FAMILIES


class DfkvStats(KVConnectorStats):
    """What was added since the last poll: {"family:label value": sum}."""

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        merged = dict(self.data)
        for key, amount in other.data.items():
            merged[key] = merged.get(key, 0) + amount
        return DfkvStats(data=merged)

    def reduce(self) -> dict[str, int | float]:
        """The figures of vLLM's periodic log line: what a person asks first."""
        data: Mapping[str, float] = self.data
        shown: dict[str, int | float] = {}
        for name, key in (
            ("tokens asked", "tokens:asked"),
            ("found", "tokens:found"),
            ("loaded", "tokens:loaded"),
            ("failed", "tokens:failed"),
        ):
            shown[name] = int(data.get(key, 0))
        for name in ("load", "save"):
            moved, seconds = data.get(f"bytes:{name}", 0), data.get(f"{name}_seconds", 0)
            shown[f"{name} MB"] = round(moved / 1e6, 1)
            if seconds:
                shown[f"{name} GB/s"] = round(moved / seconds / 1e9, 2)
        return shown

    def is_empty(self) -> bool:
        return not self.data


class DfkvPromMetrics(KVConnectorPromMetrics):
    """Prometheus counters vllm:dfkv_<family>_total, in the front end's process."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[Counter]
        self._counters: dict[str, Any] = {
            name: counter(
                name=f"vllm:dfkv_{name}",
                documentation=family.help,
                labelnames=[*labelnames, *([family.label] if family.label else [])],
            )
            for name, family in FAMILIES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for key, amount in transfer_stats_data.items():
            name, _, label = key.partition(":")
            counter = self._counters.get(name)
            if counter is not None:
                counter.labels(*values, *([label] if FAMILIES[name].label else [])).inc(amount)
