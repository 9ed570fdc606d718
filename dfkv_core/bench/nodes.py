"""Cache nodes for a measurement: processes of their own on loopback, ended with the `with` that started them."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from dfkv_core.bounded import parse_json

READY_DEADLINE_S = 20.0
STOP_DEADLINE_S = 10.0


class NodeStartError(RuntimeError):
    """A node did not start; the message has what it said."""


class LocalNodes:
    """`count` nodes that know each other, with `ram_bytes` each; `disk`: directory and capacity, of a single one."""

    def __init__(self, count: int, ram_bytes: int, disk: tuple[Path, int] | None = None) -> None:
        self._count = count
        self._ram_bytes = ram_bytes
        self._disk = disk
        self._processes: list[subprocess.Popen[str]] = []
        self.addresses: list[str] = []

    def __enter__(self) -> LocalNodes:
        ports = _free_ports(self._count)
        self.addresses = [f"127.0.0.1:{port}" for port in ports]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("DFKV_")}
        if self._count > 1:
            environ["DFKV_NODE__PEERS"] = ",".join(f"bench{i}={a}" for i, a in enumerate(self.addresses))
        try:
            for index, port in enumerate(ports):
                command = [sys.executable, "-m", "dfkv_core.cli", "serve", "--json", "--port", str(port)]
                command += ["--ram", str(self._ram_bytes), "--node-id", f"bench{index}"]
                if self._disk is not None:
                    command += ["--dir", str(self._disk[0]), "--capacity", str(self._disk[1])]
                self._processes.append(
                    subprocess.Popen(
                        command,
                        env=environ,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        text=True,
                    )
                )
            for process in self._processes:
                _wait_ready(process)
        except BaseException:
            self.close()
            raise
        return self

    def cpu_s(self) -> float:
        """CPU seconds that the nodes have used so far."""
        total = 0.0
        for process in self._processes:
            with (
                contextlib.suppress(OSError),
                open(f"/proc/{process.pid}/stat", encoding="ascii", errors="replace") as file,
            ):
                fields = file.read().rpartition(")")[2].split()
                total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return total

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.communicate(timeout=STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
        self._processes.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _wait_ready(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], READY_DEADLINE_S)
    line = process.stdout.readline() if readable else ""
    if not line:
        process.kill()
        _, said = process.communicate()
        raise NodeStartError(f"a node did not start: {said.strip().splitlines()[-1:] or 'it said nothing'}")
    event: dict[str, Any] = parse_json(line)
    return event


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
