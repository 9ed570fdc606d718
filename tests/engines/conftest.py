"""Engines are costly to start: each is started once and serves many tests, which keep apart by their prompts."""

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.cluster import PATIENT, Answer, Cluster, ask, prompt
from tests.engines.setup_engine import EngineEnv, ensure_engine
from tests.engines.tiny_model import TINY, ensure_model
from tests.engines.vllm_server import DfkvServe, VllmOptions, VllmServer, connector_config

# Adapters are loaded while the engine runs; KV of plain requests does not depend on this.
LORA = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--max-cpu-loras", "4")
LORA_ENV = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


@pytest.fixture(scope="session")
def engine_env() -> EngineEnv:
    return ensure_engine()


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def served_model(engine_env: EngineEnv, logs: Path) -> Path:
    """A copy of the tiny model, whose weights a test may change."""
    path = logs / "served" / "model"
    shutil.copytree(ensure_model(engine_env.python, TINY), path)
    return path


@pytest.fixture(scope="session")
def cluster(engine_env: EngineEnv, logs: Path, served_model: Path) -> Iterator[Cluster]:
    """Both engines start before there is a node. The reader has vLLM's default load failure policy."""
    node = DfkvServe(logs / "dfkv-serve.log", ram="1GiB")
    reader = VllmServer(
        engine_env,
        VllmOptions(
            served_model,
            connector=connector_config(node.port, policy=None, extra=PATIENT),
            hash_seed="12345",
            args=(*LORA, "--prefix-caching-hash-algo", "sha256_cbor"),
            env=LORA_ENV,
        ),
        logs / "reader.log",
        name="reader",
    )
    writer = VllmServer(
        engine_env,
        VllmOptions(
            served_model, connector=connector_config(node.port, extra=PATIENT), hash_seed="1", args=LORA, env=LORA_ENV
        ),
        logs / "writer.log",
        name="writer",
    )
    with contextlib.ExitStack() as stack:
        for server in (reader, writer):
            stack.callback(server.stop)
            server.start()
        for server in (reader, writer):
            report(f"{server.name} ready after {server.wait_ready():.0f} s")
        ask(reader, prompt("warm-up", 600))
        before_node: Answer = ask(reader, prompt("before there is a node", 1100))
        stack.enter_context(node)
        # Engines ask a node that was not there again and again, not at once.
        for server in (reader, writer):
            until = time.monotonic() + 30
            while not reaches_node(ask(server, prompt("warm-up", 600))):
                assert time.monotonic() < until, f"{server.name} does not find the node that has come\n{server.tail()}"
                time.sleep(0.2)
        yield Cluster(engine_env, node, served_model, reader, writer, before_node)


@pytest.fixture
def running(cluster: Cluster) -> Cluster:
    """The cluster with its node up, whatever the test before has done to it."""
    if not cluster.node.running:
        cluster.node.start()
        cluster.node.wait_ready()
    return cluster


def reaches_node(answer: Answer) -> bool:
    """Whether the lookup of a request was answered by a node."""
    return sum(answer.counted("lookups", result=result) for result in ("hit", "not_found")) > 0


def report(line: str) -> None:
    """Into the test's captured output, which pytest shows when it fails."""
    print(f"[engines] {line}", flush=True)
