"""Which nodes the next view lists: a function of what is published, what is registered, and what a replica remembers.

A cache that loses sight of a live node pays for it twice, in misses and in moved keys; one that lists a dead node for a
little longer pays almost nothing, because clients skip a node that does not answer. So additions are believed at once and
losses with care. Every rule only ever moves a node forward on (absent, joining, serving, draining, gone), so that
replicas with different memories do not undo each other's decisions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dfkv_core.membership.view import USED_STATES, NodeEntry, NodeState, usable

_MOST_ARRIVALS = 16


@dataclass(frozen=True)
class GuardPolicy:
    """ttl_s: of leases. A loss beyond loss_share of the nodes within one ttl_s is only believed when it lasts that long.
    An id that came flap_arrivals times within flap_window_s waits before it is used again."""

    ttl_s: float = 30.0
    loss_share: float = 0.25
    flap_arrivals: int = 3
    flap_window_s: float = 600.0
    max_wait_s: float = 300.0


@dataclass(frozen=True)
class Memory:
    """What one replica has seen, in seconds of its own monotonic clock."""

    settled_at_s: float
    """Nothing is taken away before: etcd has not been in reach for a whole TTL."""
    missing_since_s: Mapping[str, float] = field(default_factory=dict)
    losses_at_s: tuple[float, ...] = ()
    arrivals_at_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    joining_since_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """nodes: in the order of their ids."""

    nodes: tuple[NodeEntry, ...]
    memory: Memory


def contact_regained(memory: Memory, now_s: float, policy: GuardPolicy) -> Memory:
    """etcd answers for the first time, or again: leases may have ended only because nobody could renew them."""
    return replace(memory, settled_at_s=now_s + policy.ttl_s, missing_since_s={})


def noticed(
    memory: Memory, before: Sequence[NodeEntry], after: Sequence[NodeEntry], now_s: float, policy: GuardPolicy
) -> Memory:
    """Somebody else has published `after` where this replica knew `before`: what came and went counts as if it had
    decided that itself. Otherwise each replica would believe a loss of its own, and count a flapping node anew."""
    old = {node.id for node in before if node.state != NodeState.GONE}
    arrivals = dict(memory.arrivals_at_s)
    for node in after:
        if node.state != NodeState.GONE and node.id not in old:
            arrivals[node.id] = _arrived(arrivals.get(node.id, ()), now_s, policy)
    lost = old - {node.id for node in after}
    return replace(memory, arrivals_at_s=arrivals, losses_at_s=(*memory.losses_at_s, *[now_s] * len(lost)))


def at_rest(memory: Memory) -> bool:
    """Whether the passing of time alone changes nothing."""
    return not memory.missing_since_s and not memory.joining_since_s


def decide(
    published: Sequence[NodeEntry],
    registered: Mapping[str, NodeEntry],
    drained: Mapping[str, int],
    now_s: float,
    memory: Memory,
    policy: GuardPolicy,
) -> Decision:
    """The next view's nodes. registered: by id; drained: incarnations that an operator wants drained, by id."""
    before = {node.id: node for node in published}
    alive = {node_id for node_id, entry in registered.items() if entry.state != NodeState.GONE}
    if not alive and usable(published):
        # All at once: that is a fault of the service or of etcd, and otherwise there is nobody to miss them.
        return Decision(tuple(published), memory)

    kept, memory = _losses(before, registered, now_s, memory, policy)
    nodes = dict(kept)
    arrivals, joining = dict(memory.arrivals_at_s), {}
    for node_id, entry in registered.items():
        old = before.get(node_id)
        new = old is None or (old.state == NodeState.GONE and entry.state != NodeState.GONE)
        if new and entry.state != NodeState.GONE:
            arrivals[node_id] = _arrived(arrivals.get(node_id, ()), now_s, policy)
        state = _wanted(entry, drained)
        if state in USED_STATES and (new or (old is not None and old.state == NodeState.JOINING)):
            since = now_s if new else memory.joining_since_s.get(node_id, now_s)
            if now_s - since < _wait_s(len(arrivals.get(node_id, ())), first=new, policy=policy):
                state = NodeState.JOINING
                joining[node_id] = since
        nodes[node_id] = entry if entry.state == state else replace(entry, state=state)
    if not usable(nodes[node_id] for node_id in alive):
        # Better one that may go again than none but the lost.
        nodes = {node_id: _promoted(node) for node_id, node in nodes.items()}
    # Names that never come again are forgotten.
    arrivals = {node_id: times for node_id, times in arrivals.items() if times[-1] > now_s - policy.flap_window_s}
    memory = replace(memory, arrivals_at_s=arrivals, joining_since_s=joining)
    return Decision(tuple(nodes[node_id] for node_id in sorted(nodes)), memory)


def _losses(
    before: Mapping[str, NodeEntry],
    registered: Mapping[str, NodeEntry],
    now_s: float,
    memory: Memory,
    policy: GuardPolicy,
) -> tuple[dict[str, NodeEntry], Memory]:
    """Published nodes without a registration that stay for now."""
    missing = [node for node_id, node in before.items() if node_id not in registered]
    since = {node.id: memory.missing_since_s.get(node.id, now_s) for node in missing}
    losses = [at for at in memory.losses_at_s if at > now_s - policy.ttl_s]
    used = sum(node.state in USED_STATES for node in before.values())
    allowance = max(1, int(policy.loss_share * (used + len(losses)))) - len(losses)
    kept = {}
    for node in sorted(missing, key=lambda node: (since[node.id], node.id)):
        if node.state == NodeState.GONE:
            continue  # it said so itself
        if now_s < memory.settled_at_s:
            kept[node.id] = node
        elif allowance > 0 or now_s - since[node.id] >= policy.ttl_s:
            allowance -= 1
            losses.append(now_s)
        else:
            kept[node.id] = node
    still = {node_id: since[node_id] for node_id in kept}
    return kept, replace(memory, missing_since_s=still, losses_at_s=tuple(losses))


def _arrived(times_s: Sequence[float], now_s: float, policy: GuardPolicy) -> tuple[float, ...]:
    """Times of a node's arrivals that still count, with one at now_s."""
    return (*(at for at in times_s if at > now_s - policy.flap_window_s), now_s)[-_MOST_ARRIVALS:]


def _wanted(entry: NodeEntry, drained: Mapping[str, int]) -> NodeState:
    if entry.state == NodeState.SERVING and drained.get(entry.id) == entry.incarnation:
        return NodeState.DRAINING
    return entry.state


def _wait_s(arrivals: int, *, first: bool, policy: GuardPolicy) -> float:
    """How long a node stays joining. A replica that finds one joining and does not know why waits a TTL."""
    over = arrivals - policy.flap_arrivals
    if over < 0:
        return 0.0 if first else policy.ttl_s
    return float(min(policy.ttl_s * 2**over, policy.max_wait_s))


def _promoted(node: NodeEntry) -> NodeEntry:
    return replace(node, state=NodeState.SERVING) if node.state == NodeState.JOINING else node
