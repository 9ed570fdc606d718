"""Is a hit worth taking? Predicts the time to load a prefix and the time to compute it, and compares.

Pure arithmetic over what has been observed: no clock, no I/O. One owner (the engine's scheduler thread).
"""

from __future__ import annotations

from dataclasses import dataclass

_WEIGHT = 0.25  # of the newest observation, in exponentially weighted means
_MIN_PREFILL_TOKENS = 64  # shorter steps say more about overhead than about prefill


@dataclass(frozen=True)
class Verdict:
    """`take` is the decision; predictions are None while nothing has been observed."""

    take: bool
    load_s: float | None
    compute_s: float | None


class WorthEstimator:
    """Learns prefill tokens/s and load bytes/s of one engine instance.

    While either is unknown a hit is taken: that is how it becomes known. After a refusal streak of
    `explore_every`, one hit is taken all the same, so that a rate measured in a bad moment does not stick.
    """

    def __init__(self, explore_every: int = 32) -> None:
        self._prefill_tokens_per_s: float | None = None
        self._load_bytes_per_s: float | None = None
        self._explore_every = explore_every
        self._refused = 0

    @property
    def prefill_tokens_per_s(self) -> float | None:
        return self._prefill_tokens_per_s

    @property
    def load_bytes_per_s(self) -> float | None:
        return self._load_bytes_per_s

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """A step computed `tokens` in `seconds`; decode-sized steps are ignored."""
        if tokens >= _MIN_PREFILL_TOKENS and seconds > 0:
            self._prefill_tokens_per_s = _mean(self._prefill_tokens_per_s, tokens / seconds)

    def observe_load(self, payload_bytes: int, seconds: float) -> None:
        """A load moved `payload_bytes` in `seconds`, its latency included."""
        if payload_bytes > 0 and seconds > 0:
            self._load_bytes_per_s = _mean(self._load_bytes_per_s, payload_bytes / seconds)

    def judge(self, tokens: int, payload_bytes: int) -> Verdict:
        """Loading `payload_bytes` would save computing `tokens`."""
        load_s = payload_bytes / self._load_bytes_per_s if self._load_bytes_per_s else None
        compute_s = tokens / self._prefill_tokens_per_s if self._prefill_tokens_per_s else None
        if load_s is None or compute_s is None or load_s < compute_s:
            self._refused = 0
            return Verdict(True, load_s, compute_s)
        self._refused += 1
        if self._refused >= self._explore_every:
            self._refused = 0
            return Verdict(True, load_s, compute_s)
        return Verdict(False, load_s, compute_s)


def _mean(previous: float | None, newest: float) -> float:
    return newest if previous is None else previous + _WEIGHT * (newest - previous)
