"""A real etcd on free ports of loopback, started, stopped and started again."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

START_DEADLINE_S = 30.0


class EtcdProcess:
    """One member that keeps its data over stop() and start()."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, peer = _free_port(), _free_port()
        client_url, peer_url = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{peer}"
        self._command = [
            *("etcd", "--name", "one", "--data-dir", str(folder / "data"), "--log-level", "error"),
            *("--listen-client-urls", client_url, "--advertise-client-urls", client_url),
            *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url),
            *("--initial-cluster", f"one={peer_url}"),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        with (self.folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + START_DEADLINE_S
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"etcd did not start: {(self.folder / 'etcd.log').read_text()[-2000:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        """As a machine that loses power: nothing is handed over."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.address}/health", timeout=2) as answer:
                return bool(json.load(answer)["health"] == "true")
        except (OSError, ValueError, KeyError):
            return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
