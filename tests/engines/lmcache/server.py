"""A real LMCache server on the CPU, as a context manager, and its own client that checks what it restores."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.engines.http_client import Metrics, answers, call, scrape
from tests.engines.process import StartableServer, free_port, run_to_end
from tests.engines.setup_engine import EngineEnv
from tests.engines.vllm_server import SITE

START_DEADLINE_S = 240.0
CLIENT_DEADLINE_S = 120.0
TOKENS = 2048
CHUNK_TOKENS = 256
QUIET = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
"""No reports about its use to its makers."""


def environment() -> dict[str, str]:
    """For everything of LMCache, with dfkv."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("DFKV_", "PYTHON", "LMCACHE_"))}
    return kept | QUIET | {"PYTHONPATH": str(SITE), "OMP_NUM_THREADS": "1"}


def l2_adapter(port: int, **params: Any) -> str:
    """What --l2-adapter takes, for a node on loopback."""
    plugin = {"type": "plugin", "module_path": "dfkv_connectors.lmcache", "class_name": "DfkvL2Adapter"}
    return json.dumps(
        {**plugin, "adapter_params": {"addresses": [f"127.0.0.1:{port}"], "weights_id": "tests", **params}}
    )


def vllm_connector(port: int) -> dict[str, Any]:
    """The --kv-transfer-config for an LMCache server on loopback, with LMCache's own connector: vLLM's copy of it wants CUDA."""
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": port,
            "lmcache.mp.mq_timeout": 10,
            "lmcache.mp.heartbeat_interval": 2,
        },
    }


class LmcacheServer(StartableServer):
    """One ``lmcache server`` with dfkv as its L2; it keeps its ports when it is started again. Not thread-safe."""

    def __init__(self, engine: EngineEnv, node_port: int, log: Path, params: Mapping[str, Any] | None = None) -> None:
        super().__init__("lmcache server", log, grace_s=10.0)
        self._engine = engine
        self._adapter = l2_adapter(node_port, **(params or {}))
        self.port, self.http_port = free_port(), free_port()

    def start(self) -> None:
        command = [
            *(str(self._engine.script("lmcache")), "server", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--http-host", "127.0.0.1", "--http-port", str(self.http_port), "--prometheus-port", str(free_port())),
            *("--l1-size-gb", "0.5", "--no-l1-use-lazy", "--eviction-policy", "LRU"),
            *("--chunk-size", str(CHUNK_TOKENS), "--supported-transfer-mode", "auto", "--l2-adapter", self._adapter),
        ]
        self.launch(command, environment(), self.log.parent)

    def wait_ready(self, deadline_s: float = START_DEADLINE_S) -> float:
        return self.wait_until(lambda: answers(self.http_port, "/healthcheck"), deadline_s)

    def metrics(self) -> Metrics:
        return scrape(self.http_port)

    def counted(self, family: str, **labels: str) -> float:
        return self.metrics().total(f"lmcache:dfkv_{family}_total", **labels)

    def status(self) -> dict[str, Any]:
        """The adapter's part of LMCache's status."""
        status: dict[str, Any] = json.loads(call(self.http_port, "GET", "/status", timeout_s=10.0))
        found: dict[str, Any] = status["storage_manager"]["l2_adapters"][0]
        return found

    def clear(self) -> None:
        """Empties its own memory."""
        call(self.http_port, "POST", "/cache/clear", {}, timeout_s=10.0)

    def run_client(self, requests: int, *, seed: int = 0) -> dict[int, list[str]]:
        """Stores and restores prompts of TOKENS tokens as an engine does, twice each. Checksums of their KV, by prompt."""
        command = [
            *(str(self._engine.script("lmcache")), "bench", "server", "--mode", "cpu", "--interval", "0.01"),
            *("--rpc-url", f"tcp://127.0.0.1:{self.port}", "--url", f"http://127.0.0.1:{self.http_port}"),
            *("--num-tokens", str(TOKENS), "--start", str(seed), "--end", str(seed + requests)),
            *("--kvcache-shape-spec", "(2,512,16,4,64):bfloat16:4", "--num-blocks", "512"),
        ]
        output = run_to_end(command, environment(), self.log.parent, CLIENT_DEADLINE_S)
        assert "MISMATCH" not in output, output[-4000:]
        checksums: dict[int, list[str]] = {}
        for number, checksum in re.findall(r"\[seq (\d+)/\w+\] CHECKSUM: ([0-9a-f]+)", output):
            checksums.setdefault(int(number), []).append(checksum)
        assert len(checksums) == requests, output[-4000:]
        return checksums
