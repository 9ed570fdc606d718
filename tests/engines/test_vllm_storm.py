"""Many requests at once in an engine that has room for few: finished, preempted and hung up at any moment of their transfers."""

import concurrent.futures
import contextlib
import http.client
import json
import os
import random
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engines.answers import agrees_with_cold
from tests.engines.cluster import PATIENT, Objects, Sharing, ask, chunk_ids, cold, prompt, wait_saved
from tests.engines.conftest import report
from tests.engines.fault_relay import FaultRelay
from tests.engines.http_client import Completion
from tests.engines.setup_engine import EngineEnv
from tests.engines.tiny_model import WIDE, ensure_model
from tests.engines.vllm_server import DfkvServe, VllmOptions, VllmServer, connector_config

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SEED = 20240607
REQUESTS = 1000
AT_ONCE = 16
DOCUMENTS = 24  # that come back again and again; every third request has one that nobody has seen
FRESH_COMPARED = 12
ANSWERS_COMPARED = 20
REST_DEADLINE_S = 40.0
# bfloat16 values of the same KV, computed in other portions, differ by rounding; those of other tokens are unrelated.
SAME_KV_SHARE = 0.05


# Of one piece of payload: transfers then last about as long as the steps of the engine, as they do over a real network, and
# a load is still worth it on a machine that computes quickly.
LONGEST_DELAY_S = 0.002
DOCUMENT_TOKENS = 512
CALM = "calm"


@dataclass(frozen=True)
class Crowded:
    """An engine whose KV cache holds few requests, so that the others are preempted, behind a slow way to its node."""

    server: VllmServer
    node: DfkvServe
    relay: FaultRelay


@pytest.fixture(scope="module")
def crowded(engine_env: EngineEnv, logs: Path) -> Iterator[Crowded]:
    with contextlib.ExitStack() as stack:
        node = DfkvServe(logs / "crowded-node.log", ram="3GiB")
        relay = FaultRelay(node.port, seed=SEED)
        stack.callback(relay.close)
        relay.set_delay(LONGEST_DELAY_S)
        node.set_env("DFKV_NODE__ADVERTISE", f"127.0.0.1:{relay.port}")
        stack.enter_context(node)
        options = VllmOptions(
            ensure_model(engine_env.python, WIDE),
            connector=connector_config(relay.port, extra=PATIENT),
            args=("--num-gpu-blocks-override", "40", "--max-num-batched-tokens", "1024"),
            max_model_len=4096,
        )
        server = stack.enter_context(VllmServer(engine_env, options, logs / "crowded.log", name="crowded"))
        yield Crowded(server, node, relay)


class Tally:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.ends: dict[str, int] = {}
        self.answers: list[tuple[list[int], Completion]] = []

    def add(self, end: str, tokens: list[int], completion: Completion | None = None) -> None:
        with self._lock:
            if completion is not None:
                self.answers.append((tokens, completion))
            self.ends[end] = self.ends.get(end, 0) + 1


def document(number: int) -> list[int]:
    """The engine has room for four of the middle size."""
    return prompt(f"storm {number}", (1 + number % 3) * DOCUMENT_TOKENS + 40 + 7 * (number % DOCUMENTS))


def test_a_storm_leaves_nothing_behind_and_nothing_wrong(crowded: Crowded) -> None:
    server = crowded.server
    sharing = Sharing.of(server)
    order = random.Random(SEED)
    plans = [_plan(order, DOCUMENTS + index) for index in range(REQUESTS)]
    storm(server, plans[:40])  # whatever is started once, is started now
    rest_of(crowded)
    resources = {pid: held(pid) for pid in server.pids()}
    before = server.client.metrics()

    began = time.monotonic()
    tally = storm(server, plans)
    took_s = time.monotonic() - began
    rest_of(crowded)
    metrics = server.client.metrics()
    preempted = metrics.total("vllm:num_preemptions_total") - before.total("vllm:num_preemptions_total")
    loaded = metrics.total("vllm:dfkv_tokens_total", kind="loaded") - before.total(
        "vllm:dfkv_tokens_total", kind="loaded"
    )
    abandoned = metrics.by_label("vllm:dfkv_abandoned_saves_total", "reason")
    saved = metrics.by_label("vllm:dfkv_save_objects_total", "status")
    report(
        f"seed {SEED}: {took_s:.0f} s, {tally.ends}, {preempted:.0f} preempted, {loaded:.0f} tokens loaded, saved {saved}, "
        f"given up {abandoned}"
    )
    assert sum(tally.ends.values()) == REQUESTS
    assert min(tally.ends.get(end, 0) for end in ("finished", "hung up")) > REQUESTS // 10, tally.ends
    assert preempted >= REQUESTS // 100, "nothing was preempted, the test shows nothing"
    assert loaded > 10 * sharing.chunk_tokens, "nothing was restored, the test shows nothing"
    assert metrics.total("vllm:dfkv_faults_total") == 0
    # A page written while it is sent shows as a payload that is not the one that was announced.
    assert set(saved) <= {"ok", "already", "cancelled"}, f"seed {SEED}: {saved}"
    assert {pid: held(pid) for pid in server.pids()} == resources, "descriptors or threads are left"
    crowded.relay.set_delay(0.0)
    check_answers(server, order.sample(tally.answers, ANSWERS_COMPARED))
    fresh = sorted({plan[0] for plan in plans if plan[0] >= DOCUMENTS})
    check_stored(crowded, [*range(0, DOCUMENTS, 2), *order.sample(fresh, FRESH_COMPARED)])


