"""`dfkv rm` and `dfkv erase`: taking things out of running nodes."""

from __future__ import annotations

import struct
from typing import Annotated

import typer

from dfkv_core.cli.connect import DEFAULT_DEADLINE_MS, DeadlineOption, NodeOption, SecretOption, Session, connect
from dfkv_core.cli.namespaces import Namespace, merge, of_tenant, resolve
from dfkv_core.cli.output import CommandError, ConfigFileOption, JsonOption, print_json, print_table

ERASE_DEADLINE_MS = 60_000.0  # erasing takes time with the number of objects

NamespaceArgument = Annotated[str, typer.Argument(help="Hex id, the start of one, or a label (`dfkv ls`).")]


def rm(
    namespace: NamespaceArgument,
    blocks: Annotated[list[str], typer.Argument(metavar="BLOCK...", help="Keys of chunks, 32 hex digits each.")],
    node: NodeOption = None,
    secret_file: SecretOption = None,
    deadline_ms: DeadlineOption = DEFAULT_DEADLINE_MS,
    config: ConfigFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove chunks, with all their parts.

    \b
    Examples:
      dfkv rm 3f9a 00112233445566778899aabbccddeeff
    """
    from dfkv_core import _native
    from dfkv_core.keys import ALL_PARTS, route_of

    keys = [_block_id(block) for block in blocks]
    items = b"".join(struct.pack("<16sQQII", key, ALL_PARTS, route_of(key), 0, 0) for key in keys)
    with connect(node, secret_file, config, deadline_ms) as session:
        entry = resolve(namespace, _listing(session))
        operation = session.client.remove(entry.id, items, deadline_ms)
        session.finish(operation)
        codes = struct.unpack(f"<{len(keys)}H", operation.statuses())
    report = {key.hex(): _native.status_name(code) for key, code in zip(keys, codes, strict=True)}
    if as_json:
        print_json({"namespace": entry.id.hex(), "blocks": report})
    else:
        print_table("", ("block", "result"), report.items())
    if any(code >= 200 for code in codes):
        raise typer.Exit(1)


def erase(
    namespace: Annotated[str | None, typer.Argument(help="Hex id, the start of one, or a label (`dfkv ls`).")] = None,
    tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="NAME", help="Erase every namespace of this tenant.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    node: NodeOption = None,
    secret_file: SecretOption = None,
    deadline_ms: DeadlineOption = ERASE_DEADLINE_MS,
    config: ConfigFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Erase every object of a namespace or a tenant, and list again as proof.

    Exits with 1 when a node did not confirm, or when the second listing
    still shows objects.

    \b
    Examples:
      dfkv erase 3f9a
      dfkv erase 3f9a0000111122223333444455556666 --yes --json
      dfkv erase --tenant team-a
    """
    if (namespace is None) == (tenant is None):
        raise CommandError("name either a namespace or a --tenant", "`dfkv ls` lists what there is", 2)
    with connect(node, secret_file, config, deadline_ms) as session:
        known = _listing(session)
        chosen = [resolve(namespace, known)] if namespace is not None else of_tenant(tenant or "", known)
        if not yes and not as_json:
            typer.confirm(_question(chosen), abort=True)
        erased, failed = 0, {}
        for entry in chosen:
            for answer in session.ask(session.client.erase(entry.id, deadline_ms)):
                if answer.status == "ok":
                    erased += answer.value
                else:
                    failed[answer.node_id] = answer.status
        ids = {entry.id for entry in chosen}
        left = sum(entry.objects for entry in _listing(session) if entry.id in ids)
    if as_json:
        named = {"namespace": chosen[0].id.hex()} if tenant is None else {"tenant": tenant}
        listed = [entry.id.hex() for entry in chosen]
        print_json({**named, "namespaces": listed, "erased_objects": erased, "objects_left": left, "failed": failed})
    else:
        what = chosen[0].id.hex() if tenant is None else f"{len(chosen)} namespaces of tenant {tenant!r}"
        print(f"erased {erased:,} objects of {what}; a second listing shows {left:,}")
        for name, status in failed.items():
            print(f"{name} did not confirm: {status}")
    if left or failed:
        raise typer.Exit(1)


def _question(chosen: list[Namespace]) -> str:
    if len(chosen) == 1:
        entry = chosen[0]
        return f"Erase {entry.objects:,} objects of {entry.id.hex()} ({entry.label or 'no label'})?"
    return f"Erase {sum(entry.objects for entry in chosen):,} objects in {len(chosen)} namespaces?"


def _listing(session: Session) -> list[Namespace]:
    return merge(session.ask(session.client.list_namespaces(session.deadline_ms)))


def _block_id(text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != 16:
        raise CommandError(f"{text!r} is no key of a chunk", "it has 32 hex digits", 2)
    return key
