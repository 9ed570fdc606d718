"""The command `dfkv`. One file per group of commands; what a command needs is imported when it runs."""

from __future__ import annotations


def main() -> None:
    """Entry point of the `dfkv` script. Exits with 0, 1 (it failed) or 2 (it was asked wrongly)."""
    from dfkv_core.cli.app import run

    run()
