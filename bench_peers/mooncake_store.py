"""Mooncake's store over TCP, in an environment of its own: a master, a process with a segment, and a client with registered buffers."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from bench_peers.objects import Objects
from bench_peers.store import DEADLINE_S, StoreFailedError, StoreMissingError
from tests.engines.setup_engine import EngineSetupError, ensure_engine

START_DEADLINE_S = 30.0
STOP_DEADLINE_S = 5.0
CHILD = Path(__file__).with_name("mooncake_child.py")
HOST = "127.0.0.1"
# Its documented switch for connections that are kept, and the one that keeps it from copying past the network.
SETTINGS = {"MC_TCP_ENABLE_CONNECTION_POOL": "1", "MC_STORE_MEMCPY": "0", "GLOG_minloglevel": "3", "MC_LOG_LEVEL": "2"}


class MooncakeStore:
    name = "Mooncake"
    how = "batch_put_from and batch_get_into on registered buffers, TCP with its connection pool, no checksums"

    def __init__(self, ram_bytes: int) -> None:
        try:
            environment = ensure_engine("mooncake_cpu")
        except EngineSetupError as error:
            raise StoreMissingError(str(error).splitlines()[0]) from None
        self._python = str(environment.python)
        self.version = self._said(
            "import importlib.metadata as m; print(m.version('mooncake-transfer-engine-non-cuda'))"
        )
        self._environ = {
            name: value for name, value in os.environ.items() if not name.startswith(("MC_", "PYTHONPATH"))
        }
        self._environ.update(SETTINGS)
        self._memory = ""
        self._processes: list[subprocess.Popen[str]] = []
        master = f"{HOST}:{_free_port()}"
        try:
            self._start_master(str(environment.script("mooncake_master")), master)
            self._start("store", master, HOST, str(ram_bytes))
            self._client = self._start("client", master, HOST)
        except BaseException:
            self.close()
            raise

    def put(self, objects: Objects) -> float:
        return self._move("put", objects)

    def get(self, objects: Objects) -> float:
        return self._move("get", objects)

    def forget(self, objects: Objects) -> None:
        """Its puts fail where nothing is free, until its evicting thread has run."""
        self._ask({"op": "remove", "keys": _keys(objects)})

    def close(self) -> None:
        for process in reversed(self._processes):
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        for process in reversed(self._processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_DEADLINE_S if process.stdin is not None else 0)
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def _move(self, op: str, objects: Objects) -> float:
        if self._memory != objects.path:
            self._ask({"op": "memory", "path": objects.path, "bytes": objects.total_bytes})
            self._memory = objects.path
        return float(self._ask({"op": op, "keys": _keys(objects), "size": objects.size_bytes})["seconds"])

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._client.stdin is not None
        self._client.stdin.write(json.dumps(order) + "\n")
        self._client.stdin.flush()
        answer = _answer(self._client, DEADLINE_S)
        if "error" in answer:
            raise StoreFailedError(f"{self.name}: {answer['error']}")
        return answer

    def _start_master(self, program: str, address: str) -> None:
        port = address.rpartition(":")[2]
        arguments = [f"--rpc_port={port}", f"--metrics_port={_free_port()}", "--enable_metric_reporting=false"]
        process = subprocess.Popen(
            [program, *arguments],
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._processes.append(process)
        until = time.monotonic() + START_DEADLINE_S
        while True:
            try:
                socket.create_connection((HOST, int(port)), timeout=1).close()
                return
            except OSError:
                if time.monotonic() > until or process.poll() is not None:
                    raise StoreMissingError("Mooncake's master does not start") from None
                time.sleep(0.05)

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [self._python, str(CHILD), *arguments],
            env=self._environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._processes.append(process)
        try:
            _answer(process, START_DEADLINE_S)
        except StoreFailedError as error:
            raise StoreMissingError(f"Mooncake's {arguments[0]} does not start ({error})") from None
        return process

    def _said(self, code: str) -> str:
        done = subprocess.run([self._python, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        return done.stdout.strip()


def _keys(objects: Objects) -> list[str]:
    return [block_id.hex() for block_id in objects.ids]


def _answer(process: subprocess.Popen[str], deadline_s: float) -> dict[str, Any]:
    """The next line of JSON; the store's own words between them are passed over."""
    assert process.stdout is not None
    until = time.monotonic() + deadline_s
    while True:
        readable, _, _ = select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))
        line = process.stdout.readline() if readable else ""
        if not line:
            raise StoreFailedError(f"no answer in {deadline_s:.0f} s" if not readable else "the process ended")
        if line.startswith("{"):
            answer: dict[str, Any] = json.loads(line)
            return answer


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
