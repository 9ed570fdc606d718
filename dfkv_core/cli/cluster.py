"""`dfkv ring`, `dfkv clients` and `dfkv drain`: the cluster as its members see it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dfkv_core.cli.connect import (
    DEFAULT_DEADLINE_MS,
    DeadlineOption,
    NodeOption,
    SecretOption,
    Session,
    ask_service,
    connect,
)
from dfkv_core.cli.output import CommandError, ConfigFileOption, JsonOption, format_age, print_json, print_table

if TYPE_CHECKING:
    from dfkv_core.membership.view import NodeEntry, View


def ring(
    node: NodeOption = None,
    secret_file: SecretOption = None,
    deadline_ms: DeadlineOption = DEFAULT_DEADLINE_MS,
    config: ConfigFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the nodes of the cluster, and which share of the keys each owns.

    Reads and writes have rings of their own: a draining node is still
    read, and not written. Exits with 1 when a node in use does not answer.

    \b
    Examples:
      dfkv ring
      dfkv ring --node 10.0.0.2:7441
      dfkv ring --json | jq -r '.nodes[] | [.id, .state, .read_share] | @tsv'
    """
    from dfkv_core.membership.view import NodeState, View

    with connect(node, secret_file, config, deadline_ms) as session:
        encoded = session.client.view()
        assert encoded is not None  # connect() waited for it
        view = View.decode(encoded)
        answers = _answers(session)
    rows = _nodes(view, answers)
    silent = [row["id"] for row in rows if row["state"] in ("serving", "draining") and row["round_trip_ms"] is None]
    if as_json:
        cluster = {"cluster_id": view.cluster_id.hex(), "revision": view.revision, "rule": view.placement_rule}
        print_json({**cluster, "nodes": rows})
    else:
        states = [node.state for node in view.nodes]
        counts = ", ".join(f"{states.count(state)} {state.name.lower()}" for state in NodeState if state in states)
        print(f"cluster {view.cluster_id.hex()}, revision {view.revision}: {counts}")
        columns = ("node", "state", "weight", "reads", "writes", "address", "zone", "answers")
        print_table("", columns, map(_row, rows), right=(2, 3, 4))
    if silent:
        raise typer.Exit(1)


def _answers(session: Session) -> dict[str, float | None]:
    """Milliseconds to each node and back; None: it did not answer."""
    from dfkv_core import _native

    operation = session.client.ping(min(session.deadline_ms, 2000.0))
    session.finish(operation)
    codes = memoryview(operation.statuses()).cast("H")
    return {
        node_id: round(value / 1000, 3) if _native.status_name(code) == "ok" else None
        for (node_id, value), code in zip(operation.result.items(), codes, strict=True)
    }


def _nodes(view: View, answers: dict[str, float | None]) -> list[dict[str, Any]]:
    from dfkv_core.membership.view import NodeState

    reads = _shares([(n.id, n.read_weight * (n.state in (NodeState.SERVING, NodeState.DRAINING))) for n in view.nodes])
    writes = _shares([(n.id, n.write_weight * (n.state == NodeState.SERVING)) for n in view.nodes])

    def one(entry: NodeEntry) -> dict[str, Any]:
        return {
            "id": entry.id,
            "state": entry.state.name.lower(),
            "read_weight": entry.read_weight,
            "write_weight": entry.write_weight,
            "read_share": round(reads[entry.id], 6),
            "write_share": round(writes[entry.id], 6),
            "addresses": list(entry.tcp),
            "zone": entry.zone,
            "incarnation": entry.incarnation,
            "round_trip_ms": answers.get(entry.id),
        }

    return [one(entry) for entry in view.nodes]


def _shares(weights: list[tuple[str, int]]) -> dict[str, float]:
    from dfkv_core import _native

    if not any(weight for _, weight in weights):
        return {node_id: 0.0 for node_id, _ in weights}
    counts = _native.Ring([node_id for node_id, _ in weights], [weight for _, weight in weights]).counts()
    total = sum(counts)
    return {node_id: count / total for (node_id, _), count in zip(weights, counts, strict=True)}


def _row(node: dict[str, Any]) -> list[str]:
    used = node["state"] in ("serving", "draining")
    answer = "-" if not used else "no" if node["round_trip_ms"] is None else f"{node['round_trip_ms']:.1f} ms"
    return [
        node["id"],
        node["state"],
        f"{node['read_weight']}",
        f"{node['read_share']:.1%}",
        f"{node['write_share']:.1%}",
        ", ".join(node["addresses"]),
        node["zone"] or "-",
        answer,
    ]


def clients(
    node: NodeOption = None,
    secret_file: SecretOption = None,
    deadline_ms: DeadlineOption = DEFAULT_DEADLINE_MS,
    config: ConfigFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """List who uses the cache: the clients of every membership service.

    \b
    Examples:
      dfkv clients
      dfkv clients --node 10.0.0.2:7441 --json
    """
    from dfkv_core.membership.packing import unpack
    from dfkv_core.membership.wire import Opcode

    reply = ask_service(node, secret_file, config, deadline_ms, Opcode.CONSUMERS)
    found = [{"name": one[1], "address": one[2], "since_s": one[3]} for one in unpack(reply)]
    if as_json:
        print_json({"clients": found})
    elif not found:
        print("no clients: no engine follows these membership services (a new one is listed after a few seconds)")
    else:
        rows = [(one["name"], one["address"], format_age(one["since_s"])) for one in found]
        print_table("", ("client", "address", "for"), rows)


def drain(
    target: Annotated[str, typer.Argument(metavar="NODE", help="Id of the node (`dfkv ring`).")],
    undo: Annotated[bool, typer.Option("--undo", help="Let it be written again.")] = False,
    node: NodeOption = None,
    secret_file: SecretOption = None,
    deadline_ms: DeadlineOption = DEFAULT_DEADLINE_MS,
    config: ConfigFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Prepare a node for leaving: it is still read, and no longer written.

    Its keys go to other nodes as they are stored again; stop it once what
    it holds is no longer worth the wait. It lasts until the node restarts.

    \b
    Examples:
      dfkv drain cache-7
      dfkv drain cache-7 --undo
    """
    from dfkv_core.membership.packing import pack
    from dfkv_core.membership.wire import Opcode

    wish = {1: target, 2: True} if undo else {1: target}
    ask_service(node, secret_file, config, deadline_ms, Opcode.DRAIN, pack(wish))
    wanted = ("serving",) if undo else ("draining", "gone")
    state = _await_state(target, wanted, node, secret_file, config, deadline_ms)
    if as_json:
        print_json({"node": target, "state": state})
    else:
        print(f"{target} is {state}")
    if state not in wanted:
        raise CommandError(f"{target} is still {state}", "`dfkv ring` shows when the view has changed")


def _await_state(
    node_id: str,
    wanted: tuple[str, ...],
    node: NodeOption,
    secret_file: SecretOption,
    config: ConfigFileOption,
    deadline_ms: float,
) -> str:
    from dfkv_core.membership.view import View

    until = time.monotonic() + deadline_ms / 1000
    with connect(node, secret_file, config, deadline_ms) as session:
        while True:
            view = View.decode(session.client.view() or b"")
            state = next((entry.state.name.lower() for entry in view.nodes if entry.id == node_id), "gone")
            if state in wanted or time.monotonic() > until:
                return state
            time.sleep(0.05)
