"""Tensor parallel engines share with each other, and with engines of one rank."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.answers import agrees_with_cold, identical
from tests.engines.cluster import PATIENT, Cluster, Sharing, ask, cold, prompt, store, wait_saved
from tests.engines.tiny_model import TINY, ensure_model
from tests.engines.vllm_server import VllmOptions, VllmServer, connector_config

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def pair(cluster: Cluster, logs: Path) -> Iterator[VllmServer]:
    """Two ranks. The same weights as the cluster's engines, under another path."""
    options = VllmOptions(
        ensure_model(cluster.engine.python, TINY),
        served_name="another-name",
        connector=connector_config(cluster.node.port, extra=PATIENT),
        tensor_parallel=2,
        hash_seed="77",
    )
    with VllmServer(cluster.engine, options, logs / "tensor-parallel.log", name="two ranks") as server:
        yield server


def check(server: VllmServer, tokens: list[int], expected: int) -> None:
    answer = ask(server, tokens)
    assert answer.loaded == answer.completion.cached_tokens == expected, answer.funnel()
    again = ask(server, tokens)
    assert again.loaded == 0
    same = identical(again.completion, answer.completion)
    assert same.same, f"against a local prefix hit: {same.detail}"
    agrees = agrees_with_cold(cold(server, tokens), answer.completion)
    assert agrees.same, f"against a cold run: {agrees.detail}"


def test_two_ranks_restore_what_two_ranks_stored(running: Cluster, pair: VllmServer) -> None:
    asked = prompt("two ranks to two ranks", 2108)
    stored = ask(pair, asked)
    assert stored.completion.cached_tokens == 0
    sharing = Sharing.of(pair)
    assert wait_saved(pair, stored, len(asked)).counted("save_objects", status="ok") == 4 * sharing.parts
    running.node.wait_quiet()
    pair.client.reset_prefix_cache()
    check(pair, asked, sharing.restorable(len(asked)))


def test_one_rank_restores_what_two_ranks_stored(running: Cluster, pair: VllmServer) -> None:
    assert Sharing.of(pair) == running.sharing
    asked = prompt("two ranks to one rank", 2108)
    wait_saved(pair, ask(pair, asked), len(asked))
    running.node.wait_quiet()
    check(running.reader, asked, running.sharing.restorable(len(asked)))


def test_two_ranks_restore_what_one_rank_stored(running: Cluster, pair: VllmServer) -> None:
    asked = prompt("one rank to two ranks", 2108)
    store(running, asked)
    check(pair, asked, running.sharing.restorable(len(asked)))


def test_two_ranks_answer_without_a_node(running: Cluster, pair: VllmServer) -> None:
    """Every rank comes to the same conclusion: no rank waits in a collective for one that gave up."""
    asked = prompt("two ranks, no node", 2108)
    store(running, asked)
    running.node.kill()
    answer = ask(pair, asked)
    assert answer.loaded == 0
    assert agrees_with_cold(cold(pair, asked), answer.completion).same
