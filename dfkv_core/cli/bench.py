"""`dfkv bench recover` and `dfkv bench store`: what the storage of this machine gives, next to its ceiling."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from dfkv_core.bench.ceilings import CeilingError, disk_speed
from dfkv_core.bounded import parse_json
from dfkv_core.cli.bench_wire import wire
from dfkv_core.cli.output import CommandError, JsonOption, print_json, print_table

app = typer.Typer()
app.callback(invoke_without_command=True)(wire)
DirectoryOption = Annotated[
    Path | None, typer.Option("--dir", metavar="DIR", help="Where to measure (default: the temporary directory).")
]
FILL_DEADLINE_S = 900


@app.command("recover")
def recover(
    objects: Annotated[int, typer.Option(min=1000, max=10_000_000, help="Objects in the table.")] = 1_000_000,
    directory: DirectoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how fast a node finds its objects again after a crash.

    A store writes the table, which is then dropped from the page cache
    and read by a new process. The payload is left out.

    \b
    Examples:
      dfkv bench recover
      dfkv bench recover --dir /nvme0 --json
    """
    with _scratch(directory) as folder:
        object_bytes = 32 * 1024
        _in_process("bench_fill_table", folder, objects, object_bytes)
        for file in folder.iterdir():
            _drop_from_page_cache(file)
        found = _in_process("bench_recover_table", folder, objects, object_bytes)
    report = {
        "objects": found["objects"],
        "seconds": round(found["seconds"], 3),
        "index_bytes_per_object": round(found["index_bytes"] / max(found["objects"], 1), 1),
        "table_bytes": found["table_bytes"],
    }
    if as_json:
        print_json(report)
    else:
        print_table("", ("measured", "value"), [(name, f"{value:,}") for name, value in report.items()], right=(1,))


@app.command("store")
def store(
    directory: DirectoryOption = None,
    total_mib: Annotated[int, typer.Option(min=64, max=1 << 20, help="MiB moved by each run.")] = 1024,
    depth: Annotated[int, typer.Option(min=1, max=64, help="Operations under way at once.")] = 4,
    pairs: Annotated[int, typer.Option(min=1, max=50, help="Runs of the store and of fio, in turns.")] = 5,
    as_json: JsonOption = False,
) -> None:
    """Measure the store's disk tier next to fio, in turns, in one directory.

    get: objects that are on disk only. put: new objects into a full
    store, which evicts all the while. The ceiling is fio with the same
    block size and depth, past the page cache. Medians of the pairs.

    \b
    Examples:
      dfkv bench store --dir /nvme0
      dfkv bench store --dir /nvme0 --depth 16 --json
    """
    rows = []
    try:
        for size_mib in (1, 4):
            with _scratch(directory) as folder:
                rows += list(_measure(folder, size_mib << 20, total_mib << 20, depth, pairs))
    except CeilingError as error:
        raise CommandError(error.message, error.hint) from None
    if as_json:
        print_json({"rows": rows})
        return
    columns = ("case", "op", "size", "GB/s", "fio GB/s", "ratio", "p50 us", "p99 us", "p99/p50 to fio's")
    table = [
        (
            row["case"],
            row["op"],
            f"{row['size_bytes'] >> 20} MiB",
            f"{row['gb_per_s']:.2f}",
            f"{row['ceiling_gb_per_s']:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['p50_us']:.0f}",
            f"{row['p99_us']:.0f}",
            f"{row['tail_ratio']:.2f}",
        )
        for row in rows
    ]
    print_table("", columns, table, right=range(2, 9))


def _measure(folder: Path, size_bytes: int, total_bytes: int, depth: int, pairs: int) -> Iterator[dict[str, Any]]:
    from dfkv_core import _native

    count = total_bytes // size_bytes
    home = folder / "store"
    home.mkdir()
    bench = _native.StoreBench(str(home), size_bytes, count, depth)
    bench.run("put", count + count // 4)  # full, and evicting
    block = folder / "fio.dat"
    disk_speed(block, size_bytes, total_bytes, 1, "write")  # laid out, and written once
    for case, op, kind in (("cold", "get", "randread"), ("full", "put", "randwrite")):
        results = []
        for _ in range(pairs):
            ceiling = disk_speed(block, size_bytes, total_bytes, depth, kind)
            ours = bench.run(op, count)
            if ours["failed"]:
                raise CommandError(f"{ours['failed']} of {count} operations failed", "is the disk healthy?")
            speed = ours["bytes"] / ours["seconds"] / 1e9
            tail = ours["p99_us"] / ours["p50_us"] / (ceiling.p99_us / ceiling.p50_us)
            results.append((speed / ceiling.gb_per_s, speed, ceiling.gb_per_s, ours, tail))
        ratio, speed, limit, ours, _ = sorted(results, key=lambda result: result[0])[len(results) // 2]
        yield {
            "case": case,
            "op": op,
            "size_bytes": size_bytes,
            "gb_per_s": round(speed, 3),
            "ceiling_gb_per_s": round(limit, 3),
            "ratio": round(ratio, 3),
            "p50_us": round(ours["p50_us"], 1),
            "p99_us": round(ours["p99_us"], 1),
            "tail_ratio": round(statistics.median(result[4] for result in results), 3),
        }


def _in_process(function: str, folder: Path, objects: int, object_bytes: int) -> Any:
    """The result of a function of the native module in a process of its own, whose memory is that of nothing else."""
    code = (
        "import json, sys; from dfkv_core import _native; "
        f"print(json.dumps(_native.{function}(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))"
    )
    command = [sys.executable, "-c", code, str(folder), str(objects), str(object_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=FILL_DEADLINE_S, check=False)
    if done.returncode:
        raise CommandError(f"{function} failed: {done.stderr.strip().splitlines()[-1:]}", "is there room in --dir?")
    return parse_json(done.stdout)


def _drop_from_page_cache(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


@contextmanager
def _scratch(directory: Path | None) -> Iterator[Path]:
    try:
        with tempfile.TemporaryDirectory(prefix="dfkv-bench-", dir=directory) as folder:
            yield Path(folder)
    except OSError as error:
        raise CommandError(f"cannot measure in {directory}: {error}", "choose another --dir") from None
