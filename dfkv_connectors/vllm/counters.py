"""What the connector counts. Both halves sum into a `Counters`; vLLM polls what was added since the last step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    label: str | None
    help: str


# Every counter there is. A sample is keyed "family" or "family:label value".
FAMILIES: dict[str, Family] = {
    "tokens": Family(
        "kind",
        "Prompt tokens by stage of the funnel: asked (of requests looked up), local (already in the engine), "
        "found (in dfkv, beyond local), not_taken (computing is faster, or fewer than min_restore_tokens), "
        "taken (load started); of these loaded, failed (to be recomputed, from the first failed block on) or "
        "abandoned (the request ended first).",
    ),
    "bytes": Family("direction", "Payload bytes moved: load or save."),
    "lookups": Family("result", "Requests looked up, by result: hit, or the reason of the miss."),
    "lookup_round_trips": Family(None, "Round trips that lookups waited for."),
    "load_objects": Family("status", "Objects asked for by loads, by status."),
    "save_objects": Family("status", "Objects offered by saves, by status."),
    "load_seconds": Family(None, "Time from submission to end of loads, per rank."),
    "save_seconds": Family(None, "Time from submission to end of saves, per rank."),
    "not_shared_requests": Family("reason", "Requests that take no part in sharing, by reason."),
    "abandoned_saves": Family("reason", "Saves given up before they were stored, by reason."),
    "hook_seconds": Family("role", "Time the engine spent inside the connector's hooks: scheduler or worker."),
    "step_seconds": Family(None, "Time of the worker's steps that computed tokens, connector included."),
    "faults": Family("hook", "Exceptions caught at a hook; the connector switches itself off."),
}


class Counters:
    """Sums since the last take(). One thread."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}

    def add(self, family: str, amount: float = 1, label: str | None = None) -> None:
        assert (FAMILIES[family].label is None) == (label is None), family
        if amount:
            key = family if label is None else f"{family}:{label}"
            self._sums[key] = self._sums.get(key, 0) + amount

    def take(self) -> dict[str, float] | None:
        """{"family" or "family:label value": sum since the last call}, None when there is none."""
        if not self._sums:
            return None
        sums, self._sums = self._sums, {}
        return sums
