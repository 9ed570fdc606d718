"""When a node announces itself, and where: a function of what happened, without I/O or clock."""

from __future__ import annotations

from dataclasses import dataclass, replace

RETRY_S = 0.2
MAX_RETRY_S = 5.0
BUSY_RETRY_S = 1.0
MIN_LEASE_S = 1.0
_MOST_DOUBLINGS = 16


@dataclass(frozen=True)
class Beat:
    """lease 0: not registered. due_s: when to announce next, on the caller's monotonic clock."""

    endpoints: int
    endpoint: int = 0
    lease: int = 0
    failures: int = 0
    due_s: float = 0.0
    ended: bool = False
    """Another process holds the id: this one is announced no more."""


def growing_pause_s(first_s: float, failures: int) -> float:
    """Twice as long after each failure, up to MAX_RETRY_S, however many there were."""
    return float(min(first_s * 2 ** min(failures, _MOST_DOUBLINGS), MAX_RETRY_S))


def accepted(beat: Beat, now_s: float, lease: int, lease_s: float) -> Beat:
    """Registered: again after a third of the lease's time, so that two announcements may be lost."""
    return replace(beat, lease=lease, failures=0, due_s=now_s + max(lease_s, MIN_LEASE_S) / 3)


def failed(beat: Beat, now_s: float) -> Beat:
    """No answer: the next endpoint at once, and after a round of all of them with growing pauses. The lease is kept:
    it belongs to the cluster, not to the endpoint."""
    failures = beat.failures + 1
    rounds, rest = divmod(failures, beat.endpoints)
    pause = RETRY_S if rest else growing_pause_s(RETRY_S, rounds)
    return replace(beat, endpoint=(beat.endpoint + 1) % beat.endpoints, failures=failures, due_s=now_s + pause)


def busy(beat: Beat, now_s: float) -> Beat:
    """The service answered that it cannot now: another may, soon."""
    return replace(failed(beat, now_s), due_s=now_s + BUSY_RETRY_S)


def refused(beat: Beat) -> Beat:
    """The id belongs to somebody else."""
    return replace(beat, ended=True, lease=0)
