"""Saves that are still being sent when their request ends: whoever gets the pages next leaves no trace in what is stored."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from tests.integration.fault_proxy import FaultProxy
from tests.integration.toy_engine import ToyEngine, ToyRequest
from tests.integration.toy_world import (
    CHUNK_TOKENS,
    DESCRIPTOR,
    NodeProcess,
    TakesAll,
    check_at_rest,
    check_stored,
    config_for,
    run_until_idle,
)

PAGES = 40
CHUNKS = 6
DEADLINE_S = 5.0


def request(name: str, seed: int) -> ToyRequest:
    rng = random.Random(seed)
    tokens = [rng.randrange(1000) for _ in range(CHUNKS * CHUNK_TOKENS + 4)]
    return ToyRequest(name, tokens, len(tokens), max_new_tokens=1000)


def run_until(engine: ToyEngine, holds: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not holds():
        engine.step(budget=64)
        time.sleep(0.001)
        assert time.monotonic() < end, {r.request_id: r.status for r in engine.requests.values()}


@pytest.mark.parametrize("ending", ["preempt", "finish", "abort"])
def test_pages_of_a_save_under_way_are_not_sent_for_another_request(ending: str) -> None:
    proxy = FaultProxy(1, segment_bytes=536)
    node = NodeProcess(advertise=proxy.address)
    try:
        proxy.node_port = node.port
        config = config_for(node, connections_per_node=1, save_deadline_ms=20_000)
        engine = ToyEngine(config, 1, num_pages=PAGES, descriptor=DESCRIPTOR)
        engine.scheduler._worth = TakesAll()
        try:
            first, second = request("first", 1), request("second", 2)
            proxy.puts_pass.clear()
            engine.add(first)
            run_until(engine, lambda: first.num_computed_tokens >= CHUNKS * CHUNK_TOKENS)
            saves = engine.worker._saves["first"]
            assert saves
            time.sleep(0.1)
            assert not any(save.operation.done() for save in saves), "the save is over, the test shows nothing"
            pages = set(first.pages)
            getattr(engine, ending)(first)
            engine.add(second)
            # Preempted, the first asks for pages again, behind the second.
            if ending == "preempt":
                engine.requests["first"] = engine.requests.pop("first")
            for _ in range(40):
                engine.step(budget=64)
                time.sleep(0.001)
            again = pages & set(second.pages)
            proxy.puts_pass.set()
            for other in list(engine.requests.values()):
                other.max_new_tokens = 1
            run_until_idle(engine)
            # A preempted request's pages are anybody's at once; those of one that has ended stay until they are sent.
            assert bool(again) == (ending == "preempt"), f"{len(again)} of {len(pages)} pages were used again"
            assert check_stored(node, engine) > 0
        finally:
            engine.close()
        check_at_rest(node)
    finally:
        proxy.close()
        node.stop()