def check_stored(crowded: Crowded, numbers: list[int]) -> None:
    """Every object that the storm stored is the KV of its own tokens: the engine computes the same documents again in peace,
    under a cache salt, which gives its objects other names."""
    server = crowded.server
    sharing = Sharing.of(server)
    compared = 0
    with Objects(crowded.node, sharing) as objects:
        for number in numbers:
            tokens = document(number)
            wait_saved(server, ask(server, tokens, cache_salt=CALM), len(tokens))
            stormy = objects.read(chunk_ids(sharing, tokens))
            calm = objects.read(chunk_ids(sharing, tokens, cache_salt=CALM))
            for found, expected in zip(stormy, calm, strict=True):
                assert expected is not None
                if found is not None:
                    apart = difference(found, expected)
                    assert apart < SAME_KV_SHARE, f"seed {SEED}: not the KV of its tokens: {apart:.3f} apart"
                    compared += 1
    report(f"{compared} objects compared")
    assert compared >= len(numbers) * sharing.parts


def check_answers(server: VllmServer, answers: list[tuple[list[int], Completion]]) -> None:
    for tokens, completion in answers:
        agrees = agrees_with_cold(cold(server, tokens, max_tokens=len(completion.token_ids)), completion)
        assert agrees.same, f"seed {SEED}: {agrees.detail}"


def difference(found: bytes, expected: bytes) -> float:
    """The mean difference of bfloat16 values, as a share of their mean size."""
    assert len(found) == len(expected)
    apart = size = 0.0
    for one, other in zip(_bfloat16(found), _bfloat16(expected), strict=True):
        apart += abs(one - other)
        size += abs(other)
    return apart / size


def _bfloat16(data: bytes) -> Iterator[float]:
    # Every 64th value is plenty, and quick.
    for offset in range(0, len(data), 128):
        yield struct.unpack("<f", b"\0\0" + data[offset : offset + 2])[0]


def rest_of(crowded: Crowded) -> None:
    """Waits until engine and node hold nothing for requests any more."""
    until = time.monotonic() + REST_DEADLINE_S
    while True:
        engine, node = crowded.server.client.metrics(), crowded.node.metrics()
        left = {
            name: value
            for name, value in {
                "running": engine.total("vllm:num_requests_running"),
                "waiting": engine.total("vllm:num_requests_waiting"),
                "pages": engine.total("vllm:kv_cache_usage_perc"),
                **{name: node.total(f"dfkv_node_{name}") for name in ("pins", "leases", "filling", "condemned")},
            }.items()
            if value
        }
        if not left:
            return
        assert time.monotonic() < until, f"seed {SEED}: left at rest: {left}"
        time.sleep(0.2)


def held(pid: int) -> tuple[int, int]:
    """(descriptors, threads) of a process."""
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


def _plan(order: random.Random, index: int) -> tuple[int, int, int, float | None]:
    """(document, tokens after it, tokens asked for, seconds until the caller hangs up). `index`: one that is not used yet."""
    hang_up = order.choice((None, None, order.uniform(0.0, 0.3), order.uniform(0.0, 2.0)))
    number = index if order.random() < 1 / 3 else order.randrange(DOCUMENTS)
    return number, order.randrange(100), order.choice((1, 4, 16, 250)), hang_up


def storm(server: VllmServer, plans: list[tuple[int, int, int, float | None]]) -> Tally:
    tally = Tally()

    def request(plan: tuple[int, int, int, float | None]) -> None:
        number, more, wanted, hang_up_s = plan
        tokens = document(number) + prompt(f"suffix {more}", more)
        if hang_up_s is None:
            completion: Completion = server.client.complete(tokens, max_tokens=wanted)
            assert len(completion.token_ids) == wanted
            tally.add("finished", tokens, completion)
        else:
            _hang_up(server, tokens, hang_up_s)
            tally.add("hung up", tokens)

    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        for _ in pool.map(request, plans):
            pass
    return tally


def _hang_up(server: VllmServer, tokens: list[int], after_s: float) -> None:
    """Asks and hangs up after `after_s`, whatever has come by then."""
    body = {
        "model": server.options.served_name,
        "prompt": tokens,
        "max_tokens": 500,
        "ignore_eos": True,
        "stream": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        time.sleep(after_s)
