"""What a measurement says of one case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """ratio: the median of each repeat's rate over that of the ceiling measured just before it. CPU in seconds per GB."""

    case: str
    op: str
    transport: str
    size_bytes: int
    batch: int
    threads: int
    nodes: int
    gb_per_s: float | None
    ceiling_gb_per_s: float | None
    ceiling: str
    ratio: float | None
    p50_us: float
    p99_us: float
    repeats: int
    client_cpu_s_per_gb: float | None = None
    node_cpu_s_per_gb: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "p50_us": round(ordered[len(ordered) // 2] * 1e6, 1),
        "p99_us": round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] * 1e6, 1),
    }
