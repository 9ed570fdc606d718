"""Real engines restore what another one has computed: all of it, only that, and the answers stay right."""

import concurrent.futures
import time

import pytest

from tests.engines.answers import GAP, agrees_with_cold, identical
from tests.engines.cluster import (
    ANSWER_TOKENS,
    BLOCK_TOKENS,
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
    wait_saved,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def check_restored(cluster: Cluster, tokens: list[int], answer: Answer, expected_tokens: int) -> None:
    """The answer restored `expected_tokens`, equals a local hit that computes the same tokens, and agrees with a cold run."""
    assert answer.loaded == expected_tokens, answer.funnel()
    assert answer.counted("tokens", kind="failed") == 0
    again = ask(cluster.reader, tokens)
    assert again.loaded == 0
    assert again.completion.cached_tokens >= expected_tokens
    if again.completion.cached_tokens == answer.completion.cached_tokens:
        same = identical(again.completion, answer.completion)
        assert same.same, f"against a local prefix hit: {same.detail}"
    agrees = agrees_with_cold(cold(cluster.reader, tokens), answer.completion)
    assert agrees.same, f"against a cold run: {agrees.detail}"
    assert agrees.shift < GAP, "the log-probabilities are those of another prefix"


# One token to compute, a whole block, almost a chunk; one chunk, several, many.
@pytest.mark.parametrize("tokens", [513, 1024, 1025, 1152, 2100, 4000, 7800])
def test_engines_with_different_hash_seeds_restore_every_full_chunk(running: Cluster, tokens: int) -> None:
    asked = prompt(f"every full chunk {tokens}", tokens)
    expected = running.sharing.restorable(tokens)
    assert expected > 0
    stored = store(running, asked)
    assert stored.completion.cached_tokens == 0
    answer = ask(running.reader, asked)
    assert answer.completion.cached_tokens == expected, answer.funnel()
    check_restored(running, asked, answer, expected)


def test_a_shared_prefix_with_another_question(running: Cluster) -> None:
    document = prompt("document", 3 * running.sharing.chunk_tokens)
    store(running, document + prompt("first question", 60))
    asked = document + prompt("second question", 60)
    answer = ask(running.reader, asked)
    check_restored(running, asked, answer, len(document))


def test_sharing_goes_both_ways(running: Cluster) -> None:
    asked = prompt("from the reader to the writer", 1100)
    wait_saved(running.reader, ask(running.reader, asked), len(asked))
    running.node.wait_quiet(quiet_s=0.3)
    answer = ask(running.writer, asked)
    assert answer.loaded == running.sharing.restorable(len(asked)), answer.funnel()
    assert agrees_with_cold(cold(running.writer, asked), answer.completion).same


def test_a_prompt_shorter_than_a_chunk_is_neither_looked_up_nor_stored(running: Cluster) -> None:
    asked = prompt("short", running.sharing.chunk_tokens - 20)
    stored = store(running, asked)
    assert stored.counted("bytes", direction="save") == 0
    answer = ask(running.reader, asked)
    assert answer.loaded == 0
    assert answer.counted("lookup_round_trips") == 0


def test_generated_tokens_are_shared_too(running: Cluster) -> None:
    """The next turn of a conversation, on another engine: prompt and answer come back."""
    chunk = running.sharing.chunk_tokens
    first = prompt("first turn", 2 * chunk - 100)
    answered = store(running, first, max_tokens=150)
    second = first + answered.completion.token_ids + prompt("second turn", 60)
    answer = ask(running.reader, second)
    check_restored(running, second, answer, 2 * chunk)


@pytest.mark.parametrize("local_blocks", [1, 3, 6])
def test_a_local_hit_that_is_not_aligned_to_the_chunk(running: Cluster, local_blocks: int) -> None:
    """The engine has the first blocks of a chunk itself. The load begins behind them and leaves them alone, which
    shows: what the node holds of their chunk is replaced by other bytes first."""
    sharing = running.sharing
    assert sharing.chunk_tokens == 4 * BLOCK_TOKENS
    asked = prompt(f"not aligned {local_blocks}", 3 * sharing.chunk_tokens + 60)
    local = local_blocks * BLOCK_TOKENS
    expected = sharing.restorable(len(asked))
    ask(running.reader, asked[: local + 1])
    short = ask(running.reader, asked[: local + 1])
    assert short.completion.cached_tokens == local
    store(running, asked)
    answer = ask(running.reader, asked)
    assert answer.local == local
    check_restored(running, asked, answer, expected - local)

    other = prompt(f"not aligned, replaced {local_blocks}", len(asked))
    ask(running.reader, other[: local + 1])
    before = ask(running.reader, other[: local + 1])
    store(running, other)
    chunk = local // sharing.chunk_tokens
    with Objects(running.node, sharing) as objects:
        objects.replace(chunk_ids(sharing, other)[chunk], b"\x3c\xc1" * (sharing.part_bytes // 2))
    spoiled = ask(running.reader, other)
    assert (spoiled.local, spoiled.loaded) == (local, expected - local)
    after = ask(running.reader, other[: local + 1])
    assert after.completion.cached_tokens == local
    same = identical(before.completion, after.completion)
    assert same.same, f"a load wrote pages that the engine had itself: {same.detail}"


def test_bytes_come_back_as_they_were_stored(running: Cluster) -> None:
    """Writer's pages, node, reader's pages, and from these an empty node again: the same bytes."""
    sharing = running.sharing
    asked = prompt("bytes", 4 * sharing.chunk_tokens + 60)
    store(running, asked)
    ids = chunk_ids(sharing, asked)
    with Objects(running.node, sharing) as objects:
        stored = objects.read(ids)
    assert all(part is not None for part in stored)
    assert len(set(stored)) == len(stored), "parts of random prompts should all differ"
    assert ask(running.reader, asked).loaded == len(ids) * sharing.chunk_tokens

    running.node.stop()
    running.node.start()
    running.node.wait_ready()
    with Objects(running.node, sharing) as objects:
        assert objects.read(ids) == [None] * len(stored), "the node should have come back empty"
    until = time.monotonic() + 30
    while (again := ask(running.reader, asked)).counted("save_objects", status="ok") == 0:
        assert time.monotonic() < until, f"{running.reader.name} does not store on the node that came back"
    assert again.completion.cached_tokens == len(ids) * sharing.chunk_tokens
    running.node.wait_quiet()
    with Objects(running.node, sharing) as objects:
        differing = [index for index, part in enumerate(objects.read(ids)) if part != stored[index]]
    assert not differing, f"parts {differing} of {len(stored)} came back as other bytes"


def test_many_requests_at_once(running: Cluster) -> None:
    """Equal and different prompts together, some stored, some not."""
    chunk = running.sharing.chunk_tokens
    stored = [prompt(f"at once {index}", 2 * chunk + 60) for index in range(3)]
    for tokens in stored:
        store(running, tokens)
    fresh = [prompt(f"at once, fresh {index}", chunk + 300) for index in range(3)]
    asked = [*stored, *fresh, *stored, *fresh]
    before = running.reader.client.metrics()
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda tokens: running.reader.client.complete(tokens, max_tokens=ANSWER_TOKENS), asked))
    together = Answer(answers[0], before, settled(running.reader, before, len(asked)))
    assert together.counted("tokens", kind="failed") == 0
    # Requests for the same prompt may each load it, or share the pages of the first.
    assert len(stored) * 2 * chunk <= together.loaded <= 2 * len(stored) * 2 * chunk
    for tokens, answer in zip(asked, answers, strict=True):
        agrees = agrees_with_cold(cold(running.reader, tokens), answer)
        assert agrees.same, agrees.detail


def test_metrics_add_up(running: Cluster) -> None:
    """A miss, a restore, a local hit and a partial one, against what they must have counted."""
    sharing: Sharing = running.sharing
    chunk, chunk_bytes = sharing.chunk_tokens, sharing.parts * sharing.part_bytes
    document = prompt("metrics", 3 * chunk)
    requests = [
        ("not_found", 0, prompt("metrics, missing", 2 * chunk + 1)),
        ("hit", 3 * chunk, document + prompt("metrics a", 60)),
        ("hit", 0, document + prompt("metrics a", 60)),
        ("hit", 0, document + prompt("metrics b", 60)),
        ("hit", chunk, document[:chunk] + prompt("metrics c", 2 * chunk)),
    ]
    store(running, document + prompt("metrics stored", 60))
    first = running.reader.client.metrics()
    sent_before = running.node.metrics().total("dfkv_node_payload_bytes_out_total")
    answers = [ask(running.reader, tokens) for _, _, tokens in requests[:4]]
    running.reader.client.reset_prefix_cache()
    answers.append(ask(running.reader, requests[4][2]))
    whole = Answer(answers[-1].completion, first, answers[-1].after)

    for (result, loaded, tokens), answer in zip(requests, answers, strict=True):
        assert answer.counted("lookups", result=result) == 1, result
        assert answer.counted("lookups") == 1
        assert answer.counted("lookup_round_trips") == 1
        assert answer.counted("tokens", kind="asked") == sharing.restorable(len(tokens))
        assert answer.loaded == loaded
    assert whole.counted("tokens", kind="found") == whole.counted("tokens", kind="taken") + whole.counted(
        "tokens", kind="not_taken"
    )
    assert whole.counted("tokens", kind="taken") == whole.counted("tokens", kind="loaded") == 4 * chunk
    assert whole.counted("tokens", kind="failed") == 0
    assert whole.counted("bytes", direction="load") == 4 * chunk_bytes
    assert whole.counted("load_objects", status="ok") == whole.counted("load_objects") == 4 * sharing.parts
    assert whole.counted("load_seconds") > 0
    assert whole.counted("faults") == 0
    assert running.node.metrics().total("dfkv_node_payload_bytes_out_total") - sent_before == 4 * chunk_bytes
    assert running.node.metrics().total("dfkv_node_pins") == 0
