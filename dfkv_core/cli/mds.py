"""`dfkv mds`: the membership service."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from dfkv_core.cli.node_options import (
    HostOption,
    InsecureOption,
    MetricsPortOption,
    SecretFileOption,
)
from dfkv_core.cli.output import CommandError, ConfigFileOption, JsonOption, log_to_standard_error, print_json
from dfkv_core.cli.serve import STOP_SIGNALS, seconds_since_process_start

if TYPE_CHECKING:
    from dfkv_core.config import MdsConfig


def mds(
    etcd: Annotated[
        list[str] | None,
        typer.Option("--etcd", metavar="HOST:PORT", help="A member of the etcd cluster; may be repeated."),
    ] = None,
    group: Annotated[str | None, typer.Option(help="Group of nodes to keep (default: default).")] = None,
    host: HostOption = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (default 7441; 0 takes a free one).")] = None,
    secret_file: SecretFileOption = None,
    insecure: InsecureOption = None,
    ttl: Annotated[
        int | None, typer.Option(metavar="SECONDS", help="A silent node is gone after this (default 30).")
    ] = None,
    metrics_port: MetricsPortOption = None,
    config: ConfigFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a membership service until SIGTERM or SIGINT.

    It keeps nothing itself: run as many as you like before one etcd, and
    name them all to nodes and engines.

    \b
    Examples:
      dfkv mds --etcd 127.0.0.1:2379
      dfkv mds --etcd etcd-1:2379 --etcd etcd-2:2379 --etcd etcd-3:2379
          --host 10.0.0.2 --secret-file /etc/dfkv/secret --group prod
    """
    from dfkv_core.config import MdsConfig, load_config, read_secret

    flags = {
        "etcd": etcd or None,
        "group": group,
        "host": host,
        "port": port,
        "secret_file": secret_file,
        "insecure": insecure,
        "ttl_s": ttl,
        "metrics_port": metrics_port,
    }
    loaded = load_config(MdsConfig, flags=flags, file=config)
    print(loaded.summary(), file=sys.stderr, flush=True)
    asyncio.run(_serve(loaded.value, read_secret(loaded.value.secret_file), as_json))


async def _serve(config: MdsConfig, secret: bytes | None, as_json: bool) -> None:
    from dfkv_core.config_values import split_address

    try:
        from dfkv_core.mds.etcd import EtcdStore
    except ImportError as error:
        raise CommandError(f"no client for etcd: {error}", "pip install 'dfkv[etcd]'") from None
    from dfkv_core.mds.service import MembershipService
    from dfkv_core.metrics import MetricsServer
    from dfkv_core.metrics_table import MDS_TABLE

    log_to_standard_error()
    store = EtcdStore([split_address(address) for address in config.etcd], config.group)
    service = MembershipService(config, store, secret)
    try:
        address = await service.start()
    except OSError as error:
        await service.stop()
        raise _address_taken("listen on", config.host, config.port, error, "choose another --host or --port") from None
    metrics = None
    if config.metrics_port is not None:
        info = {"replica_id": service.replica_id, "group": config.group}
        try:
            metrics = MetricsServer(service.stats, config.metrics_host, config.metrics_port, table=MDS_TABLE, info=info)
        except OSError as error:
            await service.stop()
            hint = "choose another --metrics-port"
            raise _address_taken("serve metrics on", config.metrics_host, config.metrics_port, error, hint) from None
    ready = {
        "event": "ready",
        "address": address,
        "group": config.group,
        "etcd": list(config.etcd),
        "metrics_address": metrics.address if metrics is not None else None,
        "ready_s": seconds_since_process_start(),
        "pid": os.getpid(),
    }
    if as_json:
        print_json(ready)
    else:
        members = ", ".join(config.etcd)
        told = f", metrics on {metrics.address}" if metrics is not None else ""
        print(
            f"dfkv mds ready on {address}, group {config.group}, etcd {members} (pid {os.getpid()}{told})", flush=True
        )
    received = await _signal()
    if metrics is not None:
        metrics.close()
    await service.stop()
    if as_json:
        print_json({"event": "stopped", "signal": received.name, "counters": service.counters})
    else:
        print(f"dfkv mds stopped on {received.name}", flush=True)


async def _signal() -> signal.Signals:
    loop = asyncio.get_running_loop()
    came: asyncio.Future[signal.Signals] = loop.create_future()

    def take(number: signal.Signals) -> None:
        if not came.done():
            came.set_result(number)

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, take, number)
    return await came


def _address_taken(what: str, host: str, port: int, error: OSError, hint: str) -> CommandError:
    from dfkv_core.config_values import join_address

    return CommandError(f"cannot {what} {join_address(host, port)}: {error.strerror or error}", hint)
