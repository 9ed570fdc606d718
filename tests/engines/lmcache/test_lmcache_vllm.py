"""A real vLLM, a real LMCache server and dfkv behind it: restores by fresh processes, and a node that dies at each moment."""

import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engines.answers import agrees_with_cold, identical
from tests.engines.conftest import report
from tests.engines.fault_relay import FaultRelay, Moment
from tests.engines.http_client import Completion
from tests.engines.lmcache.server import CHUNK_TOKENS, QUIET, TOKENS, LmcacheServer, vllm_connector
from tests.engines.setup_engine import EngineEnv
from tests.engines.tiny_model import TINY, ensure_model
from tests.engines.vllm_server import DfkvServe, VllmOptions, VllmServer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

ANSWER_TOKENS = 12
CHUNKS = TOKENS // CHUNK_TOKENS
QUESTION_TOKENS = 64
"""Behind the chunks, and less than a block: after a local hit and after a restore the engine computes these and no others."""
SEED = 20261129
DEADLINES = {"lookup_deadline_ms": 3000, "load_deadline_ms": 3000, "save_deadline_ms": 3000}


@dataclass
class Stack:
    """An engine, LMCache's server, and a node that is reached through a relay."""

    engine: VllmServer
    server: LmcacheServer
    node: DfkvServe
    relay: FaultRelay

    def ask(self, name: str) -> Completion:
        return self.engine.client.complete(prompt(name), max_tokens=ANSWER_TOKENS)

    def local_hit(self, name: str) -> Completion:
        """The answer after a hit in the engine's own cache."""
        self.ask(name)
        answer = self.ask(name)
        assert answer.cached_tokens == TOKENS, answer.cached_tokens
        return answer

    def forget(self) -> None:
        """The engine's own cache and LMCache's memory are empty: what is left is on the node."""
        self.node.wait_quiet(quiet_s=0.3)
        self.engine.client.reset_prefix_cache()
        self.server.clear()

    def loaded(self) -> float:
        return self.server.counted("keys", operation="load", status="ok")

    def rest(self, *, of_server: bool = True) -> None:
        """Nothing is pinned or leased, and nothing is locked."""
        until = time.monotonic() + 15
        while True:
            metrics = self.node.metrics()
            held = metrics.total("dfkv_node_pins") + metrics.total("dfkv_node_leases")
            locked = self.server.status()["locked_key_count"] if of_server else 0
            if not held and not locked:
                return
            assert time.monotonic() < until, f"{held} pins and leases, {locked} locked keys"
            time.sleep(0.1)


def prompt(name: str) -> list[int]:
    return random.Random(f"{SEED} {name}").choices(range(256), k=TOKENS + QUESTION_TOKENS)


@pytest.fixture(scope="module")
def stack(lmcache_env: EngineEnv, logs: Path) -> Iterator[Stack]:
    """What test_fresh_processes_restore leaves behind: its second engine and its second server."""
    with contextlib.ExitStack() as exits:
        node = DfkvServe(logs / "lmcache-vllm-node.log", ram="1GiB", name="node behind LMCache")
        relay = FaultRelay(node.port, seed=SEED)
        exits.callback(relay.close)
        node.set_env("DFKV_NODE__ADVERTISE", f"127.0.0.1:{relay.port}")
        exits.enter_context(node)
        server = LmcacheServer(lmcache_env, relay.port, logs / "lmcache-vllm.log", {"weights_id": "", **DEADLINES})
        exits.enter_context(server)
        options = VllmOptions(
            ensure_model(lmcache_env.python, TINY),
            served_name="model",
            connector=vllm_connector(server.port),
            max_model_len=TOKENS + 256,
            env=QUIET,
        )
        engine = VllmServer(lmcache_env, options, logs / "lmcache-vllm-engine.log", name="vllm before LMCache")
        exits.enter_context(engine)
        yield Stack(engine, server, node, relay)


def test_fresh_processes_restore(stack: Stack) -> None:
    """A new server and a new engine take every full chunk from dfkv; the answer is that of a local hit."""
    expected = stack.local_hit("restored")
    stack.node.wait_quiet(quiet_s=0.5)
    assert stack.server.counted("keys", operation="store", status="ok") == CHUNKS
    stack.engine.stop()
    stack.server.kill()
    stack.rest(of_server=False)
    stack.server.start()
    stack.engine.start()
    stack.server.wait_ready()
    stack.engine.wait_ready()
    answer = stack.ask("restored")
    same = identical(expected, answer)
    assert same.same, same.detail
    report(
        f"{answer.cached_tokens} of {TOKENS} tokens restored in {answer.ttft_s:.2f} s, local hit {expected.ttft_s:.2f} s"
    )
    assert stack.loaded() == CHUNKS
    assert answer.cached_tokens == TOKENS
    assert stack.server.counted("keys", operation="store") == 0
    assert stack.server.counted("faults") == 0
    stack.rest()


@pytest.mark.parametrize("moment", Moment, ids=lambda moment: moment.name.lower())
def test_a_node_that_dies(stack: Stack, moment: Moment) -> None:
    """At each moment of a request; the answers are right, and the node that is back is used."""
    expected = stack.local_hit(f"{moment}")
    stack.forget()

    def die() -> None:
        stack.node.kill()
        stack.relay.drop()

    other = f"{moment} other"
    stack.relay.arm(moment, die)
    answer = stack.ask(other if moment is Moment.SAVING else f"{moment}")
    assert stack.relay.fired.wait(10.0), "the fault never came"
    if moment is not Moment.SAVING:
        agrees = agrees_with_cold(expected, answer)
        assert agrees.same, agrees.detail
    again = stack.ask(other)
    stack.engine.client.reset_prefix_cache()
    agrees = agrees_with_cold(again, stack.ask(other))
    assert agrees.same, agrees.detail
    stack.node.start()
    stack.node.wait_ready()
    until = time.monotonic() + 30
    for attempt in range(1000):
        stored = stack.server.counted("keys", operation="store", status="ok")
        stack.ask(f"{moment} back {attempt}")
        stack.node.wait_quiet(quiet_s=0.3)
        if stack.server.counted("keys", operation="store", status="ok") - stored == CHUNKS:
            break
        assert time.monotonic() < until, f"the node that came back is not used\n{stack.server.tail()}"
    expected = stack.local_hit(f"{moment} back {attempt}")
    stack.forget()
    before = stack.loaded()
    answer = stack.ask(f"{moment} back {attempt}")
    same = identical(expected, answer)
    assert same.same, same.detail
    assert stack.loaded() - before == CHUNKS
    assert stack.server.counted("faults") == 0
    stack.rest()


def test_a_server_that_is_restarted_under_an_engine(stack: Stack) -> None:
    """No lease is lost or left behind, and the engine goes on with the new server."""
    expected = stack.local_hit("restarted")
    stack.forget()
    stack.server.kill()
    agrees = agrees_with_cold(expected, stack.ask("restarted"))
    assert agrees.same, agrees.detail
    stack.server.start()
    stack.server.wait_ready()
    until = time.monotonic() + 90
    while True:
        stack.engine.client.reset_prefix_cache()
        answer = stack.ask("restarted")
        agrees = agrees_with_cold(expected, answer)
        assert agrees.same, agrees.detail
        if stack.loaded() >= CHUNKS:
            break
        assert time.monotonic() < until, f"the engine does not use the new server\n{stack.server.tail()}"
        time.sleep(1.0)
    same = identical(expected, answer)
    assert same.same, same.detail
    stack.rest()
