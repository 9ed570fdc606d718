"""`dfkv bench`: put, get and exists over the wire, next to what plain TCP gives on the same machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dfkv_core.cli.output import CommandError, JsonOption, print_json, print_table

if TYPE_CHECKING:
    from dfkv_core.bench.rows import Row
    from dfkv_core.bench.wire import Report


class Transport(str, Enum):
    TCP = "tcp"


def wire(
    context: typer.Context,
    quick: Annotated[
        bool, typer.Option("--quick", help="64 KiB and 1 MiB, one node, one thread: under a minute.")
    ] = False,
    transport: Annotated[Transport, typer.Option(help="How the bytes travel.")] = Transport.TCP,
    address: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT", help="A node that runs already; repeatable (default: nodes of its own)."),
    ] = None,
    secret_file: Annotated[Path | None, typer.Option(metavar="FILE", help="The secret of those nodes.")] = None,
    repeats: Annotated[int, typer.Option(min=1, max=100, help="Of each case; medians are shown.")] = 5,
    batch: Annotated[int, typer.Option(min=1, max=1024, help="Objects of one operation.")] = 64,
    connections: Annotated[int, typer.Option(min=1, max=64, help="Bulk connections to a node.")] = 2,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="Where to measure disks (default: the temporary directory)."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure put, get and exists over the wire, or the storage below.

    Nodes are started on loopback for the time of the measurement, unless
    --address names some that run. The ceiling is iperf3 with as many
    streams, measured in turns with dfkv, and fio for what is on a disk
    (cold; without --quick). Checksums are on, as always.

    \b
    Examples:
      dfkv bench --quick
      dfkv bench --json > wire.json
      dfkv bench --quick --address 10.0.0.5:7440 --secret-file /etc/dfkv/secret
      dfkv bench store --dir /nvme0
    """
    if context.invoked_subcommand is not None:
        return
    from dfkv_core.bench.ceilings import CeilingError
    from dfkv_core.bench.nodes import NodeStartError
    from dfkv_core.bench.wire import Plan, measure
    from dfkv_core.bench.workload import OperationFailedError
    from dfkv_core.config import read_secret

    plan = replace(
        Plan.quick() if quick else Plan(),
        repeats=repeats,
        batch=batch,
        connections=connections,
        directory=directory,
        addresses=tuple(address or ()),
        secret=read_secret(secret_file),
    )
    try:
        with _progress(transport.value) as tell:
            report = measure(plan, tell)
    except CeilingError as error:
        raise CommandError(error.message, error.hint) from None
    except NodeStartError as error:
        raise CommandError(str(error), "`dfkv doctor` looks at this machine") from None
    except (OperationFailedError, ConnectionError) as error:
        raise CommandError(str(error), "do the nodes run, and have they room? `dfkv stat` tells") from None
    except ValueError as error:
        raise CommandError(str(error), "give addresses as HOST:PORT") from None
    if as_json:
        print_json(report.as_dict())
    else:
        _show(report)


@contextlib.contextmanager
def _progress(transport: str) -> Iterator[Callable[[str], None]]:
    """One line that changes, on a terminal; nothing elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status(f"measuring {transport}") as status:
        yield lambda what: status.update(f"measuring {transport}: {what}")


def _show(report: Report) -> None:
    columns = (
        "op",
        "size",
        "batch",
        "threads",
        "nodes",
        "GB/s",
        "ceiling GB/s",
        "ratio",
        "p50 us",
        "p99 us",
        "CPU s/GB client",
        "node",
    )
    print_table("", columns, [_cells(row) for row in report.rows], right=range(1, len(columns)))
    print(
        f"\nceiling: iperf3 over loopback in the same run, fio for what is cold; "
        f"one core copies memory at {report.memcpy_gb_per_s:.2f} GB/s"
    )
    for what in report.left_out:
        print(f"left out: {what}")
    print(
        f"p50 and p99 are of whole batches; a batch takes the GIL {report.gil_acquisitions_per_batch:.2f} times and holds it "
        f"{report.gil_held_us_per_batch:.0f} us; copied in user space: "
        f"{_share(report.client_copied_bytes, report.payload_bytes)} of the payload by the client, "
        f"{_share(report.node_copied_bytes, report.payload_bytes)} by the nodes"
    )


def _cells(row: Row) -> tuple[str, ...]:
    size = f"{row.size_bytes >> 10} KiB" if row.size_bytes < 1 << 20 else f"{row.size_bytes >> 20} MiB"
    return (
        row.op if row.case == "hot" else f"{row.op}, {row.case}",
        "-" if row.op == "exists" else size,
        str(row.batch),
        str(row.threads),
        str(row.nodes),
        *("-" if value is None else f"{value:.2f}" for value in (row.gb_per_s, row.ceiling_gb_per_s, row.ratio)),
        f"{row.p50_us:,.0f}",
        f"{row.p99_us:,.0f}",
        *("-" if value is None else f"{value:.2f}" for value in (row.client_cpu_s_per_gb, row.node_cpu_s_per_gb)),
    )


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
