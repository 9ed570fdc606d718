"""Stopping a process, for tests in the project's own environment and inside an engine's. Standard library only."""

import os
import signal
import time
from pathlib import Path

_DEADLINE_S = 10.0


def stop_process(pid: int) -> None:
    """SIGSTOP, and waits until no thread of the process runs any more: the signal alone says only that they will stop."""
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + _DEADLINE_S
    while not all(_stopped(thread) for thread in Path(f"/proc/{pid}/task").iterdir()):
        if time.monotonic() > until:
            raise TimeoutError(f"process {pid} does not stop within {_DEADLINE_S} s")
        time.sleep(0.001)


def _stopped(thread: Path) -> bool:
    try:
        # The state follows the name, which is in parentheses and may hold anything.
        return thread.joinpath("stat").read_text().rpartition(")")[2].split()[0] in "TtZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
