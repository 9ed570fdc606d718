"""`dfkv stat`, `dfkv ls` and `dfkv ping`: looking at running nodes."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from dfkv_core.cli.connect import DEFAULT_DEADLINE_MS, DeadlineOption, NodeOption, SecretOption, connect
from dfkv_core.cli.namespaces import Namespace, merge, resolve
from dfkv_core.cli.output import ConfigFileOption, JsonOption, format_age, print_json, print_table


def stat(
    everything: Annotated[bool, typer.Option("--all", "-a", help="Show counters that are zero too.")] = False,
    node: NodeOption = None,
    secret_file: SecretOption = None,
    deadline_ms: DeadlineOption = DEFAULT_DEADLINE_MS,
    config: ConfigFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the counters and gauges of each node.

    \b
    Examples:
      dfkv stat
      dfkv stat --all --node 10.0.0.5:7440
      dfkv stat --json | jq '.nodes[].stats.objects'
    """
    with connect(node, secret_file, config, deadline_ms) as session:
        answers = session.ask(session.client.stat(deadline_ms))
    if as_json:
        print_json({"nodes": [{"node_id": a.node_id, "status": a.status, "stats": a.value} for a in answers]})
        return
    tables: list[dict[str, int]] = [answer.value or {} for answer in answers]
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = [
        [key, *(_number(key, table.get(key)) for table in tables)]
        for key in keys
        if everything or any(table.get(key) for table in tables)
    ]
    columns = ["", *(_column(answer.node_id, answer.status) for answer in answers)]
    print_table("", columns, rows, right=range(1, len(columns)))


def _column(node_id: str, status: str) -> str:
    return node_id if status == "ok" else f"{node_id} ({status})"


def _number(key: str, value: int | None) -> str:
    from dfkv_core.config_values import format_size

    if value is None:
        return "-"
    return format_size(value) if "bytes" in key else f"{value:,}"


def ls(
    namespace: Annotated[
        str | None, typer.Argument(help="Show what identifies this one: hex id, the start of one, or a label.")
    ] = None,
    node: NodeOption = None,
    secret_file: SecretOption = None,
    deadline_ms: DeadlineOption = DEFAULT_DEADLINE_MS,
    config: ConfigFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the namespaces that the nodes hold, or show the fields of one.

    A namespace is everything that must be equal for KV to be shared:
    weights, configuration, layout, types.

    \b
    Examples:
      dfkv ls
      dfkv ls 3f9a
      dfkv ls --json | jq -r '.namespaces[] | [.id, .objects] | @tsv'
    """
    with connect(node, secret_file, config, deadline_ms) as session:
        found = merge(session.ask(session.client.list_namespaces(deadline_ms)))
    if namespace is not None:
        _show_one(resolve(namespace, found), as_json)
    elif as_json:
        print_json({"namespaces": [entry.as_dict() for entry in found]})
    elif not found:
        print("no namespaces: no engine has stored anything yet")
    else:
        print_table("", ("namespace", "label", "objects", "stored", "created", "used"), map(_row, found), right=(2, 3))


def _row(entry: Namespace) -> list[str]:
    from dfkv_core.config_values import format_size

    return [
        entry.id.hex(),
        entry.label or "-",
        f"{entry.objects:,}",
        format_size(entry.stored_bytes),
        format_age(entry.created_s),
        format_age(entry.last_used_s),
    ]


def _show_one(entry: Namespace, as_json: bool) -> None:
    fields = entry.fields()
    if as_json:
        print_json({**entry.as_dict(), "fields": fields})
        return
    print_table("", ("field", "value"), [*zip(_SUMMARY, _row(entry), strict=True), *fields.items()])


_SUMMARY = ("namespace", "label", "objects", "stored", "created", "used")


def ping(
    count: Annotated[int, typer.Option("--count", "-c", min=1, max=1000, help="Times to ask.")] = 3,
    node: NodeOption = None,
    secret_file: SecretOption = None,
    deadline_ms: DeadlineOption = DEFAULT_DEADLINE_MS,
    config: ConfigFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check that the nodes answer, and how fast.

    \b
    Examples:
      dfkv ping
      dfkv ping --node 10.0.0.5:7440 --secret-file /etc/dfkv/secret
    """
    times: dict[str, list[float]] = {}
    failures: dict[str, str] = {}
    with connect(node, secret_file, config, deadline_ms) as session:
        for turn in range(count):
            if turn:
                time.sleep(0.05)
            for answer in session.ask(session.client.ping(deadline_ms)):
                if answer.status == "ok":
                    times.setdefault(answer.node_id, []).append(answer.value / 1000)
                else:
                    failures[answer.node_id] = answer.status
    report = [_ping_line(name, times.get(name, []), failures.get(name, "ok")) for name in {**times, **failures}]
    if as_json:
        print_json({"nodes": report})
    else:
        rows = [[line["node_id"], line["status"], *map(_ms, line["round_trip_ms"])] for line in report]
        print_table("", ("node", "status", "best ms", "mean ms", "worst ms"), rows, right=(2, 3, 4))
    if failures:
        raise typer.Exit(1)


def _ping_line(name: str, times_ms: list[float], status: str) -> dict[str, Any]:
    summary = [min(times_ms), sum(times_ms) / len(times_ms), max(times_ms)] if times_ms else []
    return {"node_id": name, "status": status, "round_trip_ms": [round(value, 3) for value in summary]}


def _ms(value: float) -> str:
    return f"{value:.3f}"
