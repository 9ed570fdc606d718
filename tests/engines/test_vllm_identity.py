"""Prompts whose KV differs never share: a token, an adapter, a cache salt, the weights."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.answers import agrees_with_cold
from tests.engines.cluster import PATIENT, Cluster, Sharing, ask, cold, load_adapter, prompt, store, wait_saved
from tests.engines.tiny_model import TINY, LoraSpec, change_weights, ensure_lora
from tests.engines.vllm_server import VllmOptions, VllmServer, connector_config

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


# First, middle and last token of a block; of the first chunk, of a later one, around a chunk's border.
@pytest.mark.parametrize("position", [0, 64, 127, 128, 511, 512, 700, 1023, 1024])
def test_a_different_token_ends_what_is_shared(running: Cluster, position: int) -> None:
    stored = prompt(f"one token {position}", 1600)
    asked = list(stored)
    asked[position] = (asked[position] + 1) % 256
    store(running, stored)
    answer = ask(running.reader, asked)
    assert answer.loaded == answer.completion.cached_tokens == position // 512 * 512, answer.funnel()
    agrees = agrees_with_cold(cold(running.reader, asked), answer.completion)
    assert agrees.same, agrees.detail


def test_cache_salts_share_only_with_themselves(running: Cluster) -> None:
    asked = prompt("salted", 1100)
    store(running, asked, cache_salt="one tenant")
    assert ask(running.reader, asked).loaded == 0, "without salt"
    assert ask(running.reader, asked, cache_salt="another tenant").loaded == 0
    assert ask(running.reader, asked, cache_salt="one tenant").loaded == running.sharing.restorable(len(asked))


def test_a_salted_request_does_not_read_what_has_no_salt(running: Cluster) -> None:
    asked = prompt("unsalted", 1100)
    store(running, asked)
    assert ask(running.reader, asked, cache_salt="a tenant").loaded == 0
    assert ask(running.reader, asked).loaded == running.sharing.restorable(len(asked))


@pytest.fixture(scope="module")
def adapters(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Adapter "tuned": on the writer content 1, then on the reader content 2, under the same name and path. The reader
    also has content 1 elsewhere, under another name."""
    made = {seed: ensure_lora(cluster.engine.python, LoraSpec(TINY, seed=seed)) for seed in (1, 2)}
    root = tmp_path_factory.mktemp("adapters")
    path, copy = root / "tuned", root / "copy"
    shutil.copytree(made[1], path)
    shutil.copytree(made[1], copy)
    load_adapter(cluster.writer, "tuned", path)
    # Asked once, so that this content is known to be in the engine before the files change.
    ask(cluster.writer, prompt("first use of the adapter", 1100), model="tuned")
    yield {"path": path, "copy": copy, "second": made[2]}
    for server, name in ((cluster.writer, "tuned"), (cluster.reader, "tuned"), (cluster.reader, "copy")):
        server.client.post("/v1/unload_lora_adapter", {"lora_name": name})


def test_adapters_share_by_content_not_by_name_or_path(running: Cluster, adapters: dict[str, Path]) -> None:
    asked = prompt("adapted", 1100)
    expected = running.sharing.restorable(len(asked))
    stored = store(running, asked, model="tuned")
    assert stored.counted("bytes", direction="save") > 0
    assert stored.counted("not_shared_requests") == 0

    shutil.rmtree(adapters["path"])
    shutil.copytree(adapters["second"], adapters["path"])
    load_adapter(running.reader, "tuned", adapters["path"])
    load_adapter(running.reader, "copy", adapters["copy"])

    plain = ask(running.reader, asked)
    assert plain.loaded == 0, "without an adapter"
    other = ask(running.reader, asked, model="tuned")
    assert other.loaded == 0, "the same name and path, other content"
    assert other.counted("not_shared_requests") == 0
    same = ask(running.reader, asked, model="copy")
    assert same.loaded == expected, "another name and path, the same content"

    for answer, model in ((plain, None), (other, "tuned"), (same, "copy")):
        agrees = agrees_with_cold(cold(running.reader, asked, model=model), answer.completion)
        assert agrees.same, f"model {model}: {agrees.detail}"
    answers = {tuple(answer.completion.token_ids) for answer in (plain, other, same)}
    assert len(answers) == 3, "the adapters are meant to change the answer"


def test_an_adapter_whose_files_changed_takes_no_part(running: Cluster, adapters: dict[str, Path]) -> None:
    """The writer still has content 1 in memory under a path that holds content 2 by now."""
    asked = prompt("files changed", 1100)
    answer = store(running, asked, model="tuned")
    assert answer.counted("not_shared_requests", reason="adapter_changed") == 1
    assert answer.counted("bytes", direction="save") == 0
    assert ask(running.reader, asked, model="tuned").loaded == 0


def test_an_adapter_named_like_a_salt(running: Cluster, adapters: dict[str, Path]) -> None:
    asked = prompt("named like a salt", 1100)
    store(running, asked, cache_salt="copy")
    assert ask(running.reader, asked, model="copy").loaded == 0


def test_other_weights_under_the_same_name_and_path(running: Cluster, logs: Path, tmp_path: Path) -> None:
    """Runs last in this module: from here on the files at the engines' path are other ones."""
    asked = prompt("other weights", 2100)
    expected = running.sharing.restorable(len(asked))
    store(running, asked)
    change_weights(running.engine.python, running.model, seed=7)
    options = VllmOptions(running.model, connector=connector_config(running.node.port, extra=PATIENT))
    with VllmServer(running.engine, options, logs / "other-weights.log", name="other weights") as changed:
        assert Sharing.of(changed).namespace != running.sharing.namespace
        answer = ask(changed, asked)
        assert answer.loaded == answer.completion.cached_tokens == 0
        assert agrees_with_cold(cold(changed, asked), answer.completion).same
        running.node.wait_quiet()
        fresh = prompt("from other weights", 1100)
        wait_saved(changed, ask(changed, fresh), len(fresh))
        running.node.wait_quiet()
    assert ask(running.reader, fresh).loaded == 0
    assert ask(running.reader, asked).loaded == expected
