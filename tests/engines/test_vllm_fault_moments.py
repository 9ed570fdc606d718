"""Each way a node can fail, at each moment of a request's life: the answer is right and in time, and the node that is back
is used by the next request."""

import contextlib
import enum
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engines.answers import agrees_with_cold
from tests.engines.cluster import ANSWER_TOKENS, Cluster, Sharing, ask, cold, prompt, wait_saved
from tests.engines.conftest import reaches_node, report
from tests.engines.fault_relay import FaultRelay, Moment, Wire
from tests.engines.http_client import Completion
from tests.engines.vllm_server import DfkvServe, VllmOptions, VllmServer, connector_config

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

SEED = 20261129
LOOKUP_DEADLINE_MS = 500
LOAD_DEADLINE_MS = 1000
SLACK_S = 0.5
BACK_IN_USE_S = 2.0
"""A node that is back is found by then: the client's pause after a failure, a connection and its handshake."""
PROMPT_TOKENS = 2600


class Fault(enum.Enum):
    KILLED = "killed"
    STOPPED = "stopped"
    RESTARTED = "restarted"
    LATE = "answering after the request has ended"
    GARBAGE = "sending garbage"


@dataclass
class Faulty:
    """An engine whose every connection to its node goes through a relay."""

    engine: VllmServer
    node: DfkvServe
    relay: FaultRelay

    def apply(self, fault: Fault, stack: contextlib.ExitStack) -> None:
        """Breaks it; closing `stack` mends it. What a dead or stopped node had sent before, and is on its way, is lost or kept
        back too: otherwise a load might not notice."""
        if fault is Fault.KILLED:
            self.node.kill()
            self.relay.drop()
            stack.callback(self._start)
        elif fault is Fault.RESTARTED:
            self.node.kill()
            self.relay.drop()
            self._start()
        elif fault is Fault.STOPPED:
            stack.enter_context(self.node.paused())
            self.relay.set_wire(Wire.HOLD)
            stack.callback(self.relay.set_wire, Wire.PASS)
        else:
            self.relay.set_wire(Wire.HOLD if fault is Fault.LATE else Wire.NOISE)
            stack.callback(self.relay.set_wire, Wire.PASS)

    def _start(self) -> None:
        self.node.start()
        self.node.wait_ready()


@pytest.fixture(scope="module")
def faulty(cluster: Cluster, logs: Path) -> Iterator[Faulty]:
    """The engine has the deadlines that users have, but for a shorter one of loads."""
    with contextlib.ExitStack() as stack:
        node = DfkvServe(logs / "faulty-node.log", ram="1GiB")
        relay = FaultRelay(node.port, seed=SEED)
        stack.callback(relay.close)
        node.set_env("DFKV_NODE__ADVERTISE", f"127.0.0.1:{relay.port}")
        stack.enter_context(node)
        deadlines = {"lookup_deadline_ms": LOOKUP_DEADLINE_MS, "load_deadline_ms": LOAD_DEADLINE_MS}
        options = VllmOptions(cluster.model, connector=connector_config(relay.port, extra=deadlines))
        engine = stack.enter_context(VllmServer(cluster.engine, options, logs / "faulty.log", name="faulty"))
        ask(engine, prompt("warm-up", 600))
        yield Faulty(engine, node, relay)


def check(engine: VllmServer, tokens: list[int], expected: Completion, cold_s: float, deadline_ms: float) -> None:
    """Asks; the answer has to be that of the cold run and its first token in time."""
    completion = engine.client.complete(tokens, max_tokens=ANSWER_TOKENS)
    assert completion.finish_reason == "length"
    limit_s = cold_s + deadline_ms / 1e3 + SLACK_S
    report(f"first token after {completion.ttft_s:.2f} s, cold {cold_s:.2f} s, at most {limit_s:.2f} s")
    agrees = agrees_with_cold(expected, completion)
    assert agrees.same, agrees.detail
    assert completion.ttft_s <= limit_s


@pytest.mark.parametrize("moment", Moment, ids=lambda moment: moment.name.lower())
@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name.lower())
def test_a_node_that_fails(faulty: Faulty, fault: Fault, moment: Moment) -> None:
    engine, node, relay = faulty.engine, faulty.node, faulty.relay
    asked, other, later = (prompt(f"{name} {fault} {moment}", PROMPT_TOKENS) for name in ("asked", "other", "later"))
    expected, expected_other = cold(engine, asked), cold(engine, other)
    cold_s = max(expected.ttft_s, expected_other.ttft_s)
    faults_before = engine.client.metrics().total("vllm:dfkv_faults_total")
    if moment is not Moment.SAVING:
        stored = ask(engine, asked)
        wait_saved(engine, stored, len(asked))
        node.wait_quiet(quiet_s=0.2)
        engine.client.reset_prefix_cache()
    with contextlib.ExitStack() as mend:
        relay.arm(moment, lambda: faulty.apply(fault, mend))
        in_load = moment in (Moment.LOAD, Moment.LOADING)
        check(engine, asked, expected, cold_s, LOAD_DEADLINE_MS if in_load else LOOKUP_DEADLINE_MS)
        assert relay.fired.wait(5.0), "the fault never came"
        check(engine, other, expected_other, cold_s, LOOKUP_DEADLINE_MS)
    time.sleep(BACK_IN_USE_S)
    answer = ask(engine, later)
    assert reaches_node(answer), f"the node is back and not used: {answer.funnel()}"
    wait_saved(engine, answer, len(later))
    engine.client.reset_prefix_cache()
    again = ask(engine, later)
    assert again.loaded == Sharing.of(engine).restorable(len(later)), again.funnel()
    metrics = engine.client.metrics()
    assert metrics.total("vllm:dfkv_faults_total") == faults_before
    assert metrics.total("vllm:num_requests_running") + metrics.total("vllm:num_requests_waiting") == 0
    assert metrics.total("vllm:kv_cache_usage_perc") == 0, "the engine still holds pages"
