"""A process with several clients that all put and get large batches at once, for tests of memory.

usage: python -m tests.integration.crowd ADDRESS PATH FIRST CLIENTS OBJECTS KEPT SECONDS DEADLINE_MS BUDGET

PATH: memory of OBJECTS objects, which every client writes under keys of its own, again and again, and into which it reads the KEPT
objects that are stored, as often as they fit. Prints "ready", waits for a line, and prints a line of JSON for each client and one for
the process.
"""

from __future__ import annotations

import json
import mmap
import sys
import threading
import time
from collections import Counter
from hashlib import sha256
from pathlib import Path

from dfkv_core.client import Client, Item
from tests.integration.test_client_faults import DESCRIPTOR

OBJECT_BYTES = 4 << 20


def content(number: int) -> bytes:
    """Of an object: a mark that repeats."""
    mark = sha256(number.to_bytes(4, "little")).digest()
    return mark * (OBJECT_BYTES // len(mark))


def key(owner: str, number: int) -> bytes:
    return sha256(f"{owner}/{number}".encode()).digest()[:16]


def anonymous_bytes(pid: int | str = "self") -> int:
    """Memory of a process that is not mapped from a file."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


class Crowd:
    def __init__(
        self, address: str, path: str, objects: int, kept: int, seconds: float, deadline_ms: float, budget: int
    ) -> None:
        self._address = address
        self._kept = kept
        self.reports: list[dict[str, object]] = []
        self._seconds = seconds
        self._deadline_ms = deadline_ms
        self._budget = budget
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), objects * OBJECT_BYTES)
        whole = memoryview(self._memory)
        self._views = [whole[i * OBJECT_BYTES : (i + 1) * OBJECT_BYTES] for i in range(objects)]

    def one(self, number: int, start: threading.Event) -> None:
        """One client until the time is over, and at least one batch of each."""
        seen: Counter[str] = Counter()
        slowest_s = {"put": 0.0, "get": 0.0}
        batches = 0
        stored = [Item(key("kept", i % self._kept), 0, view) for i, view in enumerate(self._views)]
        with Client.open([self._address], max_inflight_bytes=self._budget) as client:
            assert client.wait_ready(60_000)
            namespace = client.add_namespace(DESCRIPTOR)
            start.wait()
            until = time.monotonic() + self._seconds
            while batches == 0 or time.monotonic() < until:
                own = [Item(key(f"{number}/{batches}", i), 0, view) for i, view in enumerate(self._views)]
                for op, batch in (("put", own), ("get", stored)):
                    began = time.monotonic()
                    move = client.put if op == "put" else client.get
                    result = move(namespace, batch, deadline_ms=self._deadline_ms)
                    slowest_s[op] = max(slowest_s[op], time.monotonic() - began)
                    for status in result.statuses:
                        seen[f"{op} {status.label}"] += 1
                batches += 1
        self.reports.append({"batches": batches, "statuses": dict(seen), "slowest_s": slowest_s})


def main(arguments: list[str]) -> int:
    address, path = arguments[:2]
    first, clients, objects, kept = (int(each) for each in arguments[2:6])
    crowd = Crowd(address, path, objects, kept, float(arguments[6]), float(arguments[7]), int(arguments[8]))
    start = threading.Event()
    threads = [threading.Thread(target=crowd.one, args=(first + i, start)) for i in range(clients)]
    for thread in threads:
        thread.start()
    print("ready", flush=True)
    sys.stdin.readline()
    start.set()
    most = 0
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.2)
        most = max(most, anonymous_bytes())
    for report in [*crowd.reports, {"anonymous_bytes": most}]:
        print(json.dumps(report), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
