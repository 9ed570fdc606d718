"""What both ways into LMCache count, for Prometheus."""

from __future__ import annotations

from dfkv_connectors.counters import Family

PREFIX = "lmcache:dfkv_"

# Every counter there is; on the endpoint their names begin with PREFIX and end with "_total".
FAMILIES: dict[str, Family] = {
    "keys": Family(("operation", "status"), "Keys by operation (lookup, load, store, delete) and status."),
    "bytes": Family(("operation",), "Payload bytes moved: load or store."),
    "refused": Family(
        ("operation", "reason"),
        "Keys that took no part in sharing, by reason: hash, layout, model, unknown (of no known layout), memory (none was "
        "free to load into). The log says more.",
    ),
    "faults": Family(("call",), "Exceptions caught in a call, which then counted as a miss."),
}
