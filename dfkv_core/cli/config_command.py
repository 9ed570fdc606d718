"""`dfkv config`: the effective configuration, and where each value came from."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from dfkv_core.cli.output import ConfigFileOption, JsonOption, print_json, print_table


class Section(str, Enum):
    NODE = "node"
    MDS = "mds"
    CLIENT = "client"
    VLLM = "vllm"
    SGLANG = "sglang"
    LMCACHE = "lmcache"
    LMCACHE_CLASSIC = "lmcache_classic"


def config(
    section: Annotated[Section | None, typer.Argument(help="One section; all of them without it.")] = None,
    config_file: ConfigFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the effective values, and where each came from.

    Weakest first: /etc/dfkv/dfkv.toml, ~/.config/dfkv/dfkv.toml, the
    environment (DFKV_SECTION__FIELD), flags or the engine's extra
    configuration. A file named by --config or DFKV_CONFIG replaces both.

    \b
    Examples:
      dfkv config
      dfkv config vllm
      dfkv config node --config ./dfkv.toml --json
    """
    from dfkv_core.config import RECORDS, load_config

    names = [section.value] if section else list(RECORDS)
    loaded = {name: load_config(RECORDS[name], file=config_file) for name in names}
    if as_json:
        print_json({name: value.as_dict() for name, value in loaded.items()})
        return
    for index, (name, value) in enumerate(loaded.items()):
        if index:
            print()
        print_table(f"[{name}]", ("key", "value", "from"), value.rows())
