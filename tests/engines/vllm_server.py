"""A real ``vllm serve`` on the CPU, and ``dfkv serve``, as context managers."""

import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .http_client import EngineClient, Metrics, scrape
from .process import StartableServer, free_port
from .setup_engine import EngineEnv

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "site"
"""The unpacked wheel: what an engine imports, its environment having nothing of dfkv installed."""

START_DEADLINE_S = 240.0


@dataclass(frozen=True)
class VllmOptions:
    """How an engine is started.

    ``connector``: the whole of ``--kv-transfer-config``; None runs without one. ``hash_seed``: PYTHONHASHSEED; None leaves
    Python's random one. ``kv_space_gib`` counts per rank. ``args`` come last and win.
    """

    model: Path
    served_name: str = "model"
    connector: Mapping[str, Any] | None = None
    max_model_len: int = 8192
    kv_space_gib: int = 1
    tensor_parallel: int = 1
    prefix_caching: bool = True
    hash_seed: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


def connector_config(
    port: int, *, policy: str | None = "recompute", extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The --kv-transfer-config for a node on loopback. `policy` None leaves vLLM's default load failure policy."""
    config: dict[str, Any] = {
        "kv_connector": "DfkvConnector",
        "kv_connector_module_path": "dfkv_connectors.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"addresses": [f"127.0.0.1:{port}"], **(extra or {})},
    }
    if policy is not None:
        config["kv_load_failure_policy"] = policy
    return config


class VllmServer(StartableServer):
    """One engine. Not thread-safe, but several may be started in turn and waited for together."""

    def __init__(self, engine: EngineEnv, options: VllmOptions, log: Path, *, name: str = "vllm") -> None:
        super().__init__(name, log, grace_s=20.0)
        self.options = options
        self.port = 0
        self.client = EngineClient(0, options.served_name)
        self._engine = engine
        self._scratch: Path | None = None

    def start(self) -> None:
        """Launches the engine without waiting for it. After `stop` it may be started again: a fresh process."""
        options = self.options
        self.port = free_port()
        self.client = EngineClient(self.port, options.served_name)
        # Sockets have short names: a directory of our own under /tmp, whatever TMPDIR says.
        self._scratch = Path(tempfile.mkdtemp(prefix="dfkv-vllm-", dir="/tmp"))
        command = [
            *(str(self._engine.python), str(self._engine.script("vllm")), "serve", str(options.model)),
            *("--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", options.served_name),
            *("--enforce-eager", "--dtype", "bfloat16", "--max-model-len", str(options.max_model_len)),
            *("--tensor-parallel-size", str(options.tensor_parallel), "--enable-prompt-tokens-details"),
            "--enable-prefix-caching" if options.prefix_caching else "--no-enable-prefix-caching",
        ]
        if options.connector is not None:
            command += ["--kv-transfer-config", json.dumps(options.connector)]
        env = {key: value for key, value in os.environ.items() if key not in ("PYTHONHASHSEED", "PYTHONPATH")}
        env |= {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(options.kv_space_gib),
            "VLLM_CPU_OMP_THREADS_BIND": cpu_binding(sorted(os.sched_getaffinity(0)), options.tensor_parallel),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_RPC_BASE_PATH": str(self._scratch),
            "VLLM_CACHE_ROOT": str(self._engine.path / "cache"),
        }
        if options.connector is not None:
            env["PYTHONPATH"] = str(SITE)
        if options.hash_seed is not None:
            env["PYTHONHASHSEED"] = options.hash_seed
        self.launch([*command, *options.args], env | dict(options.env), self._scratch)

    def wait_ready(self, deadline_s: float = START_DEADLINE_S) -> float:
        """Waits until the engine answers. Returns the seconds since launch. Raises ServerError with the end of its log."""
        return self.wait_until(self.client.healthy, deadline_s)

    def stop(self) -> None:
        super().stop()
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)

    def busy_cpus(self, seconds: float = 1.0) -> float:
        """The CPUs that the engine keeps busy, over the next `seconds`: 1.0 is one whole CPU."""
        before = self.cpu_s()
        time.sleep(seconds)
        return (self.cpu_s() - before) / seconds


class DfkvServe(StartableServer):
    """``dfkv serve``: one cache node with its embedded membership, on loopback."""

    def __init__(
        self,
        log: Path,
        *,
        ram: str = "2GiB",
        port: int = 0,
        env: Mapping[str, str] | None = None,
        name: str = "dfkv serve",
    ) -> None:
        super().__init__(name, log, grace_s=5.0)
        self.port = port or free_port()
        self.metrics_port = free_port()
        self.ram = ram
        self._env = dict(env or {})

    def set_env(self, name: str, value: str) -> None:
        """One more variable for the starts to come."""
        self._env[name] = value

    def start(self) -> None:
        """Launches it without waiting. After `stop` or `kill` it may be started again: the same address, an empty cache."""
        command = [
            *(sys.executable, "-m", "dfkv_core.cli", "serve", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--ram", self.ram, "--metrics-port", str(self.metrics_port)),
        ]
        # `-m` puts the working directory first: the unpacked wheel, not the sources.
        self.launch(command, os.environ | self._env, SITE)

    def wait_ready(self, deadline_s: float = 10.0) -> float:
        """Waits until it listens. Returns the seconds since launch."""
        return self.wait_until(lambda: accepts(self.port) and accepts(self.metrics_port), deadline_s)

    def metrics(self) -> Metrics:
        return scrape(self.metrics_port)

    def wait_quiet(self, deadline_s: float = 30.0, quiet_s: float = 0.5) -> float:
        """Waits until nothing is being written; returns the bytes stored. Raises TimeoutError."""
        until = time.monotonic() + deadline_s
        seen, since = -1.0, time.monotonic()
        while True:
            metrics = self.metrics()
            stored = metrics.total("dfkv_node_stored_bytes")
            now = time.monotonic()
            if stored != seen or metrics.total("dfkv_node_filling"):
                seen, since = stored, now
            elif now - since >= quiet_s:
                return stored
            if now > until:
                raise TimeoutError(f"{self.name} was still being written to after {deadline_s:.0f} s")
            time.sleep(0.1)


def accepts(port: int) -> bool:
    """Whether somebody on loopback takes connections on `port`."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return True
    except OSError:
        return False


def cpu_binding(cpus: list[int], ranks: int) -> str:
    """VLLM_CPU_OMP_THREADS_BIND: the CPUs dealt out to the ranks in equal runs; ranks share CPUs where there are too few."""
    each = max(1, len(cpus) // ranks)
    return "|".join(
        ",".join(str(cpus[(rank * each + index) % len(cpus)]) for index in range(each)) for rank in range(ranks)
    )
