"""`dfkv inspect` and `dfkv scrub`: looking at a directory of the disk tier while no node uses it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from dfkv_core.cli.output import CommandError, JsonOption, print_json, print_table

DirectoryArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Directory given to a node as --dir.")]


def inspect(directory: DirectoryArgument, as_json: JsonOption = False) -> None:
    """Show what a directory on disk holds, without starting a node.

    It reads the table of slots and changes nothing. While a node uses the
    directory the numbers are those of some moment.

    \b
    Examples:
      dfkv inspect /nvme0/dfkv
      dfkv inspect /nvme0/dfkv --json | jq .objects_by_slot_bytes
    """
    from dfkv_core import _native
    from dfkv_core.config_values import format_size

    _expect_store(directory)
    try:
        found = _native.inspect_directory(str(directory))
    except ValueError as error:
        raise _unusable(error) from None
    if as_json:
        spaces = [
            {**{key: value for key, value in space.items() if key != "descriptor"}, "id": space["id"].hex()}
            for space in found["namespaces"]
        ]
        print_json({**found, "store": found["store"].hex(), "namespaces": spaces})
        return
    rows = [
        ("node", found["node_id"]),
        ("store", found["store"].hex()),
        ("capacity", f"{format_size(found['capacity_bytes'])} in {found['extents']:,} extents"),
        ("objects", f"{found['objects']:,} ({format_size(found['stored_bytes'])})"),
        ("slots", f"{format_size(found['slot_bytes'])} of live objects"),
        ("quarantined", f"{found['quarantined']:,}"),
        ("damaged records", f"{found['faulty']:,}"),
        ("namespaces.tbl", "sound" if found["namespaces_found"] else "missing or damaged: a start drops every object"),
    ]
    print_table("", ("field", "value"), rows)
    print_table(
        "namespaces",
        ("namespace", "label", "objects", "stored", "erased"),
        [
            (
                space["id"].hex(),
                space["label"] or ("-" if space["known"] else "unknown: dropped at a start"),
                f"{space['objects']:,}",
                format_size(space["stored_bytes"]),
                f"{space['stale_objects']:,}",
            )
            for space in found["namespaces"]
        ],
        right=(2, 3, 4),
    )


def scrub(directory: DirectoryArgument, as_json: JsonOption = False) -> None:
    """Read every object of a directory and compare it with its checksum.

    No node may use the directory meanwhile. What is corrupt is put out of
    use, as a node would do when it is asked for. Exits with 1 when
    something was corrupt or could not be read.

    \b
    Examples:
      dfkv scrub /nvme0/dfkv
      dfkv scrub /nvme0/dfkv --json
    """
    from dfkv_core import _native
    from dfkv_core.config_values import format_size

    _expect_store(directory)
    started = time.monotonic()

    def progress(state: dict[str, Any]) -> None:
        seconds = max(time.monotonic() - started, 1e-3)
        print(
            f"{state['objects']:,} of {state['total']:,} objects, {format_size(state['bytes'])}, "
            f"{format_size(int(state['bytes'] / seconds))}/s, {state['corrupt']:,} corrupt",
            file=sys.stderr,
            flush=True,
        )

    try:
        report = _native.scrub_directory(str(directory), progress)
    except ValueError as error:
        raise _unusable(error) from None
    if as_json:
        print_json({"directory": str(directory), **report, "seconds": round(time.monotonic() - started, 3)})
    else:
        print_table("", ("found", "objects"), [(name, f"{report[name]:,}") for name in _REPORTED], right=(1,))
        if report["remark"]:
            print(report["remark"])
    if report["corrupt"] or report["unreadable"] or report["faulty"]:
        raise typer.Exit(1)


_REPORTED = ("objects", "corrupt", "unreadable", "faulty")


def _expect_store(directory: Path) -> None:
    if not (directory / "slots.tbl").is_file():
        raise CommandError(f"{directory} holds no store: no slots.tbl is in it", "give what a node was given as --dir")


def _unusable(error: ValueError) -> CommandError:
    message, _, hint = str(error).rpartition("; ")
    return CommandError(message or str(error), hint or None, 1)
