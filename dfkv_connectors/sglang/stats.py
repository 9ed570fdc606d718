"""What the backend counts: for Prometheus, through SGLang's own endpoint, and for SGLang's storage histograms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dfkv_connectors import counters
from dfkv_connectors.counters import Family

try:
    from sglang.srt.observability.metrics_collector import StorageMetrics
except ImportError:  # the counters are described, and their page is made, without the engine
    StorageMetrics = None

MOST_SAMPLES = 1024  # kept for SGLang between two polls


# Every counter there is; on the endpoint their names begin with "sglang:dfkv_" and end with "_total".
FAMILIES: dict[str, Family] = {
    "lookups": Family(("pool", "result"), "Lookups by result: hit, or the reason of the first page's miss."),
    "pages": Family(("operation", "pool", "status"), "Pages by operation (lookup, load, save) and status."),
    "bytes": Family(("operation", "pool"), "Payload bytes moved: load or save."),
    "seconds": Family(("operation",), "Time SGLang's threads spent in lookups, loads and saves."),
    "refused": Family(("reason",), "Calls that took no part in sharing, by reason."),
    "faults": Family(("call",), "Exceptions caught in a call, which then counted as a miss."),
}


class Counters(counters.Counters):
    """Sums of one backend. Any thread. exported: also to Prometheus, where SGLang serves metrics."""

    def __init__(self, *, exported: bool, ranks: Mapping[str, int]) -> None:
        super().__init__(FAMILIES, prefix="sglang:dfkv_" if exported else "", constant=ranks)
        self._samples: Any = None

    def sample(self, operation: str, pages: int, payload_bytes: int, seconds: float) -> None:
        """One batch, for SGLang's histograms: load is its prefetch, save its backup."""
        if not self._exported or StorageMetrics is None or not pages or seconds <= 0:
            return
        with self._lock:
            if self._samples is None:
                self._samples = StorageMetrics()
            kind = "prefetch" if operation == "load" else "backup"
            counts, bandwidths = getattr(self._samples, f"{kind}_pgs"), getattr(self._samples, f"{kind}_bandwidth")
            if len(counts) < MOST_SAMPLES:
                counts.append(pages)
                bandwidths.append(payload_bytes / 2**30 / seconds)

    def take_samples(self) -> Any:
        """What was sampled since the last call, None for nothing. Constant time."""
        if self._samples is None:
            return None
        with self._lock:
            samples, self._samples = self._samples, None
        return samples
