"""What the figures mean, in sentences. Pure: the same figures give the same words."""

from __future__ import annotations

from collections.abc import Sequence

from dfkv_core.config_values import format_size
from dfkv_core.plan.economics import Costs, break_even_bytes_per_s
from dfkv_core.plan.study import ClusterReport, Row

POOR_RATIO = 0.05  # below it, looking things up costs about as much as the hits bring
FAIR_RATIO = 0.20
ENOUGH = 0.9  # of what an unbounded cache would hit
TOO_SMALL = 0.5


def verdict(rows: Sequence[Row], costs: Costs, cluster: ClusterReport | None = None) -> list[str]:
    """Sentences, the decision first. rows: of one policy, and the unbounded cache as the last."""
    *bounded, unbounded = rows
    best = max(bounded, key=lambda row: row.hit_ratio, default=unbounded)
    said = [_decision(best, unbounded, costs), _prefix(unbounded)]
    if bounded and unbounded.hit_ratio >= POOR_RATIO:
        said.append(_capacity(bounded, unbounded))
    said += _bandwidth(best, costs)
    said += _wear(best, costs)
    if cluster is not None and cluster.nodes > 1:
        said.append(_loss(cluster, costs))
    return said


def _decision(best: Row, unbounded: Row, costs: Costs) -> str:
    if unbounded.hit_ratio < POOR_RATIO:
        return (
            f"Not worth it: {_pct(unbounded.hit_ratio)} of the prompts' blocks come back at all, so that no cache "
            "of any size can save more."
        )
    even = _break_even(costs)
    if even is not None and costs.bandwidth_bytes_per_s is not None and costs.bandwidth_bytes_per_s <= even:
        return (
            f"Not worth it over this link: at {format_size(int(costs.bandwidth_bytes_per_s))}/s loading KV takes "
            f"longer than computing it; it begins to pay above {format_size(int(even))}/s."
        )
    if best.hit_ratio < POOR_RATIO:
        return (
            f"Not worth it at these capacities: at most {_pct(best.hit_ratio)} of the prompts' blocks are hits, of "
            f"{_pct(unbounded.hit_ratio)} that come back. Plan a larger cache or none."
        )
    gain = best.worth.gpu_hours_saved_per_day
    saved = f", {gain:,.1f} GPU-hours a day" if gain is not None else ""
    word = "Worth it" if best.hit_ratio >= FAIR_RATIO else "Worth a try, no more"
    return f"{word}: up to {_pct(best.hit_ratio)} of the prompts' blocks need no prefill{saved}."


def _prefix(unbounded: Row) -> str:
    ratio = unbounded.hit_ratio
    word = "little" if ratio < POOR_RATIO else "some" if ratio < FAIR_RATIO else "much" if ratio < 0.6 else "very much"
    return f"Stable prefix: {word}. {_pct(ratio)} of all blocks were seen before behind the same prefix."


def _capacity(bounded: Sequence[Row], unbounded: Row) -> str:
    enough = [row for row in bounded if row.hit_ratio >= ENOUGH * unbounded.hit_ratio]
    if enough:
        row = min(enough, key=lambda one: one.capacity_blocks)
        return (
            f"Capacity: {_size(row)} bring {_pct(row.hit_ratio)}, of {_pct(unbounded.hit_ratio)} that an unbounded cache "
            "would; more brings little."
        )
    best = max(bounded, key=lambda row: row.hit_ratio)
    share = best.hit_ratio / unbounded.hit_ratio
    word = "far too small" if share < TOO_SMALL else "not yet enough"
    return (
        f"Capacity: {_size(best)} are {word}: {_pct(best.hit_ratio)}, of {_pct(unbounded.hit_ratio)} that an unbounded "
        "cache would bring."
    )


def _bandwidth(best: Row, costs: Costs) -> list[str]:
    said = []
    even = _break_even(costs)
    if even is not None:
        said.append(
            f"Break-even: an engine must get its hits at more than {format_size(int(even))}/s, or computing is faster."
        )
    mean, peak = best.worth.read_bytes_per_s, best.worth.peak_read_bytes_per_s
    if mean is not None and peak is not None:
        said.append(
            f"Bandwidth: all engines together read {format_size(int(mean))}/s on average and {format_size(int(peak))}/s "
            "in the busiest 10 s."
        )
    return said


def _wear(best: Row, costs: Costs) -> list[str]:
    written, wear = best.worth.written_bytes_per_day, best.worth.drive_writes_per_day
    if written is None or wear is None:
        return []
    times = f"{wear:,.0f}" if wear >= 10 else f"{wear:.2g}"
    words = f"Writes: {format_size(int(written))} a day, {times} times the capacity"
    if wear > costs.drive_writes_per_day:
        advice = "keep the cache in memory, or take larger ones"
        return [f"{words}. Drives rated for {costs.drive_writes_per_day:g} times wear out early: {advice}."]
    return [f"{words}, which drives rated for {costs.drive_writes_per_day:g} times stand."]


def _loss(cluster: ClusterReport, costs: Costs) -> str:
    words = (
        f"Loss of one of {cluster.nodes} nodes: hits fall from {_pct(cluster.hit_ratio_without_loss)} to "
        f"{_pct(cluster.hit_ratio_after_loss)} in the next twentieth of the trace; "
    )
    if cluster.requests_until_whole is None:
        less = "" if cluster.capacity_blocks is None else ": the others have less room together"
        words += f"they had not come back by its end{less}"
    else:
        words += f"they are back after {cluster.requests_until_whole:,} requests"
    if costs.prefill_tokens_per_s is not None:
        seconds = cluster.lost_hit_blocks * costs.block_tokens / costs.prefill_tokens_per_s
        words += f". It costs {seconds:,.0f} s of prefill once, and no wrong answer"
    return words + "."


def _break_even(costs: Costs) -> float | None:
    if costs.prefill_tokens_per_s is None or costs.kv_bytes_per_token is None:
        return None
    return break_even_bytes_per_s(costs.prefill_tokens_per_s, costs.kv_bytes_per_token)


def _size(row: Row) -> str:
    if row.worth.capacity_bytes is not None:
        return f"{format_size(row.worth.capacity_bytes)} ({row.capacity_pct:.3g} % of the different blocks)"
    return f"{row.capacity_blocks:,} blocks ({row.capacity_pct:.3g} %)"


def _pct(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"
