"""Sums with labels that a connector keeps, and exports to Prometheus where its engine serves metrics."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple


class Family(NamedTuple):
    labels: tuple[str, ...]
    help: str


class Counters:
    """Sums of one connector. Any thread.

    families: every counter there is. prefix: on the endpoint names begin with it and end with "_total"; empty exports
    nothing. constant: labels that every exported counter has beside its family's.
    """

    def __init__(self, families: Mapping[str, Family], *, prefix: str = "", constant: Mapping[str, Any]) -> None:
        self._lock = threading.Lock()
        self._sums: dict[tuple[str, ...], float] = {}
        self._exported = _exported(tuple(families.items()), prefix, tuple(constant)) if prefix else {}
        self._constant = tuple(str(value) for value in constant.values())

    def add(self, family: str, amount: float, *labels: str) -> None:
        if not amount:
            return
        with self._lock:
            key = (family, *labels)
            self._sums[key] = self._sums.get(key, 0) + amount
        if (counter := self._exported.get(family)) is not None:
            counter.labels(*labels, *self._constant).inc(amount)

    def total(self, family: str, *labels: str) -> float:
        """The sum of a family over the labels that are not given."""
        with self._lock:
            return sum(value for key, value in self._sums.items() if key[: 1 + len(labels)] == (family, *labels))


@functools.cache
def _exported(families: tuple[tuple[str, Family], ...], prefix: str, constant: tuple[str, ...]) -> dict[str, Any]:
    """Prometheus counters exist once in a process, however often a connector is attached."""
    # Engines choose the form of their metrics before anything may import this.
    from prometheus_client import Counter

    return {
        name: Counter(f"{prefix}{name}", family.help, labelnames=(*family.labels, *constant))
        for name, family in families
    }
