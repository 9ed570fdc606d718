"""dfkv as the L2 of LMCache: LMCache's own checks, the adapter's contract, and real servers."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.lmcache.server import CHUNK_TOKENS, TOKENS, LmcacheServer, environment, l2_adapter
from tests.engines.process import run_to_end
from tests.engines.setup_engine import EngineEnv
from tests.engines.vllm_server import DfkvServe

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

INSIDE = Path(__file__).resolve().parent / "inside"
DEADLINE_S = 240.0
PROMPTS = 3
KEYS = PROMPTS * TOKENS // CHUNK_TOKENS


@pytest.fixture(scope="module")
def node(logs: Path) -> Iterator[DfkvServe]:
    with DfkvServe(logs / "lmcache-node.log", ram="1GiB", name="node of the LMCache tests") as node:
        yield node


def at_rest(node: DfkvServe) -> None:
    """Waits until nothing on the node is pinned or leased."""
    until = time.monotonic() + 10
    while (metrics := node.metrics()).total("dfkv_node_pins") or metrics.total("dfkv_node_leases"):
        assert time.monotonic() < until, "pins were left behind"
        time.sleep(0.05)


def test_basic_check(lmcache_env: EngineEnv, node: DfkvServe, logs: Path) -> None:
    """python -m lmcache.v1.basic_check --mode test_l2_adapter"""
    command = [
        *(str(lmcache_env.python), "-m", "lmcache.v1.basic_check", "--mode", "test_l2_adapter"),
        *("--l2-adapter", l2_adapter(node.port)),
    ]
    output = run_to_end(command, environment(), logs, DEADLINE_S)
    assert re.findall(r"\| (LOOKUP|STORE|LOAD)\b.*\| +100\.0% \|", output) == ["LOOKUP", "STORE", "LOOKUP", "LOAD"], (
        output
    )
    assert "FAIL" not in output.upper(), output
    assert output.count("Validation: 5/5") == 2, output
    at_rest(node)


def test_basic_check_of_the_classic_mode(lmcache_env: EngineEnv, node: DfkvServe, logs: Path) -> None:
    """python -m lmcache.v1.basic_check --mode test_remote"""
    plugin = "remote_storage_plugin.dfkv."
    settings = {
        "chunk_size": CHUNK_TOKENS,
        "max_local_cpu_size": 0.25,
        "remote_url": f"dfkv://127.0.0.1:{node.port}",
        "remote_serde": "naive",
        "remote_storage_plugins": ["dfkv"],
        "extra_config": {
            plugin + "module_path": "dfkv_connectors.lmcache",
            plugin + "class_name": "DfkvConnectorAdapter",
            plugin + "weights_id": "tests",
            plugin + "lookup_deadline_ms": 5000,
        },
    }
    file = logs / "lmcache-classic.yaml"
    file.write_text(json.dumps(settings))
    command = [str(lmcache_env.python), "-m", "lmcache.v1.basic_check", "--mode", "test_remote"]
    output = run_to_end(command, environment() | {"LMCACHE_CONFIG_FILE": str(file)}, logs, DEADLINE_S)
    rates = re.findall(r"\| (EXISTS|PUT|GET)\b.*\| +100\.0% \|", output)
    assert rates == ["EXISTS", "PUT", "EXISTS", "GET"], output
    assert "Validation (content correct): 5/5" in output, output
    at_rest(node)


@pytest.mark.parametrize("object_kib", [1024, 4096])
def test_bench(lmcache_env: EngineEnv, node: DfkvServe, logs: Path, object_kib: int) -> None:
    """lmcache bench l2, with the bytes compared"""
    command = [
        *(str(lmcache_env.script("lmcache")), "bench", "l2", "--l2-adapter", l2_adapter(node.port)),
        *("--num-keys", "32", "--data-size-kb", str(object_kib), "--rounds", "2", "--lookup-max-hit-rate", "1.0"),
        "--no-skip-verify",
    ]
    output = run_to_end(command, environment(), logs, DEADLINE_S)
    assert re.findall(r"Total success: +(\d+)", output) == ["64", "64", "64"], output
    assert "data verified OK" in output, output
    assert "mismatch" not in output.lower(), output
    at_rest(node)


def test_contract(lmcache_env: EngineEnv, node: DfkvServe, logs: Path) -> None:
    """The adapter's promises to LMCache, call by call."""
    with DfkvServe(logs / "lmcache-small-node.log", ram="64MiB", name="small node of the LMCache tests") as small:
        env = environment() | {
            "LMCACHE_LOG_LEVEL": "WARNING",
            "DFKV_TEST_ADDRESS": f"127.0.0.1:{node.port}",
            "DFKV_TEST_SMALL_ADDRESS": f"127.0.0.1:{small.port}",
            "DFKV_TEST_PIDS": ",".join(str(pid) for pid in node.pids()),
        }
        print(run_to_end([str(lmcache_env.python), str(INSIDE / "contract.py")], env, logs, DEADLINE_S)[-4000:])
    at_rest(node)


def test_classic_mode(lmcache_env: EngineEnv, node: DfkvServe, logs: Path) -> None:
    """LMCache inside an engine: its StorageManager over dfkv, in two processes."""
    env = environment() | {
        "LMCACHE_LOG_LEVEL": "WARNING",
        "DFKV_TEST_ADDRESS": f"127.0.0.1:{node.port}",
        "DFKV_TEST_PIDS": ",".join(str(pid) for pid in node.pids()),
    }
    print(run_to_end([str(lmcache_env.python), str(INSIDE / "classic.py")], env, logs, 2 * DEADLINE_S)[-4000:])


def test_a_new_server_restores_what_another_stored(lmcache_env: EngineEnv, node: DfkvServe, logs: Path) -> None:
    """Every full chunk comes back with the same bytes; a server that is killed leaves no lease behind."""
    with LmcacheServer(lmcache_env, node.port, logs / "lmcache.log") as server:
        stored = server.run_client(PROMPTS)
        node.wait_quiet(quiet_s=0.3)
        assert server.counted("keys", operation="store", status="ok") == KEYS
        server.kill()
        at_rest(node)
        server.start()
        server.wait_ready()
        restored = server.run_client(PROMPTS)
        assert server.counted("keys", operation="load", status="ok") >= KEYS
        assert server.counted("keys", operation="store") == 0
        for number, checksums in stored.items():
            assert set(checksums) == set(restored[number]), number
        assert server.status()["locked_key_count"] == 0
        assert server.counted("faults") == 0
        at_rest(node)


def test_a_node_that_dies_costs_misses(lmcache_env: EngineEnv, logs: Path) -> None:
    with (
        DfkvServe(logs / "lmcache-dying-node.log", ram="512MiB", name="dying node of the LMCache tests") as mortal,
        LmcacheServer(lmcache_env, mortal.port, logs / "lmcache-dying.log") as server,
    ):
        first = server.run_client(1)
        mortal.kill()
        assert set(server.run_client(1)[0]) == set(first[0])  # from LMCache's own memory
        server.run_client(1, seed=7)  # its client compares what it stored with what it got back
        assert server.counted("faults") == 0
        mortal.start()
        mortal.wait_ready()
        until = time.monotonic() + 30
        seed = 100
        while not server.counted("keys", operation="store", status="ok") > TOKENS // CHUNK_TOKENS:
            assert time.monotonic() < until, f"the node that came back is not used\n{server.tail()}"
            server.run_client(1, seed=seed)
            seed += 1
