"""One client process of the soak. Prints a line when it works and one when it is done, and after a line on its input one of JSON
with what it saw.

usage: python -m tests.soak.worker SEED INDEX WORKERS SECONDS ADDRESS...
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from dfkv_core import _native
from dfkv_core.client import Client, Item
from dfkv_core.keys import route_of
from tests.soak.lateness import Sleeper
from tests.soak.writer import HANG_S, Writer

WRITERS = 4
DESCRIPTOR = struct.pack("<HI", 1, 4) + b"soak"
SAMPLE_S = 0.5
READY_DEADLINE_MS = 20_000
AGAIN_LIMIT_S = 20.0


class Worker:
    def __init__(self, seed: int, index: int, workers: int, addresses: list[str]) -> None:
        self.client = Client.open(addresses, name=f"soak-{index}", connect_timeout_ms=500)
        self.namespace = self.client.add_namespace(DESCRIPTOR)
        self.sleeper = Sleeper()
        self.writers = [
            Writer(seed, index * WRITERS + i, workers * WRITERS, self.client, self.namespace) for i in range(WRITERS)
        ]
        self.rss_bytes: list[tuple[float, int]] = []
        self.hung: list[str] = []

    def run(self, seconds: float) -> None:
        began = time.monotonic()
        threads = [threading.Thread(target=writer.run, args=(began + seconds,), daemon=True) for writer in self.writers]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(SAMPLE_S)
            now = time.monotonic()
            self.rss_bytes.append((now - began, rss_bytes()))
            for writer, thread in zip(self.writers, threads, strict=True):
                served = now - writer.busy_since - self.sleeper.late_within(writer.busy_since, now)
                if thread.is_alive() and served > HANG_S:
                    self.hung.append(f"an operation has run for {served:.1f} s")
                    return

    def in_use_again(self, limit_s: float) -> float:
        """Seconds until every node has taken a put, after the last fault has ended."""
        began = time.monotonic()
        view = self.client.view()
        assert view is not None
        nodes = [node["id"] for node in _native.decode_view(view)["nodes"]]
        ring = _native.Ring(nodes, [1] * len(nodes))
        waiting = set(range(len(nodes)))
        while waiting and time.monotonic() - began < limit_s:
            block = os.urandom(16)
            owner = ring.owner(route_of(block))
            if owner in waiting and self.client.put(self.namespace, [Item(block, 0, b"x")], deadline_ms=200).ok:
                waiting.discard(owner)
        return time.monotonic() - began if not waiting else float("inf")

    def report(self) -> dict[str, object]:
        writers = self.writers
        stats = self.client.stats()
        return {
            "faults": [fault for writer in writers for fault in writer.faults] + self.hung,
            "operations": dict(sum((writer.operations for writer in writers), Counter())),
            "statuses": dict(sum((writer.statuses for writer in writers), Counter())),
            "verified_bytes": sum(writer.verified_bytes for writer in writers),
            "timed": sum(writer.overruns.total for writer in writers),
            "over_s": sorted(over for writer in writers for over in writer.overruns.seconds),
            "machine_late_s": self.sleeper.worst_s,
            "rss_bytes": self.rss_bytes,
            "left": {name: stats[name] for name in ("inflight_operations", "inflight_bytes") if stats[name]},
            "disconnects": stats["disconnects"],
            "checksum_failures": stats["checksum_failures"],
        }


def rss_bytes(pid: int | str = "self") -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def main(arguments: list[str]) -> int:
    seed, index, workers = (int(each) for each in arguments[:3])
    worker = Worker(seed, index, workers, arguments[4:])
    if not worker.client.wait_ready(READY_DEADLINE_MS):
        print("no node answers", file=sys.stderr)
        return 1
    print("working", flush=True)
    worker.run(float(arguments[3]))
    print("done", flush=True)
    sys.stdin.readline()  # every fault has ended
    again_s = worker.in_use_again(AGAIN_LIMIT_S) if not worker.hung else 0.0
    there = sum(writer.read_everything() for writer in worker.writers) if not worker.hung else 0
    worker.sleeper.stop()
    print(json.dumps({**worker.report(), "in_use_again_s": again_s, "keys_there": there}), flush=True)
    worker.client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
