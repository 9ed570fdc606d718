"""Requests that end in every state of a transfer: nothing of them is left anywhere, and no stored byte is a wrong one."""

from __future__ import annotations

import gc
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from dfkv_connectors.vllm.requests import Phase
from tests.integration.fault_proxy import FaultProxy, Odds
from tests.integration.toy_engine import ToyEngine, ToyRequest
from tests.integration.toy_world import (
    DESCRIPTOR,
    NodeProcess,
    TakesAll,
    check_at_rest,
    check_stored,
    config_for,
    make_request,
    run_until_idle,
)

pytestmark = pytest.mark.slow

REQUESTS = 1000
PAGES = 40
ENOUGH = 30
# Ends and the states that they must have met. An engine preempts only what runs.
WAITING = ("hashing", "looking up", "answered")
LOADING = ("loading", "loaded")
RUNNING = ("computing", "saving", "saved")
ENDS = {"abort": (*WAITING, *LOADING, *RUNNING), "preempt": RUNNING, "finish": RUNNING}


class Recorder(ToyEngine):
    """Notes in which state of its transfers each request ends or is preempted."""

    ends: Counter[tuple[str, str]]
    aborting = False

    def transfer_state(self, request: ToyRequest) -> str:
        if request.status == "loading":
            load = self.worker._loads.get(request.request_id)
            return (
                "loading" if load is not None and load.operation is not None and not load.operation.done() else "loaded"
            )
        if request.status == "running":
            saves = self.worker._saves.get(request.request_id)
            if not saves:
                state = self.scheduler._states.get(request.request_id)
                return "saved" if state is not None and state.sent else "computing"
            return "saving" if any(not save.operation.done() for save in saves) else "saved"
        state = self.scheduler._states.get(request.request_id)
        if state is None or state.phase is Phase.HASHING:
            return "hashing"
        return "looking up" if state.lookup is not None and not state.lookup.done() else "answered"

    def abort(self, request: ToyRequest) -> None:
        self.ends["abort", self.transfer_state(request)] += 1
        self.aborting = True
        super().abort(request)
        self.aborting = False

    def finish(self, request: ToyRequest) -> None:
        if not self.aborting:
            self.ends["finish", self.transfer_state(request)] += 1
        super().finish(request)

    def preempt(self, request: ToyRequest) -> None:
        self.ends["preempt", self.transfer_state(request)] += 1
        super().preempt(request)

    def end_one(self, rng: random.Random) -> None:
        """Aborts or preempts a request in the state that was met least so far."""
        alive = [r for r in self.requests.values() if r.status != "finished"]
        choices = [("abort", request) for request in alive]
        choices += [("preempt", request) for request in alive if request.status == "running"]
        if not choices:
            return
        rng.shuffle(choices)
        end, request = min(choices, key=lambda choice: self.ends[choice[0], self.transfer_state(choice[1])])
        # What was met often lives on, to get to the later states.
        if self.ends[end, self.transfer_state(request)] < ENOUGH or rng.random() < 0.2:
            getattr(self, end)(request)


def check_engine_at_rest(engine: ToyEngine) -> None:
    assert len(engine.free) == PAGES - 1, "pages leaked"
    scheduler, worker = engine.scheduler, engine.worker
    left = [
        scheduler._states,
        scheduler._loads,
        scheduler._finished,
        scheduler._cancelled,
        worker._loads,
        worker._saves,
    ]
    assert not any(left), left
    assert not worker._finishing
    assert not worker._failed_pages
    for half in (scheduler, worker):
        assert half._client is not None
        stats = half._client.stats()
        assert stats["inflight_operations"] == stats["inflight_bytes"] == 0


def descriptors(pid: int | str = "self") -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_a_thousand_requests_ended_in_every_state() -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    prefixes = [[rng.randrange(1000) for _ in range(rng.randrange(60, 260))] for _ in range(4)]
    proxy = FaultProxy(seed)
    node = NodeProcess(advertise=proxy.address)
    try:
        proxy.node_port = node.port
        gc.collect()
        before = descriptors(), threads()
        node_before = descriptors(node.process.pid)
        config = config_for(node, lease_ms=60_000, connections_per_node=1)
        engine = Recorder(config, seed, num_pages=PAGES, descriptor=DESCRIPTOR)
        engine.ends = Counter()
        engine.scheduler._worth = TakesAll()
        try:
            for index in range(REQUESTS):
                # By turns: answers that come before a request ends, and transfers that are still under way then.
                slow = 0.4 if index // 100 % 2 else 0.02
                proxy.odds = Odds(spoil_object=0.002, lose_object=0.002, pause=slow, longest_pause_s=0.01)
                engine.add(make_request(f"r{index}", rng, prefixes))
                if rng.random() < 0.3:
                    engine.end_one(rng)
                for _ in range(rng.randrange(5)):
                    engine.step(budget=rng.choice([16, 48, 96]))
                    if rng.random() < 0.4:
                        time.sleep(rng.random() * 0.003)
                    if rng.random() < 0.3:
                        engine.end_one(rng)
                if len(engine.requests) > 12:
                    run_until_idle(engine)
                if index % 250 == 249:
                    run_until_idle(engine)
                    check_engine_at_rest(engine)
                    # The engine's connections stand: its leases must have been given back, not have ended with them.
                    check_at_rest(node)
            proxy.odds = Odds()
            stored = check_stored(node, engine)
        finally:
            engine.close()
        print(f"{dict(engine.ends)}; {engine.loads_checked} loads and {stored} stored objects checked byte by byte")
        missed = [(end, state) for end, states in ENDS.items() for state in states if not engine.ends[end, state]]
        assert not missed, engine.ends
        assert engine.loads_checked > 30
        assert stored > 50
        check_at_rest(node)
        proxy.down()
        del engine
        gc.collect()
        end = time.monotonic() + 5
        # The proxy's own listener and its thread have gone too.
        while (left := (descriptors() + 1, threads() + 1, descriptors(node.process.pid))) != (*before, node_before):
            assert time.monotonic() < end, (left, before, node_before)
            time.sleep(0.02)
    finally:
        proxy.close()
        node.stop()
