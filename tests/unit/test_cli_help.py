"""The command line as a person meets it: help with examples, quick, and errors without tracebacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dfkv_core import __version__
from dfkv_core.cli.app import app
from dfkv_core.cli.config_command import Section
from dfkv_core.cli.namespaces import Namespace, resolve
from dfkv_core.cli.output import CommandError, format_age
from dfkv_core.config import RECORDS

COMMANDS = sorted(str(command.name) for command in app.registered_commands)


def run(*arguments: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`dfkv ARGUMENTS` as a process, without the configuration of this machine's user."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DFKV_")}
    return subprocess.run(
        [sys.executable, "-m", "dfkv_core.cli", *arguments],
        env={**clean, "XDG_CONFIG_HOME": "/nonexistent", **(environ or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_every_command_is_known() -> None:
    expected = "clients config doctor drain erase inspect ls mds node ping plan ring rm scrub serve stat top version"
    assert expected.split() == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_and_describes_every_option(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"], terminal_width=100)
    assert result.exit_code == 0
    assert "Examples:" in result.output
    assert f"dfkv {name}" in result.output
    group = typer.main.get_command(app)
    command = group.commands[name]  # type: ignore[attr-defined]
    for parameter in command.params:
        assert getattr(parameter, "help", None), f"{name}: {parameter.name} has no help"


def test_commands_that_print_results_have_json() -> None:
    for name in COMMANDS:
        assert "--json" in CliRunner().invoke(app, [name, "--help"], terminal_width=100).output, name


def test_version() -> None:
    assert run("version").stdout == f"dfkv {__version__}\n"
    assert run("--version").stdout == f"dfkv {__version__}\n"
    assert json.loads(run("version", "--json").stdout) == {"version": __version__}


def test_no_command_shows_help() -> None:
    result = run()
    assert "Commands" in result.stdout + result.stderr
    assert "serve" in result.stdout + result.stderr


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from dfkv_core.cli import app; "
        "print([m for m in ('pydantic', 'prometheus_client', 'dfkv_core._native', 'rich.table') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_completion_is_offered() -> None:
    done = run("--show-completion", environ={"SHELL": "/bin/bash", "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"})
    assert "Usage" not in done.stderr
    assert "--install-completion" in run("--help").stdout


def test_config_command_knows_every_section() -> None:
    assert [section.value for section in Section] == list(RECORDS)


def test_config_command_says_where_values_come_from(tmp_path: Path) -> None:
    file = tmp_path / "d.toml"
    file.write_text('[vllm]\nfleet_salt = "hush"\n')
    done = run("config", "vllm", "--config", str(file), "--json", environ={"DFKV_CLIENT__NAME": "n"})
    shown = json.loads(done.stdout)["vllm"]
    assert shown["fleet_salt"] == {"value": "***", "source": f"file {file} [vllm]"}
    assert shown["name"] == {"value": "n", "source": "environment DFKV_CLIENT__NAME"}
    assert shown["lease_ms"]["source"] == "default"
    table = run("config", "--config", str(file)).stdout
    assert "[node]" in table
    assert "hush" not in table


@pytest.mark.parametrize(
    ("arguments", "environ", "code", "words"),
    [
        (["config"], {"DFKV_NODE__PROT": "1"}, 2, ["node.prot", '"port"']),
        (["serve", "--host", "0.0.0.0", "--port", "0"], {}, 2, ["secret_file", "0.0.0.0"]),
        (["serve", "--ram", "4 GoB"], {}, 2, ["node.ram_bytes", "4GiB"]),
        (["serve", "--ram", "9000TiB", "--port", "0"], {}, 1, ["not enough memory", "9000TiB", "--ram"]),
        (["serve", "--config", "/nonexistent/d.toml"], {}, 2, ["/nonexistent/d.toml"]),
    ],
)
def test_faults_are_messages(arguments: list[str], environ: dict[str, str], code: int, words: list[str]) -> None:
    done = run(*arguments, environ=environ)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def _namespace(prefix: str, label: str = "") -> Namespace:
    return Namespace(bytes.fromhex(prefix.ljust(32, "0")), b"", label, 1, 1, 1, 1, ("n",))


def test_namespaces_are_found_by_id_prefix_and_label() -> None:
    known = [_namespace("abcd01", "llama"), _namespace("abcd02", "llama-2"), _namespace("beef")]
    assert resolve("abcd01", known) is known[0]
    assert resolve("ABCD02", known) is known[1]
    assert resolve("llama", known) is known[0]
    assert resolve("beef" + "0" * 28, known) is known[2]
    with pytest.raises(CommandError, match="2"):
        resolve("abcd", known)
    with pytest.raises(CommandError, match="no namespace"):
        resolve("bee", known)  # too short to be meant


def test_ages_have_one_unit() -> None:
    assert format_age(0) == "-"
    import time

    now = int(time.time())
    assert format_age(now - 30).endswith(" s")
    assert format_age(now - 600) == "10 min"
    assert format_age(now - 86400) == "24 h"
    assert format_age(now - 10 * 86400) == "10 d"
