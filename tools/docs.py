"""Writes the pages of docs/ that are made from the code: configuration.md and metrics.md.

usage: python -m tools.docs          (a test checks that the committed pages are current)
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dfkv_connectors.counters import Family
from dfkv_connectors.lmcache.stats import FAMILIES as LMCACHE_FAMILIES
from dfkv_connectors.sglang.stats import FAMILIES as SGLANG_FAMILIES
from dfkv_core.config import RECORDS, ClientConfig, Record
from dfkv_core.config_values import display
from dfkv_core.metrics_table import MDS_TABLE, NODE_TABLE, Spec, Table

DOCS = Path(__file__).resolve().parent.parent / "docs"

CONFIGURATION_HEAD = """\
# Configuration

One typed record per process, checked at start. A key that is not listed here is an error, wherever it comes from; the
message names the nearest key. `dfkv config` shows the effective values and where each came from, and every process
writes the same as one log line when it starts.

Sources, weakest first:

1. `/etc/dfkv/dfkv.toml`, then `~/.config/dfkv/dfkv.toml` (`$XDG_CONFIG_HOME` is honoured). A file named by `--config` or
   `DFKV_CONFIG` replaces both.
2. The environment: `DFKV_SECTION__KEY`, for example `DFKV_NODE__RAM_BYTES=64GiB`. Lists are separated by commas.
3. Flags of the command, or the engine's extra configuration (`kv_connector_extra_config` of vLLM,
   `--hicache-storage-backend-extra-config` of SGLang, `adapter_params` of LMCache's `--l2-adapter`,
   `remote_storage_plugin.dfkv.*` of its classic mode).

Sizes are numbers of bytes or texts such as `"4GiB"`, `"512MB"`, `"64k"`. Times are in the unit that ends the key's name.

```toml
[node]
host = "10.0.0.5"
ram_bytes = "64GiB"
secret_file = "/etc/dfkv/secret"

[client]
addresses = ["10.0.0.5:7440", "10.0.0.6:7440"]
secret_file = "/etc/dfkv/secret"

[vllm]
min_restore_tokens = 512
```
"""

METRICS_HEAD = """\
# Metrics

`dfkv serve --metrics-port 9740` (or `node.metrics_port`) serves these for Prometheus on `http://127.0.0.1:9740/metrics`; without it no
port is opened. `node.metrics_host` chooses another address, where `node.insecure` says that this is meant: the endpoint
asks nobody for a secret. `dfkv stat` prints the same numbers, and reading them costs the same however many objects a node holds.

Every metric is named `dfkv_node_` and the key below; counters end in `_total` and start from zero when the node starts.
`dfkv_node_info` carries the labels `node_id` and `version`. Engines report the connector's metrics on their own endpoint.
"""

METRICS_FAMILIES = """
## By operation

Counters with labels. In `dfkv stat --json` each combination is a key of its own, for example `items_get_ok` for
`dfkv_node_items_total{op="get",status="ok"}`. A status other than `ok` and `already` is the reason why an item was not served:
the items of an operation add up to what was asked of it.
"""

METRICS_MDS = """
## The membership service

`dfkv mds --metrics-port 9741` (or `mds.metrics_port`) serves these in the same way. Each is named `dfkv_mds_` and the key below;
counters end in `_total`. `dfkv_mds_info` carries the labels `replica_id`, `group` and `version`. Every replica counts for itself: nodes
and views are the same on all of them within a look at etcd, connections and heartbeats add up.
"""

METRICS_SGLANG = """
## The SGLang connector

On SGLang's own `/metrics`, where it runs with `--enable-metrics`: `sglang:dfkv_`, the key below and `_total`, with the labels
`tp_rank` and `pp_rank`. The connector feeds SGLang's histograms of prefetched and backed up pages too.
"""

METRICS_LMCACHE = """
## LMCache

On `/metrics` of its server's HTTP port, and among the engine's metrics in classic mode: `lmcache:dfkv_`, the key below and
`_total`. A key of LMCache is one chunk of one rank, or one layer of it.
"""


def configuration_page() -> str:
    parts = [CONFIGURATION_HEAD]
    for section, record in RECORDS.items():
        parts.append(f"\n## [{section}]\n\n{_first_paragraph(record)}\n\n")
        parts.append("| key | type | default | meaning |\n| --- | --- | --- | --- |\n")
        parts += [_row(record, key) for key in record.model_fields if not _inherited(record, key)]
    return "".join(parts)


def _inherited(record: type[Record], key: str) -> bool:
    """A key of [client] that is the same in this record."""
    own = ClientConfig.model_fields.get(key)
    return record is not ClientConfig and own is not None and own.default == record.model_fields[key].default


def metrics_page() -> str:
    return "".join(
        [
            *(METRICS_HEAD, *_metrics_table(NODE_TABLE)),
            *(METRICS_FAMILIES, *_family_table(NODE_TABLE.families)),
            *(METRICS_MDS, *_metrics_table(MDS_TABLE), *_family_table(MDS_TABLE.families)),
            *(METRICS_SGLANG, *_family_table(SGLANG_FAMILIES)),
            *(METRICS_LMCACHE, *_family_table(LMCACHE_FAMILIES)),
        ]
    )


def _metrics_table(table: Table) -> list[str]:
    rows = [f"| `{key}` | {spec.kind} | {spec.help} |\n" for key, spec in table.metrics.items()]
    return ["\n| key | kind | meaning |\n| --- | --- | --- |\n", *rows]


def _family_table(families: Mapping[str, Family | Spec]) -> list[str]:
    rows = [
        f"| `{key}` | {', '.join(f'`{label}`' for label in family.labels)} | {family.help} |\n"
        for key, family in families.items()
    ]
    return ["\n| key | labels | meaning |\n| --- | --- | --- |\n", *rows]


def _first_paragraph(record: type[Record]) -> str:
    return (record.__doc__ or "").strip().split("\n\n")[0].replace("\n    ", "\n")


def _row(record: type[Record], key: str) -> str:
    field = record.model_fields[key]
    default = display(field.default, size=record.is_size(key))
    shown = "" if default == "-" else f"`{default}`"
    schema = record.model_json_schema()["properties"][key]
    return f"| `{key}` | {_type_name(record, key, schema)} | {shown} | {field.description}{_limits(record, key, schema)} |\n"


def _type_name(record: type[Record], key: str, schema: dict[str, Any]) -> str:
    if record.is_size(key):
        return "size"
    options = [schema, *schema.get("anyOf", [])]
    for option in options:
        if "enum" in option:
            return ", ".join(f"`{value}`" for value in option["enum"])
        if option.get("format") == "path":
            return "path"
    names = {"integer": "number", "number": "fraction", "string": "text", "boolean": "`true`, `false`", "array": "list"}
    return next(names[option["type"]] for option in options if option.get("type") in names)


def _limits(record: type[Record], key: str, schema: dict[str, Any]) -> str:
    for option in [schema, *schema.get("anyOf", [])]:
        low = option.get("minimum", option.get("exclusiveMinimum"))
        high = option.get("maximum")
        shown = [display(bound, size=record.is_size(key)) for bound in (low, high)]
        if low is not None and high is not None:
            return f" ({shown[0]} to {shown[1]})"
        if low is not None and low > 1:
            return f" (at least {shown[0]})"
    return ""


def main() -> int:
    for name, text in (("configuration.md", configuration_page()), ("metrics.md", metrics_page())):
        (DOCS / name).write_text(text, encoding="utf-8")
        print(f"wrote docs/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
