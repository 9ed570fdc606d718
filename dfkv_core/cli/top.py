"""`dfkv top`: what the nodes are doing now."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from dfkv_core.cli.connect import DEFAULT_DEADLINE_MS, DeadlineOption, NodeOption, SecretOption, Session, connect
from dfkv_core.cli.output import ConfigFileOption, JsonOption, build_table, print_json

_COLUMNS = ("node", "used", "objects", "gets/s", "hits", "puts/s", "out/s", "in/s", "evicted/s", "clients")


def top(
    interval: Annotated[float, typer.Option("--interval", "-i", min=0.1, help="Seconds between two looks.")] = 1.0,
    count: Annotated[int | None, typer.Option("--count", "-c", min=1, help="Stop after this many looks.")] = None,
    node: NodeOption = None,
    secret_file: SecretOption = None,
    deadline_ms: DeadlineOption = DEFAULT_DEADLINE_MS,
    config: ConfigFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Watch the nodes: requests, hits and bytes per second, until Ctrl-C.

    With --json it prints one line for each look.

    \b
    Examples:
      dfkv top
      dfkv top --interval 5 --node 10.0.0.2:7441
      dfkv top --count 1 --json
    """
    from rich.console import Console
    from rich.live import Live

    with connect(node, secret_file, config, deadline_ms) as session:
        try:
            if as_json:
                for rates in _looks(session, interval, count):
                    print_json({"nodes": rates})
                return
            console = Console(highlight=False, markup=False)
            with Live(console=console, auto_refresh=False, transient=False) as live:
                for rates in _looks(session, interval, count):
                    table = build_table("", _COLUMNS, map(_row, rates), right=range(1, len(_COLUMNS)))
                    live.update(table, refresh=True)
        except KeyboardInterrupt:
            return


def _looks(session: Session, interval_s: float, count: int | None) -> Any:
    before, at = _counters(session), time.monotonic()
    while count is None or count > 0:
        time.sleep(interval_s)
        now, seen_at = _counters(session), time.monotonic()
        yield [rates(node_id, before.get(node_id), stats, seen_at - at) for node_id, stats in now.items()]
        before, at = now, seen_at
        count = None if count is None else count - 1


def _counters(session: Session) -> dict[str, Mapping[str, int] | None]:
    return {answer.node_id: answer.value for answer in session.ask(session.client.stat(session.deadline_ms))}


def rates(
    node_id: str, before: Mapping[str, int] | None, after: Mapping[str, int] | None, seconds: float
) -> dict[str, Any]:
    """One node's line. after None: it did not answer. A counter that fell belongs to a new start, and counts from 0."""
    if after is None:
        return {"node_id": node_id, "answers": False}

    def grown(*keys: str) -> float:
        total = 0
        for key in keys:
            old = (before or {}).get(key, 0)
            new = after.get(key, 0)
            total += new - old if new >= old else new
        return total / seconds

    got = [key for key in after if key.startswith("items_get_")]
    put = [key for key in after if key.startswith("items_put_")]
    gets, hits = grown(*got), grown("items_get_ok")
    return {
        "node_id": node_id,
        "answers": True,
        "used_bytes": after.get("used_bytes", 0),
        "capacity_bytes": after.get("capacity_bytes", 0),
        "objects": after.get("objects", 0),
        "gets_per_s": round(gets, 3),
        "hit_ratio": round(hits / gets, 4) if gets else None,
        "puts_per_s": round(grown(*put), 3),
        "payload_out_bytes_per_s": round(grown("payload_bytes_out")),
        "payload_in_bytes_per_s": round(grown("payload_bytes_in")),
        "evicted_per_s": round(grown("evicted_objects"), 3),
        "connections": after.get("connections_open", 0),
    }


def _row(line: Mapping[str, Any]) -> list[str]:
    from dfkv_core.config_values import format_size

    if not line["answers"]:
        return [line["node_id"], "no answer", *[""] * (len(_COLUMNS) - 2)]
    used = line["used_bytes"] / line["capacity_bytes"] if line["capacity_bytes"] else 0
    return [
        line["node_id"],
        f"{used:.0%}",
        f"{line['objects']:,}",
        f"{line['gets_per_s']:,.0f}",
        "-" if line["hit_ratio"] is None else f"{line['hit_ratio']:.0%}",
        f"{line['puts_per_s']:,.0f}",
        format_size(line["payload_out_bytes_per_s"]),
        format_size(line["payload_in_bytes_per_s"]),
        f"{line['evicted_per_s']:,.0f}",
        f"{line['connections']:,}",
    ]
