"""Server processes for tests and demonstrations: started under a guard, waited for with a deadline, always ended."""

import abc
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from .guard import descendants
from .stopping import stop_process

GUARD = Path(__file__).resolve().with_name("guard.py")
Server = TypeVar("Server", bound="ServerProcess")
Startable = TypeVar("Startable", bound="StartableServer")
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class ServerError(RuntimeError):
    """A server did not start, or ended when it should not have; the message carries the end of its log."""


class ServerProcess:
    """One server with its whole process tree. Not thread-safe: one owner.

    Standard output and error go to `log`. `stop` (or leaving the context, or the end of this interpreter, however it ends)
    terminates the tree: SIGTERM to the server, after `grace_s` SIGKILL to everything below it.
    """

    def __init__(self, name: str, log: Path, *, grace_s: float = 15.0) -> None:
        self.name = name
        self.log = log
        self.started_s = 0.0
        self._grace_s = grace_s
        self._guard: subprocess.Popen[bytes] | None = None

    def launch(self, command: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        """Starts the server; does not wait for it."""
        if self._guard is not None:
            raise RuntimeError(f"{self.name} runs already")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            output.write(f"$ {' '.join(command)}\n".encode())
            output.flush()
            self._guard = subprocess.Popen(
                [sys.executable, str(GUARD), str(self._grace_s), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                cwd=cwd,
            )
        self.started_s = time.monotonic()

    @property
    def running(self) -> bool:
        return self._guard is not None and self._guard.poll() is None

    def wait_until(self, ready: Callable[[], bool], deadline_s: float) -> float:
        """Waits for `ready()`; returns the seconds since launch. Raises ServerError past the deadline or when the server ended."""
        while not ready():
            elapsed = time.monotonic() - self.started_s
            if not self.running:
                code = None if self._guard is None else self._guard.returncode
                raise ServerError(f"{self.name} ended with {code} after {elapsed:.0f} s\n{self.tail()}")
            if elapsed > deadline_s:
                raise ServerError(f"{self.name} was not ready after {elapsed:.0f} s\n{self.tail()}")
            time.sleep(0.1)
        return time.monotonic() - self.started_s

    def pids(self) -> list[int]:
        """The server's processes, without the guard."""
        return descendants(self._guard.pid) if self._guard is not None else []

    def cpu_s(self) -> float:
        """CPU seconds so far of the server's processes, to 10 ms each."""
        return sum(_process_cpu_s(pid) for pid in self.pids())

    def thread_cpu_s(self) -> dict[str, float]:
        """CPU seconds so far of the server's living threads, to the microsecond, added up by thread name."""
        total: dict[str, float] = {}
        for pid in self.pids():
            for task in _entries(Path(f"/proc/{pid}/task")):
                with contextlib.suppress(OSError):
                    name = (task / "comm").read_text().strip()
                    total[name] = total.get(name, 0.0) + int((task / "schedstat").read_text().split()[0]) / 1e9
        return total

    def kill(self) -> None:
        """SIGKILL to the server and everything below it: a crash. Idempotent."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.stop()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within: the server is stopped with SIGSTOP, alive and silent."""
        pids = self.pids()
        for pid in pids:
            stop_process(pid)
        try:
            yield
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def stop(self) -> None:
        """Ends the tree and waits for that. Idempotent."""
        guard, self._guard = self._guard, None
        if guard is None:
            return
        if guard.stdin is not None:
            with contextlib.suppress(OSError):
                guard.stdin.close()
        try:
            guard.wait(self._grace_s + 15.0)
        except subprocess.TimeoutExpired:
            for pid in [*descendants(guard.pid), guard.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            guard.wait(5.0)

    def tail(self, lines: int = 40) -> str:
        """The end of the log."""
        with contextlib.suppress(OSError):
            text = self.log.read_text(errors="replace").splitlines()
            return f"the end of {self.log}:\n" + "\n".join(text[-lines:])
        return f"{self.log} cannot be read"

    def __enter__(self: Server) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class StartableServer(ServerProcess, abc.ABC):
    """A server that knows how it is started and when it is ready: within its context it is."""

    @abc.abstractmethod
    def start(self) -> None:
        """Launches it without waiting."""

    @abc.abstractmethod
    def wait_ready(self) -> float:
        """Waits until it answers; returns the seconds since launch. Raises ServerError."""

    def __enter__(self: Startable) -> Startable:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self


def run_to_end(command: Sequence[str], env: Mapping[str, str], cwd: Path, deadline_s: float) -> str:
    """Runs a command that ends by itself; returns what it printed. Raises AssertionError with the end of it, TimeoutExpired."""
    done = subprocess.run(
        command, cwd=cwd, env=dict(env), capture_output=True, text=True, timeout=deadline_s, check=False
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"{' '.join(command)[:200]} ended with {done.returncode}\n{output[-6000:]}"
    return output


def free_port() -> int:
    """A TCP port on loopback that nobody has: below those that the kernel gives to outgoing connections, any of which could
    otherwise take it before the server that it is meant for."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(10_000, max(first, 20_000))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _entries(directory: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(directory.iterdir())
    return []


def _process_cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS
