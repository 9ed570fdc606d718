"""How late operations end, beside how late this process itself is served by the machine."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

NAP_S = 0.005
NOTED_S = 0.010


class Sleeper:
    """A thread that only sleeps: when it wakes late, so does everything else in this process."""

    def __init__(self) -> None:
        self._late: list[tuple[float, float]] = []  # (when it should have woken, when it did)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def late_within(self, start: float, end: float) -> float:
        """Seconds of the time between that this process was not served. Of time.monotonic()."""
        return sum(max(0.0, min(end, b) - max(start, a)) for a, b in reversed(self._late[-2000:]))

    @property
    def worst_s(self) -> float:
        """The latest that it ever woke."""
        return max((woke - due for due, woke in self._late), default=0.0)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            due = time.monotonic() + NAP_S
            time.sleep(NAP_S)
            now = time.monotonic()
            if now - due > NOTED_S:
                self._late.append((due, now))


@dataclass
class Overruns:
    """Of operations that ended after their deadline: seconds beyond it. total: of all that were timed."""

    total: int = 0
    seconds: list[float] = field(default_factory=list)

    def note(self, took_s: float, deadline_s: float) -> None:
        self.total += 1
        if took_s > deadline_s:
            self.seconds.append(took_s - deadline_s)
