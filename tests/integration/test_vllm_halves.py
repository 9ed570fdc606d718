"""The connector's two halves under a toy engine that keeps vLLM's promises, against a real node in another process.

The oracle knows every byte: pages after a load, and every object that was ever stored, must be exactly right.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator

import pytest

from tests.integration.toy_engine import ToyRequest
from tests.integration.toy_world import (
    CHUNK_TOKENS,
    NodeProcess,
    check_at_rest,
    check_stored,
    engine_for,
    make_request,
    run_until_idle,
)


@pytest.fixture
def node() -> Iterator[NodeProcess]:
    process = NodeProcess()
    yield process
    process.stop()


def test_second_engine_restores_every_full_chunk(node: NodeProcess) -> None:
    tokens = list(range(300))
    with engine_for(node, 1) as first:
        first.add(ToyRequest("a", list(tokens), 300, max_new_tokens=1))
        run_until_idle(first)
        assert check_stored(node, first) >= (300 // CHUNK_TOKENS) * 4
    with engine_for(node, 2) as second:
        request = ToyRequest("b", [*tokens[:290], 7, 8, 9], 293, max_new_tokens=1)
        second.add(request)
        local = second.local_hit(request)
        run_until_idle(second)
        assert second.tokens_loaded == (290 // CHUNK_TOKENS) * CHUNK_TOKENS - local
        assert second.tokens_failed == 0
    check_at_rest(node)


def test_salt_and_one_token_keep_requests_apart(node: NodeProcess) -> None:
    tokens = list(range(200))
    with engine_for(node, 1) as first:
        first.add(ToyRequest("a", list(tokens), 200, max_new_tokens=1))
        run_until_idle(first)
    with engine_for(node, 2) as second:
        for name, salt, changed in (("salted", "x", 0), ("first", None, 0), ("middle", None, CHUNK_TOKENS * 2 + 5)):
            other = list(tokens)
            if salt is None:
                other[changed] = 999
            second.add(ToyRequest(name, other, 200, cache_salt=salt, max_new_tokens=1))
        run_until_idle(second)
        counted = second.scheduler.counters.take()
        assert counted is not None
        # Only "middle" shares: its two chunks before the changed token, less what its engine has itself.
        assert counted.get("tokens:found", 0) <= 2 * CHUNK_TOKENS


@pytest.mark.parametrize("seed", range(4))
def test_random_requests_with_aborts_and_preemptions(node: NodeProcess, seed: int) -> None:
    """Few pages force preemptions; requests are aborted in every state. Nothing wrong is loaded or stored."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    prefixes = [[rng.randrange(1000) for _ in range(rng.randrange(60, 260))] for _ in range(4)]
    with engine_for(node, seed, pages=40) as engine:
        for index in range(250):
            engine.add(make_request(f"r{index}", rng, prefixes))
            for _ in range(rng.randrange(6)):
                engine.step(budget=rng.choice([16, 48, 96]))
                if rng.random() < 0.3:
                    time.sleep(rng.random() * 0.002)
            if rng.random() < 0.35:
                alive = [r for r in engine.requests.values() if r.status != "finished"]
                if alive:
                    engine.abort(rng.choice(alive))
            if len(engine.requests) > 12:
                run_until_idle(engine)
        run_until_idle(engine)
        assert len(engine.free) == 39, "pages leaked"
        assert engine.loads_checked > 10
        assert engine.preemptions > 5
        assert check_stored(node, engine) > 50
    check_at_rest(node)


def test_node_killed_stopped_and_restarted_under_traffic(node: NodeProcess) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    prefixes = [[rng.randrange(1000) for _ in range(200)] for _ in range(3)]
    with engine_for(node, seed) as engine:
        for round_ in range(6):
            for index in range(10):
                engine.add(make_request(f"{round_}.{index}", rng, prefixes))
                engine.step()
                if index == 4:
                    node.signal(signal.SIGKILL if round_ % 2 else signal.SIGSTOP)
            run_until_idle(engine)
            if round_ % 2:
                node.process.wait(10)
                node.start()
            else:
                node.signal(signal.SIGCONT)
        # The node is used again, without touching the engine.
        time.sleep(2)
        loaded = engine.tokens_loaded
        for index in range(20):
            engine.add(make_request(f"end.{index}", rng, prefixes))
            run_until_idle(engine)
        assert engine.tokens_loaded > loaded
        assert len(engine.free) == 63
        check_stored(node, engine)
    check_at_rest(node)


def test_failed_load_is_not_tried_again_for_its_request(node: NodeProcess) -> None:
    tokens = list(range(300))
    with engine_for(node, 1) as first:
        first.add(ToyRequest("a", list(tokens), 300, max_new_tokens=1))
        run_until_idle(first)
    with engine_for(node, 2) as second:
        request = ToyRequest("b", list(tokens), 300, max_new_tokens=1)
        second.add(request)
        while second.scheduler.matched_tokens(request, 0) is None:
            time.sleep(0.001)
        node.signal(signal.SIGKILL)
        node.process.wait(10)
        run_until_idle(second)
        counted = second.scheduler.counters.take()
        assert counted is not None
        assert counted["tokens:taken"] == counted["tokens:failed"]
        assert counted.get("tokens:loaded", 0) == 0
    node.start()


def test_without_a_node_requests_run_and_cost_no_wait() -> None:
    absent = NodeProcess()
    absent.stop()
    with engine_for(absent, 1) as engine:
        for index in range(5):
            engine.add(ToyRequest(f"r{index}", list(range(100)), 100, max_new_tokens=2))
            run_until_idle(engine, timeout_s=2.0)
        assert engine.tokens_loaded == 0
