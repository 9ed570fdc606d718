"""The typer application, and how its failures look at the prompt."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from dfkv_core import __version__
from dfkv_core.cli import (
    bench,
    cluster,
    config_command,
    doctor,
    inspect,
    maintain,
    mds,
    node,
    plan,
    serve,
    storage,
    top,
)
from dfkv_core.cli.output import CommandError, JsonOption, print_json

app = typer.Typer(
    name="dfkv",
    help="A distributed KV cache for LLM inference.\n\n"
    "Start a node with [bold]dfkv serve[/bold], point the engines at it, and look at it with "
    "[bold]dfkv stat[/bold] and [bold]dfkv ls[/bold].",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve")(serve.serve)
app.command("node")(node.node)
app.command("mds")(mds.mds)
app.command("stat")(inspect.stat)
app.command("ls")(inspect.ls)
app.command("ping")(inspect.ping)
app.command("ring")(cluster.ring)
app.command("clients")(cluster.clients)
app.command("top")(top.top)
app.command("drain")(cluster.drain)
app.command("rm")(maintain.rm)
app.command("erase")(maintain.erase)
app.command("inspect")(storage.inspect)
app.command("scrub")(storage.scrub)
app.command("plan")(plan.plan)
app.command("config")(config_command.config)
app.command("doctor")(doctor.doctor)
app.add_typer(bench.app, name="bench")


@app.command("version")
def version(as_json: JsonOption = False) -> None:
    """Print the version.

    \b
    Examples:
      dfkv version
      dfkv version --json
    """
    if as_json:
        print_json({"version": __version__})
    else:
        print(f"dfkv {__version__}")


@app.callback(invoke_without_command=True)
def root(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if show_version:
        print(f"dfkv {__version__}")
        raise typer.Exit


def run() -> None:
    """Runs the command line. Faults of the configuration and of the surroundings are messages, not tracebacks."""
    from dfkv_core.config_load import ConfigError
    from dfkv_core.node import NodeError

    try:
        app()
    except ConfigError as error:
        _fail(str(error), None, 2)
    except NodeError as error:
        _fail(error.message, error.hint, 1)
    except CommandError as error:
        _fail(error.message, error.hint, error.exit_code)
    except ImportError as error:
        if error.name and error.name.startswith("dfkv_core"):
            _fail(f"{error}", "reinstall dfkv; `dfkv doctor` tells what is missing", 1)
        raise
    except BrokenPipeError:
        # `dfkv ls | head`: the reader has gone, and the interpreter would complain again at exit.
        sys.stderr.close()
        sys.exit(0)


def _fail(message: str, hint: str | None, code: int) -> None:
    print(f"dfkv: error: {message}", file=sys.stderr)
    if hint:
        print(f"  {hint}", file=sys.stderr)
    sys.exit(code)
