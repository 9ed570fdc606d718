"""dfkv beside LMCache's other L2 adapters: `lmcache bench l2`, run in turn against each, with the bytes compared.

fs_native writes files, resp talks to redis; all three servers live on this machine, over loopback or its file system. Each
with the concurrency that it has unless it is configured: 8 threads with a connection each for resp, 4 threads for fs_native, 2
connections for dfkv.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.engines.lmcache.server import environment, l2_adapter
from tests.engines.process import ServerError, StartableServer, free_port, run_to_end
from tests.engines.setup_engine import EngineEnv, EngineSetupError, ensure_engine
from tests.engines.vllm_server import ROOT, DfkvServe, accepts

from .report import make_console

LOGS = ROOT / "build" / "bench-lmcache"
PAGE = ROOT / "docs" / "benchmarks-lmcache.md"
SIZES_KIB = (1024, 4096)
BATCH_BYTES = 64 << 20
ROUNDS = 5
RUN_DEADLINE_S = 180.0
MIN_RATIO = 1.2  # of resp
WHAT_IS_MEASURED = [
    "Each round is one call with all keys of a batch, which were not stored before, and lasts from the call until the adapter has",
    "signalled the end through its event descriptor. Buffers are filled and compared outside of it, and one more round comes before",
    "those that count.",
    "",
    "Everything has the concurrency that it has unless it is configured. resp has 8 threads in the client, each with a connection, before",
    "the one thread of redis. dfkv has 2 connections and one thread for payload in the client, before 2 threads for payload in the node.",
    "A node keeps an eighth of its memory, at most 512 MiB, ready ahead of its use; redis takes its memory as it fills.",
    "",
    "Of a store into a fresh node, four fifths of the node's time were page faults inside the receive call",
    "([decision 014](decisions/014-memory-before-its-use.md)). Loads waited for the timers of the system's congestion control, where",
    "that is BBR ([decision 015](decisions/015-no-pacing-within-a-machine.md), also for how both do where it is not). The adapter's",
    "work in Python is about 1 ms of a batch.",
]


class Redis(StartableServer):
    """redis-server without persistence. Ready to be filled with all that a run stores."""

    def __init__(self, log: Path) -> None:
        super().__init__("redis-server", log, grace_s=5.0)
        self.port = 0

    def start(self) -> None:
        program = shutil.which("redis-server")
        if program is None:
            raise ServerError("redis-server is not installed; on Debian: apt-get install redis-server")
        self.port = free_port()
        command = [program, "--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--appendonly", "no"]
        self.launch(command, {"PATH": "/usr/bin:/bin"}, self.log.parent)

    def wait_ready(self, deadline_s: float = 10.0) -> float:
        return self.wait_until(lambda: accepts(self.port), deadline_s)


@dataclass(frozen=True)
class Measured:
    """One run of `lmcache bench l2`: megabytes per second, mean of its rounds."""

    adapter: str
    object_kib: int
    store: float
    load: float


def bench(engine: EngineEnv, adapter: str, spec: str, object_kib: int) -> Measured:
    """Raises ServerError where not every key was stored, found and loaded, or the bytes differ."""
    keys = BATCH_BYTES // (object_kib << 10)
    report = LOGS / f"{adapter}-{object_kib}.json"
    command = [
        *(str(engine.script("lmcache")), "bench", "l2", "--l2-adapter", spec, "--num-keys", str(keys)),
        *("--data-size-kb", str(object_kib), "--rounds", str(ROUNDS), "--lookup-max-hit-rate", "1.0"),
        *("--no-skip-verify", "--format", "json", "--output", str(report)),
    ]
    output = run_to_end(command, environment(), LOGS, RUN_DEADLINE_S)
    metrics = json.loads(report.read_text())["metrics"]
    results = {each["operation"].lower(): each for each in metrics.values() if "operation" in each}
    short = [name for name, each in results.items() if each["total_success"] != each["total_keys"]]
    if short or set(results) != {"lookup", "store", "load"} or "data verified OK" not in output:
        raise ServerError(f"{adapter} at {object_kib} KiB: {', '.join(short) or 'the bytes'} failed\n{output[-3000:]}")
    speeds = {name: float(each["throughput_avg_mbps"]) for name, each in results.items()}
    return Measured(adapter, object_kib, speeds["store"], speeds["load"])


def run(engine: EngineEnv, sizes_kib: Sequence[int], repeats: int, say: Callable[[str], None]) -> list[Measured]:
    """The adapters in turn, so that what the machine does besides falls on all of them; each on a fresh server."""
    files = LOGS / "files"
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir(parents=True)
    measured = []
    try:
        for repeat in range(repeats):
            for object_kib in sizes_kib:
                with DfkvServe(LOGS / "dfkv-serve.log", ram="3GiB") as node, Redis(LOGS / "redis.log") as redis:
                    specs = {
                        "dfkv": l2_adapter(node.port),
                        "resp": json.dumps({"type": "resp", "host": "127.0.0.1", "port": redis.port}),
                        "fs_native": json.dumps({"type": "fs_native", "base_path": str(files)}),
                    }
                    for adapter, spec in specs.items():
                        measured.append(bench(engine, adapter, spec, object_kib))
                        last = measured[-1]
                        say(
                            f"{repeat + 1} of {repeats}: {adapter}, {object_kib} KiB: store {last.store:,.0f}, "
                            f"load {last.load:,.0f} MB/s"
                        )
                shutil.rmtree(files)
                files.mkdir()
    finally:
        shutil.rmtree(files, ignore_errors=True)
    return measured


def earlier(path: Path) -> list[Measured]:
    """The runs that are already there; none where there is no file."""
    if not path.exists():
        return []
    return [Measured(**each) for each in json.loads(path.read_text())["runs"]]


def medians(measured: list[Measured]) -> list[dict[str, Any]]:
    """One row per size and operation: MB/s by adapter, and dfkv's share of resp's."""
    rows = []
    for object_kib in sorted({each.object_kib for each in measured}):
        for operation in ("store", "load"):
            speed = {
                adapter: statistics.median(
                    getattr(each, operation)
                    for each in measured
                    if (each.adapter, each.object_kib) == (adapter, object_kib)
                )
                for adapter in ("dfkv", "resp", "fs_native")
            }
            ratio = speed["dfkv"] / speed["resp"]
            rows.append({"object_kib": object_kib, "operation": operation, **speed, "ratio": ratio})
    return rows


def congestion_control() -> str:
    """What the system chooses for TCP; part of what loads over loopback cost."""
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


def page(rows: list[dict[str, Any]], repeats: int) -> str:
    """The page of the documentation."""
    lines = [
        "# dfkv beside LMCache's other L2 adapters",
        "",
        f"`lmcache bench l2` on {os.cpu_count()} CPUs of one machine: batches of {BATCH_BYTES >> 20} MiB, {ROUNDS} rounds,",
        f"every byte compared; MB/s, medians of {repeats} runs on fresh servers, the adapters in turn. resp talks to redis over loopback,",
        "without persistence; fs_native writes files, which the page cache holds; dfkv checks every object from end to end.",
        f"The system's congestion control is {congestion_control()}. `make bench-lmcache` measures it on yours, and with",
        "`DOCS=1` it writes this page.",
        "",
        "| object | operation | dfkv | resp (redis) | fs_native | dfkv / resp |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row['object_kib'] >> 10} MiB | {row['operation']} | {row['dfkv']:,.0f} | {row['resp']:,.0f} | "
        f"{row['fs_native']:,.0f} | {row['ratio']:.2f} |"
        for row in rows
    ]
    return "\n".join([*lines, "", *WHAT_IS_MEASURED]) + "\n"


def show(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(title="lmcache bench l2, MB/s")
    for name in ("object", "operation", "dfkv", "resp", "fs_native", "dfkv / resp"):
        table.add_column(name, justify="left" if name in ("object", "operation") else "right")
    for row in rows:
        speeds = [f"{row[name]:,.0f}" for name in ("dfkv", "resp", "fs_native")]
        table.add_row(f"{row['object_kib'] >> 10} MiB", row["operation"], *speeds, f"{row['ratio']:.2f}")
    console.print()
    console.print(table)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m demo.bench_lmcache", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each adapter and size (default 3)")
    parser.add_argument("--size-kib", type=int, action="append", choices=SIZES_KIB, help="objects of one size only")
    parser.add_argument("--add", action="store_true", help="to the runs that --json holds: a measurement in parts")
    parser.add_argument("--json", type=Path, default=Path("bench-lmcache.json"), help="default bench-lmcache.json")
    parser.add_argument("--docs", action="store_true", help=f"also write docs/{PAGE.name}")
    options = parser.parse_args(arguments)
    console = make_console()
    start = time.monotonic()

    def say(line: str) -> None:
        console.print(f"[dim]{time.monotonic() - start:5.0f} s[/]  {line}")

    try:
        LOGS.mkdir(parents=True, exist_ok=True)
        measured = earlier(options.json) if options.add else []
        sizes_kib = options.size_kib or SIZES_KIB
        measured += run(ensure_engine("lmcache_cpu", say), sizes_kib, options.repeats, say)
        rows = medians(measured)
    except (EngineSetupError, ServerError, OSError, AssertionError, subprocess.TimeoutExpired) as error:
        console.print(f"[red]error:[/] {type(error).__name__}: ", end="")
        console.print(str(error), markup=False)
        return 2
    show(console, rows)
    passed = all(row["ratio"] >= MIN_RATIO for row in rows)
    console.print(f"\n  {'[green]pass[/]' if passed else '[red]fail[/]'}  at least {MIN_RATIO} of resp in every row")
    runs = [asdict(each) for each in measured]
    options.json.write_text(json.dumps({"passed": passed, "rows": rows, "runs": runs}, indent=1) + "\n")
    if options.docs:
        repeats = sum((each.adapter, each.object_kib) == ("dfkv", rows[0]["object_kib"]) for each in measured)
        PAGE.write_text(page(rows, repeats))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
