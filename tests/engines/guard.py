"""Runs a command and leaves nothing of it behind, whatever happens to the process that asked for it.

usage: guard.py GRACE_S COMMAND...

The command's life is tied to this process's standard input: when that reaches its end (the owner closed it, or died), or on
SIGTERM, the command gets SIGTERM, GRACE_S seconds later SIGKILL, and so does every descendant, also those that made
sessions of their own: as a child subreaper this process inherits them. Shared memory files of vLLM that they had mapped are
removed. Exit status: the command's own. Standard library only.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
SHARED_MEMORY_PREFIXES = ("/dev/shm/vllm_", "/dev/shm/psm_")
SHARED_MEMORY_POLL_S = 10.0


def descendants(root: int) -> list[int]:
    """Every process below `root`, parents first."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                stat = Path("/proc", entry, "stat").read_text()
                parent = int(stat.rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    pending = [root]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def shared_memory(pids: list[int]) -> set[str]:
    """vLLM's shared memory files that these processes have mapped."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                slash = line.find("/dev/shm/")
                if slash >= 0 and line[slash:].startswith(SHARED_MEMORY_PREFIXES):
                    found.add(line[slash:].removesuffix(" (deleted)"))
    return found


def reap() -> None:
    """Collects inherited descendants that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def main(arguments: list[str]) -> int:
    grace_s = float(arguments[0])
    # A process group of its own: Ctrl-C reaches the owner alone, which then ends its servers in order. Not a session of its
    # own: the kernel deals out CPU time by session, and a node that needs little would wait behind a busy engine.
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    stop_read, stop_write = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: os.write(stop_write, b"t"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process = subprocess.Popen(arguments[1:], stdin=subprocess.DEVNULL)
    mapped: set[str] = set()
    next_look = 0.0
    try:
        while process.poll() is None:
            readable, _, _ = select.select([sys.stdin, stop_read], [], [], 0.25)
            if readable:
                break
            if time.monotonic() > next_look:  # also of an engine that crashes, its files must be known before
                mapped |= shared_memory(descendants(os.getpid()))
                next_look = time.monotonic() + SHARED_MEMORY_POLL_S
        mapped |= shared_memory(descendants(os.getpid()))
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
    finally:
        deadline = time.monotonic() + 10.0
        while left := descendants(os.getpid()):
            signal_all(left, signal.SIGKILL)
            process.poll()
            if process.returncode is not None:
                reap()
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        for name in mapped:
            with contextlib.suppress(OSError):
                os.unlink(name)
    code = process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
