"""The soak itself: nodes, the wire that spoils one of them, client processes, and what happens to the nodes meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dfkv_core.client import Client
from tests.integration.serve_process import ServeProcess, clean_environ
from tests.soak.worker import rss_bytes

NODES = 3
SPOILED = 2  # the node behind the wire that spoils
SPARED = 0  # never killed, so that its memory can be followed from the start to the end
WORKERS = 3
RAM_BYTES = 64 << 20  # of each node, less than the keys need: they evict all the time
NODE_OVERHEAD_BYTES = 160 << 20  # interpreter, library, connections, requests in flight
GROWTH_BYTES = 24 << 20  # between the middle and the last fifth of the time
LATE_S = 0.1  # beyond a deadline, on a machine that is never late itself
AGAIN_S = 2.0
NOISE_S = 1.0  # of a busy machine, on AGAIN_S
WORKER_DEADLINE_S = 90.0  # after the last fault
REST_DEADLINE_S = 20.0


class SoakError(AssertionError):
    """Something was not as promised; the message has all of it."""


@dataclass
class Outcome:
    """What a soak has seen. Seconds, bytes."""

    seed: int
    seconds: float
    operations: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    faults_made: Counter[str] = field(default_factory=Counter)
    verified_bytes: int = 0
    timed: int = 0
    over_s: list[float] = field(default_factory=list)
    machine_late_s: float = 0.0  # the latest that a thread of a client process woke which only slept
    in_use_again_s: float = 0.0
    node_rss_bytes: int = 0
    worker_rss_bytes: int = 0
    checksum_failures: int = 0
    failures: list[str] = field(default_factory=list)

    def summary(self) -> str:
        late = f"{len(self.over_s)} of {self.timed} timed operations met their deadline"
        if self.over_s:
            p50, p99, worst = (f"{_share(self.over_s, share) * 1000:.1f}" for share in (0.5, 0.99, 1.0))
            late += f": ended {p50} ms after it at p50, {p99} at p99, {worst} at worst"
        late += f"; a thread that only sleeps woke {self.machine_late_s * 1000:.1f} ms late at worst"
        lines = [
            f"seed {self.seed}, {self.seconds:.0f} s: {sum(self.operations.values())} operations {dict(self.operations)}",
            f"{self.verified_bytes / 1e9:.2f} GB compared byte for byte; statuses {dict(self.statuses)}",
            f"{dict(self.faults_made)}; {self.checksum_failures} spoiled objects were noticed",
            late,
            f"all nodes in use {self.in_use_again_s:.2f} s after the last fault",
            f"memory at most {self.node_rss_bytes >> 20} MiB of a node with {RAM_BYTES >> 20} MiB of cache",
            f"memory at most {self.worker_rss_bytes >> 20} MiB of a client process",
        ]
        return "\n".join(lines)


class Soak:
    def __init__(
        self, seed: int, seconds: float, folder: Path, tell: Callable[[str], None] = lambda line: None
    ) -> None:
        self._seed = seed
        self._seconds = seconds
        self._folder = folder
        self._tell = tell
        self._rng = random.Random(f"{seed}/faults")
        self._ports = _free_ports(NODES)
        self._addresses = [f"127.0.0.1:{port}" for port in self._ports]
        self._nodes: list[ServeProcess | None] = [None] * NODES
        self._starts = 0
        self._node_rss: list[list[tuple[float, int]]] = [[] for _ in range(NODES)]
        self._outcome = Outcome(seed, seconds)

    def run(self) -> Outcome:
        """Raises SoakError."""
        with contextlib.ExitStack() as stack:
            spoiler = stack.enter_context(_process("tests.soak.spoiler", str(self._seed)))
            self._addresses[SPOILED] = f"127.0.0.1:{int(_line(spoiler, 20))}"
            _say(spoiler, str(self._ports[SPOILED]))
            stack.callback(self._kill_all)
            for index in range(NODES):
                self._start(index)
            workers = [
                stack.enter_context(
                    _process(
                        "tests.soak.worker", str(self._seed), str(i), str(WORKERS), str(self._seconds), *self._addresses
                    )
                )
                for i in range(WORKERS)
            ]
            for worker in workers:
                assert _line(worker, 40) == "working"
            self._break_things()
            self._judge(workers)
            self._at_rest()
        if self._outcome.failures:
            raise SoakError(self._outcome.summary() + "\n" + "\n".join(self._outcome.failures[:20]))
        return self._outcome

    # ---- nodes

    def _start(self, index: int) -> None:
        self._starts += 1
        peers = ",".join(f"soak{i}={address}" for i, address in enumerate(self._addresses))
        self._nodes[index] = ServeProcess(
            self._folder / f"node{index}-{self._starts}.log",
            *("--port", str(self._ports[index]), "--ram", str(RAM_BYTES), "--node-id", f"soak{index}"),
            DFKV_NODE__PEERS=peers,
            DFKV_NODE__ADVERTISE=self._addresses[index],
        )

    def _kill_all(self) -> None:
        for node in self._nodes:
            if node is not None:
                os.kill(node.pid, signal.SIGCONT)
                node.kill()

    def _break_things(self) -> None:
        """For the length of the soak: kills with restarts, and stops, one at a time or two at once."""
        began = time.monotonic()
        stop = threading.Event()
        sampler = threading.Thread(target=self._sample, args=(began, stop), daemon=True)
        sampler.start()
        try:
            while (left := self._seconds - (time.monotonic() - began)) > 1.5:
                self._tell(f"{left:.0f} s left: {dict(self._outcome.faults_made)}")
                time.sleep(self._rng.uniform(0.3, 2.0))
                if self._rng.random() < 0.35:
                    self._kill(self._rng.choice([i for i in range(NODES) if i != SPARED]))
                else:
                    self._stop(self._rng.sample(range(NODES), self._rng.choice((1, 1, 1, 2))))
            time.sleep(max(0.0, self._seconds - (time.monotonic() - began)))
        finally:
            stop.set()
            sampler.join()

    def _kill(self, index: int) -> None:
        self._outcome.faults_made["killed"] += 1
        node = self._nodes[index]
        assert node is not None
        self._nodes[index] = None
        node.kill()
        time.sleep(self._rng.uniform(0.0, 1.0))
        self._start(index)

    def _stop(self, indices: list[int]) -> None:
        self._outcome.faults_made["stopped"] += len(indices)
        stopped = [node for index in indices if (node := self._nodes[index]) is not None]
        for node in stopped:
            os.kill(node.pid, signal.SIGSTOP)
        time.sleep(self._rng.choice((0.02, 0.2, 2.0)) * self._rng.random())
        for node in stopped:
            os.kill(node.pid, signal.SIGCONT)

    def _sample(self, began: float, stop: threading.Event) -> None:
        while not stop.wait(0.5):
            for index, node in enumerate(self._nodes):
                if node is not None:
                    self._node_rss[index].append((time.monotonic() - began, rss_bytes(node.pid)))

    # ---- judgement

    def _judge(self, workers: list[subprocess.Popen[str]]) -> None:
        outcome = self._outcome
        for worker in workers:
            assert _line(worker, WORKER_DEADLINE_S) == "done"
        for worker in workers:
            _say(worker, "healed")
        for number, worker in enumerate(workers):
            report: dict[str, Any] = json.loads(_line(worker, WORKER_DEADLINE_S))
            outcome.operations.update(report["operations"])
            outcome.statuses.update(report["statuses"])
            outcome.verified_bytes += report["verified_bytes"]
            outcome.timed += report["timed"]
            outcome.over_s += report["over_s"]
            outcome.machine_late_s = max(outcome.machine_late_s, report["machine_late_s"])
            outcome.checksum_failures += report["checksum_failures"]
            outcome.in_use_again_s = max(outcome.in_use_again_s, report["in_use_again_s"])
            outcome.worker_rss_bytes = max([outcome.worker_rss_bytes, *(size for _, size in report["rss_bytes"])])
            outcome.failures += [f"client process {number}: {fault}" for fault in report["faults"]]
            if report["left"]:
                outcome.failures.append(f"client process {number} has {report['left']} left")
            self._flat(f"client process {number}", report["rss_bytes"])
        outcome.over_s.sort()
        limit_s = LATE_S + 2 * outcome.machine_late_s
        if outcome.over_s and outcome.over_s[-1] > limit_s:
            outcome.failures.append(
                f"an operation ended {outcome.over_s[-1]:.3f} s after its deadline, at most {limit_s:.3f}"
            )
        if outcome.in_use_again_s > AGAIN_S + NOISE_S:
            outcome.failures.append(f"a node was in use again after {outcome.in_use_again_s:.1f} s, at most {AGAIN_S}")
        outcome.node_rss_bytes = max(size for node in self._node_rss for _, size in node)
        if outcome.node_rss_bytes > RAM_BYTES + NODE_OVERHEAD_BYTES:
            outcome.failures.append(
                f"a node with {RAM_BYTES >> 20} MiB of cache took {outcome.node_rss_bytes >> 20} MiB"
            )
        self._flat("the node that was never killed", self._node_rss[SPARED])

    def _flat(self, who: str, samples: list[tuple[float, int]]) -> None:
        middle = [size for at, size in samples if 0.4 < at / self._seconds < 0.6]
        last = [size for at, size in samples if at / self._seconds > 0.8]
        if middle and last and max(last) - max(middle) > GROWTH_BYTES:
            self._outcome.failures.append(f"{who} grew from {max(middle) >> 20} to {max(last) >> 20} MiB")

    def _at_rest(self) -> None:
        """No pin, no lease, nothing half written is left on any node."""
        with Client.open(self._addresses) as client:
            until = time.monotonic() + REST_DEADLINE_S
            while True:
                left = []
                for name, stats in client.node_stats().items():
                    if stats is None:
                        left.append(f"{name} does not answer")
                        continue
                    held = ("pins", "leases", "filling", "condemned", "request_bytes")
                    left += [f"{name}: {what} {stats[what]}" for what in held if stats[what]]
                if not left:
                    return
                if time.monotonic() > until:
                    self._outcome.failures.append(f"not at rest: {left}")
                    return
                time.sleep(0.1)


@contextlib.contextmanager
def _process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env={**clean_environ(), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _line(process: subprocess.Popen[str], deadline_s: float) -> str:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], deadline_s)
    line = process.stdout.readline() if readable else ""
    if not line:
        raise SoakError(f"{process.args!r} said nothing in {deadline_s} s (exit status {process.poll()})")
    return line.rstrip("\n")


def _say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _share(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
