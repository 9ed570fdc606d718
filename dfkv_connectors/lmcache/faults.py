"""What goes wrong inside a call of LMCache: counted, logged once, never raised. Any thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from dfkv_connectors.counters import Counters

MOST_MESSAGES = 256
T = TypeVar("T")


class Faults:
    """counters: has the family "faults". logger: of the connector."""

    def __init__(self, counters: Counters, logger: logging.Logger) -> None:
        self._counters = counters
        self._logger = logger
        self._lock = threading.Lock()
        self._told: set[str] = set()
        self._closed = False

    def close(self) -> None:
        """What fails from now on does so because of that."""
        self._closed = True

    def guarded(self, name: str, call: Callable[[], T]) -> T | None:
        """None where the call raised."""
        try:
            return call()
        except Exception as error:
            self._caught(name, error)
            return None

    def succeeds(self, name: str, call: Callable[[], object]) -> bool:
        """Whether the call raised nothing."""
        try:
            call()
        except Exception as error:
            self._caught(name, error)
            return False
        return True

    async def awaited(self, name: str, call: Awaitable[T]) -> T | None:
        """None where it raised."""
        try:
            return await call
        except Exception as error:
            self._caught(name, error)
            return None

    def tell(self, message: str, level: int = logging.WARNING) -> None:
        """Once."""
        with self._lock:
            if message in self._told or len(self._told) >= MOST_MESSAGES:
                return
            self._told.add(message)
        self._logger.log(level, "%s", message, exc_info=level >= logging.ERROR)

    def _caught(self, name: str, error: Exception) -> None:
        if self._closed:
            return
        self._counters.add("faults", 1, name)
        self.tell(f"dfkv: fault in {name}; it counts as a miss ({type(error).__name__}: {error})", logging.ERROR)
