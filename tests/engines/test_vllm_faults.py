"""dfkv fails, the engine does not: a missing, lost or dying node costs misses, and every answer stays right."""

import concurrent.futures
import contextlib
import http.client
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.answers import agrees_with_cold
from tests.engines.cluster import (
    ANSWER_TOKENS,
    PATIENT,
    Answer,
    Cluster,
    Objects,
    Sharing,
    ask,
    chunk_ids,
    cold,
    prompt,
    settled,
    store,
)
from tests.engines.http_client import Completion
from tests.engines.vllm_server import VllmOptions, VllmServer, connector_config

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

# A lookup without an answer is given up after its deadline; the rest is for a busy machine.
EXTRA_S = 8.0
COMPARED_TOKENS = 32


def check_right(server: VllmServer, tokens: list[int], completion: Completion) -> None:
    reference = cold(server, tokens, max_tokens=len(completion.token_ids))
    agrees = agrees_with_cold(reference, completion)
    assert agrees.same, agrees.detail
    assert completion.total_s <= reference.total_s * 2 + EXTRA_S


def test_an_engine_that_started_before_its_node(running: Cluster) -> None:
    before = running.before_node
    assert before.loaded == 0
    assert before.counted("lookups", result="hit") == 0
    assert before.counted("faults") == 0
    check_right(running.reader, prompt("before there is a node", 1100), before.completion)


def test_a_failed_load_is_computed_instead(running: Cluster) -> None:
    """With vLLM's default policy, under which a failed load would end the request. The lookup finds every chunk, then one of
    them turns out to be of another length."""
    sharing = running.sharing
    chunk = sharing.chunk_tokens
    asked = prompt("a failed load", 4 * chunk + 60)
    store(running, asked)
    with Objects(running.node, sharing) as objects:
        objects.replace(chunk_ids(sharing, asked)[2], b"not the right length" * 8)
    answer = ask(running.reader, asked)
    assert answer.completion.finish_reason == "length"
    assert answer.counted("tokens", kind="failed") >= chunk
    assert answer.counted("load_objects", status="length") == sharing.parts
    assert answer.loaded + answer.counted("tokens", kind="failed") == answer.counted("tokens", kind="taken")
    check_right(running.reader, asked, answer.completion)


def test_a_lost_node_and_its_return(running: Cluster) -> None:
    asked = prompt("a lost node", 2100)
    expected = running.sharing.restorable(len(asked))
    store(running, asked)
    running.node.kill()
    for server in (running.reader, running.writer):
        fresh = prompt(f"while the node is gone {server.name}", 1100)
        answer = ask(server, fresh)
        assert answer.loaded == 0
        check_right(server, fresh, answer.completion)
    lost = ask(running.reader, asked)
    assert lost.loaded == 0
    check_right(running.reader, asked, lost.completion)

    running.node.start()
    running.node.wait_ready()
    after = prompt("after its return", 2100)
    until = time.monotonic() + 30
    while ask(running.writer, after).counted("save_objects", status="ok") == 0:
        assert time.monotonic() < until, "the writer does not store on the node that came back"
        time.sleep(0.2)
    running.node.wait_quiet()
    answer = ask(running.reader, after)
    assert answer.loaded == expected, f"the reader does not read from the node that came back: {answer.funnel()}"
    check_right(running.reader, after, answer.completion)


@pytest.mark.parametrize("delay_ms", [0, 5, 15, 40])
def test_a_node_that_dies_under_a_load(running: Cluster, delay_ms: int) -> None:
    """Whenever it dies: before the lookup, between lookup and load, half-way through the payload, after it."""
    asked = prompt(f"dies under a load {delay_ms}", 7800)
    store(running, asked)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        before = running.reader.client.metrics()
        pending = pool.submit(running.reader.client.complete, asked, max_tokens=ANSWER_TOKENS)
        time.sleep(delay_ms / 1e3)
        running.node.kill()
        completion = pending.result(120)
    answer = Answer(completion, before, settled(running.reader, before, 1))
    assert completion.finish_reason == "length"
    assert answer.counted("faults") == 0
    check_right(running.reader, asked, completion)


