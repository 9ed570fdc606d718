"""`dfkv node`: one node of a cluster that a membership service keeps together."""

from __future__ import annotations

from typing import Annotated

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
from dfkv_core.cli.output import ConfigFileOption, JsonOption
from dfkv_core.cli.serve import disk_flags, run_node


def node(
    mds: Annotated[
        list[str] | None,
        typer.Option("--mds", metavar="HOST:PORT", help="A membership service (`dfkv mds`); may be repeated."),
    ] = None,
    group: Annotated[str | None, typer.Option(help="Group of nodes to join (default: default).")] = None,
    host: HostOption = None,
    port: PortOption = None,
    advertise: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Address that others are told (default: the one listened on)."),
    ] = None,
    ram: RamOption = None,
    directory: DirectoriesOption = None,
    capacity: CapacityOption = None,
    weight: Annotated[
        int | None, typer.Option(help="Share of the keys, relative to other nodes' (default 100).")
    ] = None,
    zone: Annotated[str | None, typer.Option(help="Where the node is, shown by `dfkv ring`.")] = None,
    node_id: NodeIdOption = None,
    secret_file: SecretFileOption = None,
    insecure: InsecureOption = None,
    threads: ThreadsOption = None,
    metrics_port: MetricsPortOption = None,
    config: ConfigFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a node of a cluster until SIGTERM or SIGINT.

    It registers with a membership service, and is ready once it has seen
    the cluster. Without --mds (or node.mds) it is `dfkv serve`.

    \b
    Examples:
      dfkv node --mds 10.0.0.2:7441 --mds 10.0.0.3:7441 --host 10.0.0.5
          --secret-file /etc/dfkv/secret --ram 64GiB
      dfkv node --mds 10.0.0.2:7441 --dir /nvme0/dfkv --capacity 1TiB
      dfkv node --mds 127.0.0.1:7441 --port 0 --weight 200
    """
    flags = {
        "mds": mds or None,
        "group": group,
        "host": host,
        "port": port,
        "advertise": advertise,
        "ram_bytes": ram,
        **disk_flags(directory, capacity),
        "weight": weight,
        "zone": zone,
        "node_id": node_id,
        "secret_file": secret_file,
        "insecure": insecure,
        "threads": threads,
        "metrics_port": metrics_port,
    }
    run_node(flags, config, as_json)
