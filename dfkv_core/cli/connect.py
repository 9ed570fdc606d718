"""How commands reach the nodes: options, one client per command, and answers per node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dfkv_core.cli.output import CommandError

if TYPE_CHECKING:
    from dfkv_core import _native
    from dfkv_core.membership.wire import Opcode

NodeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--node",
        "-n",
        metavar="HOST:PORT",
        help="A node or membership service to ask; may be repeated (default: client.addresses).",
    ),
]
SecretOption = Annotated[
    Path | None, typer.Option("--secret-file", metavar="FILE", help="Secret shared with the nodes.")
]
DeadlineOption = Annotated[float, typer.Option("--deadline-ms", min=1, help="Longest time to wait for an answer.")]
DEFAULT_DEADLINE_MS = 5000.0
CONNECT_PATIENCE_MS = 2000.0


@dataclass(frozen=True)
class Answer:
    """What one node said. value: counters (stat), namespaces (list), objects gone (erase), microseconds (ping)."""

    node_id: str
    status: str
    value: Any


@dataclass(frozen=True)
class Session:
    """A connected client and the time that one operation of the command may take."""

    client: _native.Client
    addresses: tuple[str, ...]
    deadline_ms: float

    def ask(self, operation: _native.Operation) -> list[Answer]:
        """Waits for an operation that goes to every node. Raises CommandError when no node gave an answer."""
        from dfkv_core import _native

        self.finish(operation)
        # One status per node, in the order of the result.
        codes = memoryview(operation.statuses()).cast("H")
        answers = [
            Answer(node_id, _native.status_name(code), value)
            for (node_id, value), code in zip(operation.result.items(), codes, strict=True)
        ]
        if not any(answer.status == "ok" for answer in answers):
            reasons = ", ".join(f"{answer.node_id or '?'}: {answer.status}" for answer in answers) or "no node"
            raise CommandError(f"no answer to {operation.kind} ({reasons})", self.hint())
        return answers

    def finish(self, operation: _native.Operation) -> None:
        """Waits until an operation is over. Its own deadline ends it; the slack is for the client's bookkeeping."""
        if not operation.wait(self.deadline_ms + 1000):
            operation.cancel()

    def hint(self) -> str:
        return f"check {', '.join(self.addresses)} with `dfkv ping`, or wait longer with --deadline-ms"


@contextmanager
def connect(
    nodes: list[str] | None, secret_file: Path | None, config_file: Path | None, deadline_ms: float
) -> Iterator[Session]:
    """A session with the configured nodes. Raises ConfigError, and CommandError when none of them can be reached."""
    from dfkv_core.config import ClientConfig, load_config

    flags = {"addresses": nodes or None, "secret_file": secret_file}
    config = load_config(ClientConfig, flags=flags, file=config_file).value
    secret = config.read_secret()
    from dfkv_core import _native

    client = _native.Client(
        config.seeds,
        name=config.effective_name(),
        secret=secret,
        connections_per_node=1,
        connect_timeout_ms=config.connect_timeout_ms,
        last_view_path=config.last_view_path,
        group=config.group,
    )
    try:
        patience_ms = min(deadline_ms, CONNECT_PATIENCE_MS)
        if not client.wait_ready(patience_ms):
            raise _unreachable(client, config.addresses, patience_ms)
        yield Session(client, config.addresses, deadline_ms)
    finally:
        client.close()


def ask_service(
    nodes: list[str] | None,
    secret_file: Path | None,
    config_file: Path | None,
    deadline_ms: float,
    opcode: Opcode,
    payload: bytes = b"",
) -> bytes:
    """One request to the first of the configured addresses that is a membership service. Raises CommandError."""
    import asyncio

    from dfkv_core.config import ClientConfig, load_config
    from dfkv_core.config_values import join_address
    from dfkv_core.keys import Status
    from dfkv_core.membership.wire import Connection, RefusedError, WireError

    config = load_config(
        ClientConfig, flags={"addresses": nodes or None, "secret_file": secret_file}, file=config_file
    ).value
    secret = config.read_secret()

    async def ask(host: str, port: int) -> bytes:
        connection = await Connection.open(
            host, port, secret=secret, group=config.group, timeout_s=CONNECT_PATIENCE_MS / 1000
        )
        try:
            return (await connection.ask(opcode, {}, payload, timeout_s=deadline_ms / 1000)).payload
        finally:
            await connection.close()

    failures = []
    for host, port in config.seeds:
        try:
            return asyncio.run(ask(host, port))
        except RefusedError as error:
            if error.status == Status.MISS_NOT_FOUND:
                raise CommandError(error.reason, "`dfkv ring` lists the nodes") from None
            known = error.status == Status.REFUSED_UNSUPPORTED
            failures.append(f"{join_address(host, port)}: {'a cache node' if known else error.reason}")
        except WireError as error:
            failures.append(f"{join_address(host, port)}: {error}")
    hint = "name one (`dfkv mds`) with --node HOST:PORT or client.addresses"
    raise CommandError(f"no membership service answered ({'; '.join(failures)})", hint)


def _unreachable(client: _native.Client, addresses: tuple[str, ...], patience_ms: float) -> CommandError:
    """What the client found at the addresses, and what to do about it."""
    errors = [node["last_error"] for node in client.stats()["nodes"] if node["last_error"]]
    found = "; ".join(errors) or f"no answer from {', '.join(addresses)}"
    if "secret" in found:
        hint = "name the file that the node was started with: --secret-file FILE"
    else:
        hint = "start a node with `dfkv serve`, or name one with --node HOST:PORT"
    return CommandError(f"no node could be reached in {patience_ms:.0f} ms: {found}", hint)