def test_a_node_that_does_not_answer(running: Cluster) -> None:
    """Connected, alive, silent: every wait ends by itself."""
    stored = prompt("does not answer", 2100)
    store(running, stored)
    with running.node.paused():
        for server in (running.reader, running.writer):
            for tokens in (stored, prompt(f"silence {server.name}", 1100)):
                answer = ask(server, tokens)
                assert answer.loaded == 0
                check_right(server, tokens, answer.completion)
    check_right(running.reader, stored, ask(running.reader, stored).completion)


@pytest.fixture(scope="module")
def crowded(cluster: Cluster, logs: Path) -> Iterator[VllmServer]:
    """An engine whose KV cache holds few requests: the others are preempted."""
    options = VllmOptions(
        cluster.model,
        connector=connector_config(cluster.node.port, extra={**PATIENT, "fleet_salt": "crowded"}),
        args=("--num-gpu-blocks-override", "40", "--max-num-batched-tokens", "1024"),
        max_model_len=4096,
    )
    with VllmServer(cluster.engine, options, logs / "crowded.log", name="crowded") as server:
        yield server


def test_preempted_and_aborted_requests_leave_nothing_wrong_behind(running: Cluster, crowded: VllmServer) -> None:
    """Pages of preempted and aborted requests are used again while their saves may be under way. What the node holds
    afterwards is asked for once more, by an engine that has forgotten it, and must give the same answers."""
    chunk = Sharing.of(crowded).chunk_tokens
    seed = 20240607
    order = random.Random(seed)
    prompts = [prompt(f"crowd {index}", 2 * chunk + 60 + 11 * index) for index in range(6)]
    references = [cold(crowded, tokens, max_tokens=COMPARED_TOKENS) for tokens in prompts]
    before = crowded.client.metrics()
    abandoned = [prompt(f"abandoned {index}", 3 * chunk) for index in range(3)]
    with concurrent.futures.ThreadPoolExecutor(len(prompts) + len(abandoned)) as pool:
        aborted = [pool.submit(_abandon, crowded, tokens, order.uniform(0.0, 2.0)) for tokens in abandoned]
        answers = list(pool.map(lambda tokens: crowded.client.complete(tokens, max_tokens=200), prompts))
        for future in aborted:
            future.result(60)
    metrics = crowded.client.metrics()
    preempted = metrics.total("vllm:num_preemptions_total") - before.total("vllm:num_preemptions_total")
    assert preempted > 0, f"seed {seed}: nothing was preempted, the test shows nothing"
    assert metrics.total("vllm:dfkv_faults_total") == 0
    running.node.wait_quiet()
    crowded.client.reset_prefix_cache()
    for tokens, reference, answer in zip(prompts, references, answers, strict=True):
        first = Completion(token_ids=answer.token_ids[:COMPARED_TOKENS], top=answer.top[:COMPARED_TOKENS])
        assert agrees_with_cold(reference, first).same, f"seed {seed}: wrong under preemption"
        again = ask(crowded, tokens, max_tokens=COMPARED_TOKENS)
        assert again.loaded == 2 * chunk, f"seed {seed}: {again.funnel()}"
        assert agrees_with_cold(reference, again.completion).same, f"seed {seed}: wrong after a restore"
    for tokens in abandoned:
        longer = tokens + prompt("end", 60)
        again = ask(crowded, longer, max_tokens=COMPARED_TOKENS)
        reference = cold(crowded, longer, max_tokens=COMPARED_TOKENS)
        assert agrees_with_cold(reference, again.completion).same, f"seed {seed}: wrong after hanging up"
    assert running.node.metrics().total("dfkv_node_pins") == 0


def _abandon(server: VllmServer, tokens: list[int], after_s: float) -> None:
    """Asks and hangs up after `after_s`, whatever has come by then."""
    body = {
        "model": server.options.served_name,
        "prompt": tokens,
        "max_tokens": 2000,
        "ignore_eos": True,
        "stream": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        time.sleep(after_s)
