"""A real SGLang server on the CPU, as a context manager, and what the tests ask it."""

import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engines.http_client import Metrics, answers, call, scrape
from tests.engines.process import StartableServer, free_port
from tests.engines.setup_engine import EngineEnv
from tests.engines.vllm_server import SITE, cpu_binding

SHIM = Path(__file__).resolve().parent / "shim"
"""Stands in for what SGLang has for accelerators alone; it patches private modules of the pinned version."""
PAGE_TOKENS = 64
ADMIN_KEY = "tests"
START_DEADLINE_S = 600.0
BACKEND = {
    "backend_name": "dfkv",
    "module_path": "dfkv_connectors.sglang",
    "class_name": "DfkvHiCache",
    "interface_v1": 1,
}


@dataclass(frozen=True)
class SglangOptions:
    """How an engine is started. ``extra``: the backend's configuration beside BACKEND; None runs without a backend."""

    model: Path
    extra: Mapping[str, Any] | None = None
    tensor_parallel: int = 1
    page_tokens: int = PAGE_TOKENS
    layout: str = "page_first_direct"
    write_policy: str = "write_through"
    prefetch_policy: str = "wait_complete"
    host_ratio: float = 2.0
    max_tokens: int = 8192
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """A greedy completion, and where its prompt's KV came from, in tokens."""

    tokens: list[int]
    device: int
    host: int
    storage: int
    logprobs: list[float]
    seconds: float


class SglangServer(StartableServer):
    """One engine. Not thread-safe."""

    def __init__(self, engine: EngineEnv, options: SglangOptions, log: Path, *, name: str = "sglang") -> None:
        super().__init__(name, log, grace_s=20.0)
        self.options = options
        self.port = 0
        self._engine = engine
        self._scratch: Path | None = None

    def start(self) -> None:
        """Launches the engine without waiting for it. After `stop` it may be started again: a fresh process."""
        options = self.options
        self.port = free_port()
        self._scratch = Path(tempfile.mkdtemp(prefix="dfkv-sglang-", dir="/tmp"))
        command = [
            *(str(self._engine.python), "-m", "sglang.launch_server", "--model-path", str(options.model)),
            *("--host", "127.0.0.1", "--port", str(self.port), "--device", "cpu", "--dtype", "bfloat16"),
            *("--attention-backend", "torch_native", "--page-size", str(options.page_tokens)),
            *("--max-total-tokens", str(options.max_tokens), "--max-running-requests", "8", "--context-length", "4096"),
            *("--skip-server-warmup", "--disable-overlap-schedule", "--sleep-on-idle", "--enable-cache-report"),
            *("--enable-metrics", "--tensor-parallel-size", str(options.tensor_parallel)),
            *("--admin-api-key", ADMIN_KEY, "--enable-hierarchical-cache", "--hicache-ratio", str(options.host_ratio)),
            *("--hicache-io-backend", "direct", "--hicache-mem-layout", options.layout),
            *("--hicache-write-policy", options.write_policy),
            *("--hicache-storage-prefetch-policy", options.prefetch_policy),
        ]
        if options.extra is not None:
            command += ["--hicache-storage-backend", "dynamic"]
            command += ["--hicache-storage-backend-extra-config", self.extra_config()]
        env = {key: value for key, value in os.environ.items() if key not in ("PYTHONHASHSEED", "PYTHONPATH")}
        env |= {
            "PYTHONPATH": f"{SHIM}:{SITE}",
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": cpu_binding(sorted(os.sched_getaffinity(0)), options.tensor_parallel),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TORCH_EXTENSIONS_DIR": str(self._engine.path / "extensions"),
            "PATH": f"{self._engine.path / 'bin'}:{env.get('PATH', '')}",
        }
        self.launch([*command, *options.args], env | dict(options.env), self._scratch)

    def extra_config(self, **changes: Any) -> str:
        """What --hicache-storage-backend-extra-config and a runtime attach take."""
        return json.dumps({**BACKEND, "prefetch_threshold": PAGE_TOKENS, **(self.options.extra or {}), **changes})

    def wait_ready(self, deadline_s: float = START_DEADLINE_S) -> float:
        """Waits until the engine answers. Returns the seconds since launch. Raises ServerError with the end of its log."""
        return self.wait_until(lambda: answers(self.port, "/health"), deadline_s)

    def stop(self) -> None:
        super().stop()
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)

    def generate(self, prompt: Sequence[int], *, max_tokens: int = 8, **options: Any) -> Answer:
        """A greedy completion. Raises HttpError, OSError, TimeoutError."""
        body = {
            "input_ids": list(prompt),
            "sampling_params": {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
            **options,
        }
        started_s = time.monotonic()
        answer = json.loads(call(self.port, "POST", "/generate", body, timeout_s=300.0))
        seconds = time.monotonic() - started_s
        details = answer["meta_info"].get("cached_tokens_details") or {}
        return Answer(
            tokens=[int(token) for token in answer["output_ids"]],
            device=int(details.get("device", 0)),
            host=int(details.get("host", 0)),
            storage=int(details.get("storage", 0)),
            logprobs=[float(entry[0]) for entry in answer["meta_info"]["output_token_logprobs"]],
            seconds=seconds,
        )

    def flush(self) -> None:
        """Empties the engine's device and host caches, not the storage."""
        self._administer("POST", "/flush_cache?timeout=30")

    def attach(self, policy: str = "write_through", **changes: Any) -> None:
        """Attaches the backend while the engine runs, with another write policy."""
        body = {
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config_json": self.extra_config(**changes),
            "hicache_write_policy": policy,
        }
        self._administer("PUT", "/hicache/storage-backend", body)

    def detach(self) -> None:
        self._administer("DELETE", "/hicache/storage-backend")

    def clear_storage(self) -> None:
        self._administer("POST", "/hicache/storage-backend/clear")

    def _administer(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> None:
        call(self.port, method, path, body, timeout_s=60.0, headers={"Authorization": f"Bearer {ADMIN_KEY}"})

    def metrics(self) -> Metrics:
        return scrape(self.port)

    def counted(self, family: str, **labels: str) -> float:
        """One of the connector's counters, summed over ranks."""
        return self.metrics().total(f"sglang:dfkv_{family}_total", **labels)


def prompt(name: str, tokens: int) -> list[int]:
    """Random byte tokens, the same for the same name."""
    return random.Random(name).choices(range(256), k=tokens)
