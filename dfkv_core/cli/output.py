"""What the commands share for output: tables for people, JSON for machines, errors at the prompt."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
ConfigFileOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Configuration file, in place of the standard ones.")
]


class CommandError(Exception):
    """A command failed for a reason that a person can act on."""

    def __init__(self, message: str, hint: str | None = None, exit_code: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code


def log_to_standard_error() -> None:
    """What a process that keeps running has to say, with the time."""
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(format=form, level=logging.INFO, stream=sys.stderr)


def print_json(value: Any) -> None:
    """One JSON document on standard output, flushed; bytes become hex."""
    json.dump(value, sys.stdout, default=_plain)
    sys.stdout.write("\n")
    sys.stdout.flush()


def build_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()) -> Any:
    """A rich table. right: columns of numbers."""
    from rich.table import Table

    numbers = set(right)
    table = Table(title=title or None, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()
) -> None:
    """A table that is cut to no width where the output is no terminal. right: columns of numbers."""
    from rich.console import Console

    table = build_table(title, columns, rows, right=right)
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=400)
    console.print(table)


def format_age(seconds_since_epoch: int) -> str:
    """How long ago a moment was, in one unit: 12 s, 5 min, 3 h, 2 d."""
    if seconds_since_epoch <= 0:
        return "-"
    age = max(0.0, time.time() - seconds_since_epoch)
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if age < limit:
            return f"{age / divisor:.0f} {unit}"
    return f"{age / 86400:.0f} d"


def _plain(value: Any) -> Any:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).hex()
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    return str(value)
