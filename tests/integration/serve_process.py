"""A real `dfkv serve` for tests: started on a free port, stopped and checked at the end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

READY_DEADLINE_S = 20.0
STOP_DEADLINE_S = 15.0


def clean_environ(**extra: str) -> dict[str, str]:
    """This process's environment without any dfkv setting of the machine or its user."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DFKV_")}
    return {**kept, "XDG_CONFIG_HOME": "/nonexistent", **extra}


def dfkv(*arguments: str, timeout_s: float = 30.0, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs `dfkv ARGUMENTS` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "dfkv_core.cli", *arguments],
        env=clean_environ(**environ),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=timeout_s,
        check=False,
    )


class ServeProcess:
    """One `dfkv serve --json` (or another command that runs until it is stopped).

    ready holds its first line; stderr goes to a file that error messages quote."""

    def __init__(self, log: Path, *arguments: str, name: str = "serve", **environ: str) -> None:
        self.log = log
        command = [sys.executable, "-m", "dfkv_core.cli", name, "--json"]
        if "--port" not in arguments:
            command += ["--port", "0"]
        if "--ram" not in arguments and name != "mds":
            command += ["--ram", "64MiB"]
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [*command, *arguments],
                env=clean_environ(**environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        try:
            self.ready = self.event(READY_DEADLINE_S)
        except BaseException:
            self.kill()
            raise

    @property
    def address(self) -> str:
        return str(self.ready["address"])

    @property
    def pid(self) -> int:
        return self.process.pid

    def event(self, deadline_s: float) -> dict[str, Any]:
        """The next line of standard output. Raises AssertionError when none comes in time."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], deadline_s)
        line = self.process.stdout.readline() if readable else ""
        if not line:
            state = f"exit status {self.process.poll()}"
            raise AssertionError(f"no line from dfkv in {deadline_s} s ({state}): {self.log.read_text()}")
        event = json.loads(line)
        assert isinstance(event, dict)
        return event

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, dict[str, Any]]:
        """Signals it; returns the exit status and its last line."""
        self.process.send_signal(number)
        event = self.event(STOP_DEADLINE_S)
        return self.process.wait(STOP_DEADLINE_S), event

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(STOP_DEADLINE_S)
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextlib.contextmanager
def serving(log: Path, *arguments: str, name: str = "serve", **environ: str) -> Iterator[ServeProcess]:
    """A process for the length of a block; killed at its end where the test did not stop it."""
    server = ServeProcess(log, *arguments, name=name, **environ)
    try:
        yield server
    finally:
        server.kill()
