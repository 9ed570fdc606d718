"""Runs the replays of one plan: every policy at every capacity, and several nodes with the loss of each."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from dfkv_core.plan.economics import Costs, Worth, ratio, requests_until_whole, unpack_hits, worth
from dfkv_core.plan.trace import RequestTrace

LOST_AT = 0.8  # of the trace: late enough that the cache is warm
AFTER_LOSS = 0.05  # of the trace: how long "just after" is
MOST_LOSSES = 8  # nodes whose loss is replayed

Step = Callable[[], None]
"""Called after each replay."""


@dataclass(frozen=True)
class Capacity:
    """blocks is what is replayed; pct of the different blocks of the trace is what it stands for."""

    blocks: int
    pct: float


@dataclass(frozen=True)
class Row:
    """One policy at one capacity. hit_ratio: hits up to the first miss, per block asked for."""

    policy: str
    capacity_blocks: int
    capacity_pct: float  # of the different blocks of the trace
    hit_ratio: float
    worth: Worth


@dataclass(frozen=True)
class Placement:
    """Where blocks go; native/plan/cluster.h says what the fields do."""

    nodes: int
    run_blocks: int = 1
    spread_blocks: int = 0
    copy_after_reads: int = 0
    copy_share: float = 0.0

    def options(self) -> dict[str, Any]:
        return {
            "nodes": self.nodes,
            "run_blocks": self.run_blocks,
            "spread_blocks": self.spread_blocks,
            "copy_after_reads": self.copy_after_reads,
            "copy_share": self.copy_share,
        }


@dataclass(frozen=True)
class ClusterReport:
    """Several nodes. Ratios of hits are per block asked for; the loss is the mean over the nodes that were lost."""

    nodes: int
    policy: str
    capacity_blocks: int | None  # None: room for everything
    hit_ratio: float
    held_max_over_mean: float
    reads_max_over_mean: float
    nodes_per_request: float
    copied_blocks: int
    lost_at_request: int
    hit_ratio_after_loss: float  # in the next twentieth of the trace
    hit_ratio_without_loss: float  # in the same requests
    lost_hit_blocks: float  # hits that the loss costs to the end of the trace
    requests_until_whole: int | None  # the longest; None: at least one was not whole by the end


def replay_all(
    trace: RequestTrace, policies: Sequence[str], capacities: Sequence[Capacity], costs: Costs, step: Step | None = None
) -> list[Row]:
    """Rows in the order of policies and capacities, and the unbounded cache as the last. Uses every core."""
    jobs = [(policy, capacity) for policy in policies for capacity in capacities if policy != "unbounded"]
    jobs.append(("unbounded", Capacity(trace.native.unique_blocks, 100.0)))
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        running = [pool.submit(_replay, trace, policy, capacity, costs) for policy, capacity in jobs]
        for _ in as_completed(running):
            if step is not None:
                step()
    return [future.result() for future in running]


def replays_of(policies: Sequence[str], capacities: Sequence[Capacity]) -> int:
    """How often replay_all() calls its step."""
    return sum(policy != "unbounded" for policy in policies) * len(capacities) + 1


def _replay(trace: RequestTrace, policy: str, capacity: Capacity, costs: Costs) -> Row:
    from dfkv_core import _native

    result = _native.replay(trace.native, policy, capacity.blocks)
    return Row(
        policy,
        capacity.blocks,
        capacity.pct,
        result["hit_blocks"] / trace.native.blocks,
        worth(
            unpack_hits(result["hits"]),
            result["written_blocks"],
            capacity.blocks,
            costs,
            timestamps_ms=trace.timestamps_ms,
            input_tokens=trace.input_tokens,
        ),
    )


def losses_of(nodes: int) -> list[int]:
    """The nodes whose loss is replayed."""
    return list(range(min(nodes, MOST_LOSSES))) if nodes > 1 else []


def replay_nodes(
    trace: RequestTrace, policy: str, capacity: int | None, placement: Placement, step: Step | None = None
) -> ClusterReport:
    """capacity: blocks of all nodes together, None for room for everything. Calls step 1 + losses_of(nodes) times."""
    from dfkv_core import _native

    asked = trace.block_counts
    lost_at = int(trace.requests * LOST_AT)
    after = lost_at + max(1, int(trace.requests * AFTER_LOSS))

    def run(lost_node: int | None) -> dict[str, Any]:
        result = _native.replay_cluster(
            trace.native,
            policy=policy,
            capacity_blocks=capacity or 0,
            lost_node=lost_node,
            lost_at=lost_at,
            **placement.options(),
        )
        if step is not None:
            step()
        return result

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        whole = pool.submit(run, None)
        runs = [pool.submit(run, node) for node in losses_of(placement.nodes)]
        base = whole.result()
        without = unpack_hits(base["hits"])
        losses = [unpack_hits(future.result()["hits"]) for future in runs] or [without]
    repaired = [requests_until_whole(hits, without, asked, lost_at) for hits in losses]
    held = [node["held_blocks"] for node in base["nodes"]]
    reads = [node["read_blocks"] for node in base["nodes"]]
    return ClusterReport(
        nodes=placement.nodes,
        policy=policy,
        capacity_blocks=capacity,
        hit_ratio=ratio(without, asked),
        held_max_over_mean=_max_over_mean(held),
        reads_max_over_mean=_max_over_mean(reads),
        nodes_per_request=base["touched"] / trace.requests,
        copied_blocks=base["copied_blocks"],
        lost_at_request=lost_at,
        hit_ratio_after_loss=sum(ratio(hits, asked, lost_at, after) for hits in losses) / len(losses),
        hit_ratio_without_loss=ratio(without, asked, lost_at, after),
        lost_hit_blocks=sum(sum(without[lost_at:]) - sum(hits[lost_at:]) for hits in losses) / len(losses),
        requests_until_whole=None if None in repaired else max(one for one in repaired if one is not None),
    )


def _max_over_mean(values: Sequence[int]) -> float:
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0
