"""What hits are worth: pure arithmetic over the counts of a replay. No I/O, no clock."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

DAY_S = 86400.0


@dataclass(frozen=True)
class Costs:
    """Measured or given numbers. None: not given, and what needs it is not said."""

    block_tokens: int
    kv_bytes_per_token: int | None = None
    prefill_tokens_per_s: float | None = None  # of one engine
    gpus_per_engine: int = 1
    bandwidth_bytes_per_s: float | None = None  # between one engine and the cache
    drive_writes_per_day: float = 1.0  # what the drives are rated for

    @property
    def block_bytes(self) -> int | None:
        return None if self.kv_bytes_per_token is None else self.kv_bytes_per_token * self.block_tokens


@dataclass(frozen=True)
class Worth:
    """Of one replay. Times per day are those of the trace, stretched to a day; None: a number for it was not given."""

    saved_tokens: int
    capacity_bytes: int | None
    prefill_s_saved: float | None  # of one engine, over the trace
    load_s: float | None  # to bring the hits to the engine, over the trace
    gpu_hours_saved_per_day: float | None
    read_bytes_per_s: float | None  # of all engines together, mean
    peak_read_bytes_per_s: float | None
    written_bytes_per_day: float | None
    drive_writes_per_day: float | None  # of drives as large as the capacity


def worth(
    hits: Sequence[int],
    written_blocks: int,
    capacity_blocks: int,
    costs: Costs,
    *,
    timestamps_ms: Sequence[float] = (),
    input_tokens: Sequence[int] = (),
) -> Worth:
    """hits: blocks per request. A last block that is not full saves only the tokens that it has."""
    tokens = saved_tokens(hits, costs.block_tokens, input_tokens)
    block_bytes = costs.block_bytes
    duration_s = (max(timestamps_ms) - min(timestamps_ms)) / 1000 if timestamps_ms else 0.0
    days = duration_s / DAY_S or None
    prefill_s = None if costs.prefill_tokens_per_s is None else tokens / costs.prefill_tokens_per_s
    hit_bytes = None if block_bytes is None else sum(hits) * block_bytes
    load_s = None
    if hit_bytes is not None and costs.bandwidth_bytes_per_s:
        load_s = hit_bytes / costs.bandwidth_bytes_per_s
    gpu_hours = None
    if prefill_s is not None and days:
        gpu_hours = (prefill_s - (load_s or 0.0)) * costs.gpus_per_engine / 3600 / days
    written = None if block_bytes is None or not days else written_blocks * block_bytes / days
    capacity_bytes = None if block_bytes is None else capacity_blocks * block_bytes
    peak = None
    if block_bytes is not None and timestamps_ms:
        peak = peak_blocks_per_s(hits, timestamps_ms) * block_bytes
    return Worth(
        saved_tokens=tokens,
        capacity_bytes=capacity_bytes,
        prefill_s_saved=prefill_s,
        load_s=load_s,
        gpu_hours_saved_per_day=gpu_hours,
        read_bytes_per_s=hit_bytes / duration_s if hit_bytes is not None and duration_s else None,
        peak_read_bytes_per_s=peak,
        written_bytes_per_day=written,
        drive_writes_per_day=written / capacity_bytes if written is not None and capacity_bytes else None,
    )


def saved_tokens(hits: Sequence[int], block_tokens: int, input_tokens: Sequence[int] = ()) -> int:
    """Tokens that need no prefill."""
    if not input_tokens:
        return sum(hits) * block_tokens
    return sum(map(min, map(block_tokens.__mul__, hits), input_tokens))


def break_even_bytes_per_s(prefill_tokens_per_s: float, kv_bytes_per_token: int) -> float:
    """The bandwidth at which loading a token's KV takes as long as computing it. Below it no hit is worth taking."""
    return prefill_tokens_per_s * kv_bytes_per_token


def peak_blocks_per_s(hits: Sequence[int], timestamps_ms: Sequence[float], window_s: float = 10.0) -> float:
    """Blocks read per second in the busiest window."""
    windows: dict[int, int] = {}
    for blocks, timestamp_ms in zip(hits, timestamps_ms, strict=True):
        window = int(timestamp_ms / 1000 // window_s)
        windows[window] = windows.get(window, 0) + blocks
    return max(windows.values(), default=0) / window_s


def requests_until_whole(
    with_loss: Sequence[int], without: Sequence[int], asked: Sequence[int], lost_at: int, tolerance: float = 0.01
) -> int | None:
    """Requests after the loss from which on the hit ratio is within `tolerance` of that without the loss.

    Looked at in steps of a hundredth of the trace. None: it has not come back by the end.
    """
    step = max(1, len(asked) // 100)
    whole_at = None
    for begin in range(lost_at, len(asked), step):
        window = slice(begin, begin + step)
        blocks = sum(asked[window])
        missing = sum(without[window]) - sum(with_loss[window])
        if missing > tolerance * blocks:
            whole_at = None
        elif whole_at is None:
            whole_at = begin
    return None if whole_at is None else whole_at - lost_at


def ratio(hits: Sequence[int], asked: Sequence[int], begin: int = 0, end: int | None = None) -> float:
    """Hits per block asked for, of the requests from `begin` to `end`."""
    blocks = sum(asked[begin:end])
    return sum(hits[begin:end]) / blocks if blocks else 0.0


def unpack_hits(packed: bytes) -> array[int]:
    """The u32 per request that the simulator returns."""
    hits = array("I")
    hits.frombytes(packed)
    return hits
