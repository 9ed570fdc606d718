"""What the machine itself gives: a copy in memory, and plain TCP streams. Measured in turns with what they are compared with."""

from __future__ import annotations

import ctypes
import mmap
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from dfkv_core.bounded import parse_json, read_bytes

STREAM_SECONDS = 1
STREAM_DEADLINE_S = 30
SERVER_DEADLINE_S = 5
FIO_DEADLINE_S = 600
LEAST_WORKING_SET_BYTES = 256 << 20
_COPY_PIECE_BYTES = 16 << 20


class CeilingError(RuntimeError):
    """A ceiling cannot be measured. `hint` says what to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def last_level_cache_bytes() -> int:
    """The largest cache that the kernel tells of; 0 where it tells of none."""
    sizes = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = read_bytes(file, 64).decode("ascii").strip()
        factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KMG")) * factor)
    return max(sizes)


def copy_gb_per_s(most_bytes: int = 4 << 30) -> float:
    """One core's copy over source and target of together 4 times the last-level cache (at most `most_bytes`)."""
    each = min(max(2 * last_level_cache_bytes(), LEAST_WORKING_SET_BYTES), most_bytes // 2)
    with mmap.mmap(-1, each) as source, mmap.mmap(-1, each) as target:
        addresses = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in (source, target)]
        for address in addresses:  # the pages come with the first write
            ctypes.memset(address, 1, each)
        started = time.perf_counter()
        for offset in range(0, each, _COPY_PIECE_BYTES):
            ctypes.memmove(addresses[1] + offset, addresses[0] + offset, min(_COPY_PIECE_BYTES, each - offset))
        return each / (time.perf_counter() - started) / 1e9


class StreamServer:
    """`iperf3 -s` on loopback, for the length of a `with`."""

    def __init__(self) -> None:
        if shutil.which("iperf3") is None:
            raise CeilingError("iperf3 is not installed", "install it, for example with: apt-get install iperf3")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port: int = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> StreamServer:
        command = ["iperf3", "-s", "-B", "127.0.0.1", "-p", str(self._port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + SERVER_DEADLINE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
                return self
            except OSError:
                if time.monotonic() > until or self._process.poll() is not None:
                    self.__exit__()
                    raise CeilingError("iperf3 does not listen", "is another program using its port?") from None
                time.sleep(0.02)

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(SERVER_DEADLINE_S)

    def gb_per_s(self, streams: int, *, receive: bool) -> float:
        """`streams` plain TCP streams at once. receive: from the server to this side, as a get."""
        command = [
            "iperf3",
            "-c",
            "127.0.0.1",
            "-p",
            str(self._port),
            "-P",
            str(streams),
            "-t",
            str(STREAM_SECONDS),
            "-J",
        ]
        if receive:
            command.append("-R")
        done = subprocess.run(command, capture_output=True, text=True, timeout=STREAM_DEADLINE_S, check=False)
        if done.returncode:
            raise CeilingError(f"iperf3 ended with {done.returncode}", done.stderr.strip() or "run it by hand")
        return float(parse_json(done.stdout)["end"]["sum_received"]["bits_per_second"]) / 8e9


@dataclass(frozen=True)
class DiskSpeed:
    gb_per_s: float
    p50_us: float
    p99_us: float


def disk_speed(file: Path, block_bytes: int, total_bytes: int, depth: int, kind: str) -> DiskSpeed:
    """What fio moves past the page cache in blocks of `block_bytes`, `depth` at a time; kind: write, randread, randwrite.

    `file` is made, and kept for the next run. Raises CeilingError.
    """
    if shutil.which("fio") is None:
        raise CeilingError("fio is not installed", "install it, for example with: apt-get install fio")
    command = [
        *("fio", "--name=ceiling", f"--filename={file}", f"--size={total_bytes}", f"--bs={block_bytes}"),
        *(f"--rw={kind}", "--direct=1", "--ioengine=psync", f"--numjobs={depth}", "--group_reporting", "--thread"),
        *(f"--io_size={total_bytes // depth}", "--norandommap", "--fallocate=posix", "--output-format=json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=FIO_DEADLINE_S, check=False)
    if done.returncode:
        raise CeilingError(f"fio ended with {done.returncode}: {done.stderr.strip()}", "is there room in --dir?")
    job = parse_json(done.stdout)["jobs"][0]["read" if kind == "randread" else "write"]
    times = job["clat_ns"]["percentile"]
    return DiskSpeed(job["bw_bytes"] / 1e9, times["50.000000"] / 1000, times["99.000000"] / 1000)
