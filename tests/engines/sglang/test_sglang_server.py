"""Real SGLang servers on the CPU with dfkv as HiCache's L3."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.setup_engine import EngineEnv
from tests.engines.sglang.server import PAGE_TOKENS, Answer, SglangOptions, SglangServer, prompt
from tests.engines.vllm_server import DfkvServe

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

PAGES = 15
PATIENT = {"lookup_deadline_ms": 3000}
SETTLE_S = 20.0


def addressed(node: DfkvServe) -> dict[str, object]:
    return {"addresses": [f"127.0.0.1:{node.port}"], **PATIENT}


@pytest.fixture(scope="module")
def server(sglang_env: EngineEnv, sglang_model: Path, sglang_node: DfkvServe, logs: Path) -> Iterator[SglangServer]:
    options = SglangOptions(sglang_model, extra=addressed(sglang_node))
    with SglangServer(sglang_env, options, logs / "sglang.log") as running:
        running.generate(prompt("warm-up", 100))
        yield running


def stored(node: DfkvServe) -> None:
    node.wait_quiet(quiet_s=0.5)


def all_but_one(answer: Answer, pages: int = PAGES) -> bool:
    return answer.storage >= (pages - 1) * PAGE_TOKENS


def same(found: Answer, wanted: Answer) -> bool:
    return found.tokens == wanted.tokens and found.logprobs == wanted.logprobs


def test_restored_pages_answer_like_a_local_hit(server: SglangServer, sglang_node: DfkvServe) -> None:
    prefix = prompt("restored", PAGES * PAGE_TOKENS)
    cold = server.generate(prefix + prompt("cold suffix", 40))
    assert (cold.device, cold.host, cold.storage) == (0, 0, 0)
    suffixes = [prompt(f"suffix {index}", 40) for index in range(2)]
    local = [server.generate(prefix + suffix) for suffix in suffixes]
    assert all(answer.device >= (PAGES - 1) * PAGE_TOKENS and answer.storage == 0 for answer in local)
    stored(sglang_node)

    server.flush()
    flushed = server.generate(prefix + suffixes[0])
    assert all_but_one(flushed), flushed
    assert same(flushed, local[0])

    server.stop()
    server.start()
    server.wait_ready()
    restarted = server.generate(prefix + suffixes[1])
    assert all_but_one(restarted), restarted
    assert same(restarted, local[1])
    assert server.counted("pages", operation="load", status="ok") >= PAGES - 1
    assert server.counted("lookups", pool="kv", result="hit") >= 1
    assert server.counted("faults") == 0


def test_write_back_stores_what_is_evicted(server: SglangServer, sglang_node: DfkvServe) -> None:
    """Detached, nothing is stored; attached again with write_back, a page is stored when the device gives it up."""
    server.detach()
    before = sglang_node.metrics().total("dfkv_node_objects")
    detached = prompt("while detached", PAGES * PAGE_TOKENS)
    server.generate(detached + prompt("x", 40))
    stored(sglang_node)
    assert sglang_node.metrics().total("dfkv_node_objects") == before

    server.attach(policy="write_back")
    prefix = prompt("written back", PAGES * PAGE_TOKENS)
    local = [server.generate(prefix + prompt("written back suffix", 40)) for _ in range(2)][1]
    assert local.device >= (PAGES - 1) * PAGE_TOKENS
    for index in range(10):  # more than the device holds
        server.generate(prompt(f"filler {index}", PAGES * PAGE_TOKENS))
    stored(sglang_node)
    assert sglang_node.metrics().total("dfkv_node_objects") > before
    server.flush()
    restored = server.generate(prefix + prompt("written back suffix", 40))
    assert all_but_one(restored), restored
    assert same(restored, local)
    server.detach()
    server.attach(policy="write_through")


def test_a_killed_node_costs_misses(server: SglangServer, sglang_node: DfkvServe) -> None:
    prefix = prompt("before the crash", PAGES * PAGE_TOKENS)
    local = [server.generate(prefix + prompt("crash suffix", 40)) for _ in range(2)][1]
    stored(sglang_node)
    answers: list[Answer] = []
    errors: list[Exception] = []
    halt = threading.Event()

    def traffic() -> None:
        index = 0
        while not halt.is_set():
            index += 1
            try:
                answers.append(server.generate(prompt(f"traffic {index % 5}", 5 * PAGE_TOKENS), max_tokens=4))
            except Exception as error:
                errors.append(error)
                return

    thread = threading.Thread(target=traffic)
    thread.start()
    try:
        time.sleep(1.0)
        sglang_node.kill()
        seen = len(answers)
        until = time.monotonic() + 60
        while len(answers) < seen + 5 and not errors and time.monotonic() < until:
            time.sleep(0.1)
        assert len(answers) >= seen + 5, f"the engine stopped answering: {errors}\n{server.tail()}"
    finally:
        halt.set()
        thread.join(60)
    assert not errors
    server.flush()
    without = server.generate(prefix + prompt("crash suffix", 40))
    assert without.storage == 0
    assert without.tokens == local.tokens

    sglang_node.start()
    sglang_node.wait_ready()
    until = time.monotonic() + SETTLE_S
    while True:  # the client leaves a failed node alone for a moment
        again = prompt(f"after the crash {time.monotonic()}", PAGES * PAGE_TOKENS)
        server.generate(again)
        stored(sglang_node)
        server.flush()
        if all_but_one(server.generate(again)):
            break
        assert time.monotonic() < until, f"nothing comes from the restarted node\n{server.tail()}"
    assert server.counted("faults") == 0


def test_clear_removes_what_is_stored(server: SglangServer, sglang_node: DfkvServe) -> None:
    prefix = prompt("cleared", PAGES * PAGE_TOKENS)
    server.generate(prefix)
    stored(sglang_node)
    server.flush()
    server.clear_storage()
    assert server.generate(prefix).storage == 0
    stored(sglang_node)
    server.flush()
    assert all_but_one(server.generate(prefix)), "nothing is stored any more after clear"


def test_tensor_parallel_ranks_restore(
    sglang_env: EngineEnv, sglang_model: Path, sglang_node: DfkvServe, logs: Path
) -> None:
    """Two ranks; what one rank stored is another namespace, and the log says in which field they differ."""
    options = SglangOptions(sglang_model, extra=addressed(sglang_node), tensor_parallel=2)
    prefix = prompt("two ranks", PAGES * PAGE_TOKENS)
    with SglangServer(sglang_env, options, logs / "sglang-tp2.log", name="two ranks") as server:
        cold = server.generate(prefix + prompt("two ranks suffix", 40))
        assert cold.storage == 0
        local = server.generate(prefix + prompt("two ranks suffix", 40))
        stored(sglang_node)
        server.flush()
        restored = server.generate(prefix + prompt("two ranks suffix", 40))
        assert all_but_one(restored), restored
        assert same(restored, local)
        assert "the nearest namespace differs in: page_layout" in server.log.read_text()


def test_injected_failures_change_no_answer(
    sglang_env: EngineEnv, sglang_model: Path, sglang_node: DfkvServe, logs: Path
) -> None:
    options = SglangOptions(
        sglang_model,
        extra=addressed(sglang_node),
        env={"SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3", "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.02"},
    )
    prompts = [prompt(f"injected {index % 6}", (4 + index % 6) * PAGE_TOKENS) for index in range(24)]
    with SglangServer(sglang_env, options, logs / "sglang-failures.log", name="failures") as server:
        wanted: dict[int, list[int]] = {}
        restored = 0
        for index, tokens in enumerate(prompts):
            answer = server.generate(tokens)
            assert answer.tokens == wanted.setdefault(index % 6, answer.tokens), f"prompt {index % 6}, request {index}"
            restored += answer.storage
            if index % 6 == 5:
                stored(sglang_node)  # flushing drops what waits to be stored
                server.flush()
        assert restored, "nothing was restored: the failures hit nothing"
