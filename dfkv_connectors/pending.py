"""A value that costs reading files, made on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
MOST_WAITING = 256


class Pending(Generic[T]):
    """What `make` returns, once it is there. Any thread."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._value: T | None = None
        self._waiting: list[Callable[[], None]] = []
        self.error = ""
        """Once done: why there is no value."""
        threading.Thread(target=self._run, name="dfkv-identity", daemon=True).start()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float) -> T | None:
        """None: not known yet, or `error` says why it never will be."""
        self._done.wait(max(0.0, timeout_s))
        return self._value

    def then(self, call: Callable[[], None]) -> bool:
        """Calls at once where it is done, otherwise on the thread that makes it. False: too many wait already."""
        with self._lock:
            if not self._done.is_set():
                if len(self._waiting) >= MOST_WAITING:
                    return False
                self._waiting.append(call)
                return True
        call()
        return True

    def _run(self) -> None:
        try:
            self._value = self._make()
        except Exception as error:
            self.error = str(error) or type(error).__name__
        finally:
            with self._lock:
                self._done.set()
                waiting, self._waiting = self._waiting, []
            for call in waiting:
                call()
