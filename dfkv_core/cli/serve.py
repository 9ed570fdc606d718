"""`dfkv serve`: one node with an embedded membership, in this process."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dfkv_core.cli.node_options import (
    CapacityOption,
    DirectoriesOption,
    HostOption,
    InsecureOption,
    MetricsPortOption,
    NodeIdOption,
    PortOption,
    RamOption,
    SecretFileOption,
    ThreadsOption,
)
from dfkv_core.cli.output import ConfigFileOption, JsonOption, log_to_standard_error, print_json

if TYPE_CHECKING:
    from dfkv_core.config import NodeConfig
    from dfkv_core.node import CacheNode

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def disk_flags(directories: list[Path] | None, capacity: str | None) -> dict[str, Any]:
    """The flags of a node for what --dir and --capacity gave."""
    return {"dirs": [str(path) for path in directories] if directories else None, "capacity_bytes": capacity}


def serve(
    host: HostOption = None,
    port: PortOption = None,
    ram: RamOption = None,
    directory: DirectoriesOption = None,
    capacity: CapacityOption = None,
    node_id: NodeIdOption = None,
    secret_file: SecretFileOption = None,
    insecure: InsecureOption = None,
    threads: ThreadsOption = None,
    metrics_port: MetricsPortOption = None,
    config: ConfigFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a cache node on this machine until SIGTERM or SIGINT.

    It prints one line when it is ready. Every other setting comes from
    the configuration file or the environment: see `dfkv config node`.

    \b
    Examples:
      dfkv serve
      dfkv serve --ram 64GiB --metrics-port 9740
      dfkv serve --ram 16GiB --dir /nvme0/dfkv --dir /nvme1/dfkv --capacity 1TiB
      dfkv serve --host 10.0.0.5 --secret-file /etc/dfkv/secret
      DFKV_NODE__RAM_BYTES=16GiB dfkv serve --port 0 --json
    """
    flags = {
        "host": host,
        "port": port,
        "ram_bytes": ram,
        **disk_flags(directory, capacity),
        "node_id": node_id,
        "secret_file": secret_file,
        "insecure": insecure,
        "threads": threads,
        "metrics_port": metrics_port,
    }
    run_node(flags, config, as_json)


def run_node(flags: dict[str, Any], config: Path | None, as_json: bool) -> None:
    """Runs a node until a signal; `flags` are those that were given."""
    # Blocked before any thread exists, so that every thread inherits it and a signal waits for sigwait().
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    from dfkv_core.config import NodeConfig, load_config
    from dfkv_core.node import CacheNode

    loaded = load_config(NodeConfig, flags=flags, file=config)
    print(loaded.summary(), file=sys.stderr, flush=True)
    log_to_standard_error()
    node = CacheNode(loaded.value)
    node.start()
    announce(_ready_event(node, loaded.value), as_json)
    received = signal.sigwait(STOP_SIGNALS)
    started = time.monotonic()
    clean = node.stop()
    announce(
        {
            "event": "stopped",
            "signal": signal.Signals(received).name,
            "clean": clean,
            "stop_s": round(time.monotonic() - started, 3),
        },
        as_json,
    )
    raise typer.Exit(0 if clean else 1)


def _ready_event(node: CacheNode, config: NodeConfig) -> dict[str, Any]:
    found = node.recovery()
    return {
        "event": "ready",
        "node_id": node.node_id,
        "address": node.address,
        "port": node.port,
        "metrics_address": node.metrics_address,
        "ram_bytes": config.ram_bytes,
        "disk_bytes": len(config.dirs) * (config.capacity_bytes or 0),
        "disk_objects": sum(entry["objects"] for entry in found),
        "ready_s": seconds_since_process_start(),
        "pid": os.getpid(),
    }


def announce(event: dict[str, Any], as_json: bool) -> None:
    """One line for the start or the end of a node."""
    from dfkv_core.config_values import format_size

    if as_json:
        print_json(event)
    elif event["event"] == "ready":
        metrics = f", metrics on {event['metrics_address']}" if event["metrics_address"] else ""
        disk = f", {format_size(event['disk_bytes'])} disk" if event["disk_bytes"] else ""
        held = f" with {event['disk_objects']:,} objects" if event["disk_objects"] else ""
        print(
            f"dfkv node {event['node_id']} ready on {event['address']} in {event['ready_s']:.2f} s "
            f"({format_size(event['ram_bytes'])} RAM{disk}{held}, pid {event['pid']}{metrics})",
            flush=True,
        )
    else:
        how = "cleanly" if event["clean"] else "with threads still running"
        print(f"dfkv node stopped {how} on {event['signal']} in {event['stop_s']:.2f} s", flush=True)


def seconds_since_process_start() -> float:
    """Since the kernel made this process, so that the interpreter's start and imports count (10 ms steps)."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return round(max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s), 3)
