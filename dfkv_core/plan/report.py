"""The figures of a plan as lines and tables for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dfkv_core.config_values import format_size
from dfkv_core.plan.economics import Costs
from dfkv_core.plan.study import ClusterReport, Row
from dfkv_core.plan.trace import RequestTrace

Table = tuple[Sequence[str], Sequence[Sequence[str]]]


def trace_line(trace: RequestTrace, costs: Costs) -> str:
    line = (
        f"{trace.path.name}: {trace.requests:,} requests, {trace.prompt_tokens(costs.block_tokens):,} prompt tokens, "
        f"{trace.native.blocks:,} blocks ({trace.native.unique_blocks:,} different)"
    )
    if trace.duration_s:
        line += f", {_duration(trace.duration_s)}"
    return line


def hit_table(rows: Sequence[Row]) -> Table:
    """One line for each policy, one column for each capacity; hits in percent."""
    bounded, unbounded = rows[:-1], rows[-1]
    capacities = list(dict.fromkeys(row.capacity_blocks for row in bounded))
    columns = ["hits, %", *(_capacity(next(row for row in bounded if row.capacity_blocks == c)) for c in capacities)]
    ratios = {(row.policy, row.capacity_blocks): f"{100 * row.hit_ratio:.2f}" for row in bounded}
    lines = [
        [policy, *(ratios[policy, capacity] for capacity in capacities)]
        for policy in dict.fromkeys(row.policy for row in bounded)
    ]
    lines.append(["unbounded", *[f"{100 * unbounded.hit_ratio:.2f}"] * max(1, len(capacities))])
    return columns if capacities else [*columns, "100 %"], lines


def worth_table(rows: Sequence[Row], costs: Costs) -> Table | None:
    """What was asked about, for each row. None: no number was given that says anything."""
    if costs.prefill_tokens_per_s is None and costs.kv_bytes_per_token is None:
        return None
    columns = ["policy", "capacity", "prefill saved", "GPU-h a day", "read mean", "read peak", "written a day", "wear"]
    lines = []
    for row in rows:
        found = row.worth
        lines.append(
            [
                row.policy,
                _capacity(row),
                _or_dash(found.prefill_s_saved, _duration),
                _or_dash(found.gpu_hours_saved_per_day, lambda hours: f"{hours:,.1f}"),
                _or_dash(found.read_bytes_per_s, _rate),
                _or_dash(found.peak_read_bytes_per_s, _rate),
                _or_dash(found.written_bytes_per_day, _bytes),
                _or_dash(found.drive_writes_per_day, lambda wear: f"{wear:,.0f} x" if wear >= 10 else f"{wear:.2g} x"),
            ]
        )
    return columns, lines


def cluster_lines(cluster: ClusterReport) -> list[list[str]]:
    whole = "not by the end" if cluster.requests_until_whole is None else f"{cluster.requests_until_whole:,} requests"
    return [
        ["hits", _pct(cluster.hit_ratio), f"of all blocks asked for, {cluster.policy}"],
        ["fullest node", f"{cluster.held_max_over_mean:.2f}", "times the mean"],
        ["most read node", f"{cluster.reads_max_over_mean:.2f}", "times the mean"],
        ["nodes a request touches", f"{cluster.nodes_per_request:.1f}", "on average"],
        ["second copies", f"{cluster.copied_blocks:,}", "blocks written"],
        [
            "hits just after a loss",
            _pct(cluster.hit_ratio_after_loss),
            f"{_pct(cluster.hit_ratio_without_loss)} without",
        ],
        ["whole again after", whole, "the slowest loss"],
    ]


def _capacity(row: Row) -> str:
    share = f"{row.capacity_pct:.3g} %"
    if row.worth.capacity_bytes is not None:
        return f"{format_size(row.worth.capacity_bytes)} ({share})"
    return share


def _or_dash(value: float | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else show(value)


def _rate(value: float) -> str:
    return f"{format_size(int(value))}/s"


def _bytes(value: float) -> str:
    return format_size(int(value))


def _pct(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
