"""dfkv fails, the engine does not: a missing, lost or dying node costs misses, and every answer stays right."""

import time

import pytest

from tests.engines.answers import agrees_with_cold
from tests.engines.cluster import (
    Cluster,
    Objects,
    ask,
    chunk_ids,
    cold,
    prompt,
    store,
)
from tests.engines.http_client import Completion
from tests.engines.vllm_server import VllmServer

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
