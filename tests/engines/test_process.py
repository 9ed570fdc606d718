"""The harness leaves nothing behind: every way a server can be ended ends all of its processes."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.process import ServerError, ServerProcess
from tests.engines.vllm_server import ROOT, cpu_binding

# A server that ignores SIGTERM, with a child in a session of its own that does so too. Prints both process ids.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) == 1:
    child = subprocess.Popen([sys.executable, sys.argv[0], "child"], start_new_session=True)
    print("pids", os.getpid(), child.pid, flush=True)
time.sleep(120)
"""

OWNER = """
import sys, time
from pathlib import Path
from tests.engines.process import ServerProcess
server = ServerProcess("stubborn", Path(sys.argv[1]), grace_s=0.2)
server.launch([sys.executable, sys.argv[2]], {"PATH": "/usr/bin:/bin"}, Path("/"))
time.sleep(120)
"""


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_for(condition: Callable[[], bool], deadline_s: float = 10.0) -> bool:
    until = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def pids_in(log: Path) -> list[int]:
    found: list[str] = []

    def printed() -> bool:
        with contextlib.suppress(OSError):
            found.extend(line for line in log.read_text().splitlines() if line.startswith("pids"))
        return bool(found)

    assert wait_for(printed), "the server did not start"
    return [int(pid) for pid in found[0].split()[1:]]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "stubborn.py"
    path.write_text(STUBBORN)
    return path


@pytest.fixture
def server(tmp_path: Path, script: Path) -> Iterator[ServerProcess]:
    with ServerProcess("stubborn", tmp_path / "server.log", grace_s=0.2) as process:
        process.launch([sys.executable, str(script)], os.environ, tmp_path)
        yield process


def test_stop_ends_the_whole_tree(server: ServerProcess) -> None:
    pids = pids_in(server.log)
    assert set(pids) <= set(server.pids())
    server.stop()
    assert not server.running
    assert wait_for(lambda: not any(alive(pid) for pid in pids))
    server.stop()  # once more changes nothing


def test_an_exception_in_the_body_ends_the_whole_tree(tmp_path: Path, script: Path) -> None:
    log = tmp_path / "server.log"
    pids: list[int] = []

    def body() -> None:
        with ServerProcess("stubborn", log, grace_s=0.2) as process:
            process.launch([sys.executable, str(script)], os.environ, tmp_path)
            pids.extend(pids_in(log))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    assert pids
    assert wait_for(lambda: not any(alive(pid) for pid in pids))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_end_of_the_owner_ends_the_whole_tree(tmp_path: Path, script: Path, number: int) -> None:
    log = tmp_path / "server.log"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(log), str(script)], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        pids = pids_in(log)
        owner.send_signal(number)
        owner.wait(10)
        assert wait_for(lambda: not any(alive(pid) for pid in pids))
    finally:
        owner.kill()
        owner.wait(10)


def test_kill_is_a_crash_and_a_new_launch_follows(server: ServerProcess, script: Path, tmp_path: Path) -> None:
    pids = pids_in(server.log)
    server.kill()
    assert wait_for(lambda: not any(alive(pid) for pid in pids))
    server.launch([sys.executable, str(script)], os.environ, tmp_path)
    assert server.running


def test_a_server_that_ends_early_shows_its_log(tmp_path: Path) -> None:
    with ServerProcess("short", tmp_path / "server.log") as process:
        process.launch([sys.executable, "-c", "print('the reason'); raise SystemExit(3)"], os.environ, tmp_path)
        with pytest.raises(ServerError, match=r"ended with 3 (?s:.*)the reason"):
            process.wait_until(lambda: False, 20.0)


def test_a_server_that_never_gets_ready_is_given_up(server: ServerProcess) -> None:
    pids_in(server.log)
    with pytest.raises(ServerError, match="not ready after"):
        server.wait_until(lambda: False, 0.3)


def test_shared_memory_of_a_killed_server_is_removed(tmp_path: Path) -> None:
    name = Path(f"/dev/shm/vllm_dfkv_test_{os.getpid()}")
    code = (
        "import mmap, time\n"
        f"f = open({str(name)!r}, 'w+b'); f.truncate(4096)\n"
        "m = mmap.mmap(f.fileno(), 4096); print('pids', flush=True); time.sleep(120)\n"
    )
    try:
        with ServerProcess("mapper", tmp_path / "server.log", grace_s=0.2) as process:
            process.launch([sys.executable, "-c", code], os.environ, tmp_path)
            pids_in(process.log)
            assert name.exists()
        assert not name.exists()
    finally:
        name.unlink(missing_ok=True)


def test_cpu_time_of_threads_is_seen_by_name(tmp_path: Path) -> None:
    code = "x = 0\nprint('pids', flush=True)\nwhile True: x += 1\n"
    with ServerProcess("busy", tmp_path / "server.log", grace_s=0.2) as process:
        process.launch([sys.executable, "-c", code], os.environ, tmp_path)
        pids_in(process.log)
        before = process.cpu_s()
        assert wait_for(lambda: process.cpu_s() - before > 0.2)
        threads = process.thread_cpu_s()
        assert max(threads.values()) > 0.1, threads


@pytest.mark.parametrize(
    ("cpus", "ranks", "expected"),
    [([0, 1], 1, "0,1"), ([0, 1], 2, "0|1"), ([4, 5, 6, 7], 2, "4,5|6,7"), ([3], 2, "3|3")],
)
def test_cpu_binding(cpus: list[int], ranks: int, expected: str) -> None:
    assert cpu_binding(cpus, ranks) == expected
