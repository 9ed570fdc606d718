"""DfkvConnectorAdapter: what LMCache's classic mode loads by name, and how its URLs and settings become a connector.

remote_storage_plugins: ["dfkv"] makes LMCache load it and ask for "plugin://dfkv"; remote_url: "dfkv://host:port" makes
LMCache ask for that too, so that both may be asked for in one process.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from dfkv_core.config import LmcacheClassicConfig, load_config

from .classic import DfkvConnector
from .classic_idle import IdleConnector

logger = logging.getLogger("lmcache.dfkv")

_PLUGIN, _URL = "plugin://", "dfkv://"
_TYPE = "dfkv"
_LMCACHE_OWN = frozenset({"module_path", "class_name", "url"})


class DfkvConnectorAdapter(ConnectorAdapter):
    """LMCache's thread that starts the engine."""

    def __init__(self) -> None:
        super().__init__(_URL)

    def can_parse(self, url: str) -> bool:
        return url.startswith(_URL) or (url.startswith(_PLUGIN) and _is_ours(url.removeprefix(_PLUGIN)))

    def create_connector(self, context: ConnectorContext) -> RemoteConnector:
        """Raises ConfigError or ValueError for what cannot be shared; LMCache logs it and goes on without."""
        lmcache = context.config
        extra: Mapping[str, Any] = lmcache.extra_config or {}
        is_plugin = context.url.startswith(_PLUGIN)
        plugins = [name for name in lmcache.remote_storage_plugins or () if _is_ours(name)]
        plugin = context.url.removeprefix(_PLUGIN) if is_plugin else next(iter(plugins), _TYPE)
        prefix = f"remote_storage_plugin.{plugin}."
        flags = {
            key.removeprefix(prefix): value
            for key, value in extra.items()
            # Settings of "dfkv.a" begin with those of "dfkv" as well.
            if key.startswith(prefix) and "." not in key.removeprefix(prefix)
        }
        url = context.url if not is_plugin else flags.get("url")
        if is_plugin and url is None and (lmcache.remote_url or "").startswith(_URL):
            logger.info("dfkv: remote_url names the cache already; %s stands aside", context.url)
            return IdleConnector(lmcache, context.metadata)
        flags = {key: value for key, value in flags.items() if key not in _LMCACHE_OWN}
        if url is not None:
            flags["addresses"] = _addresses(str(url))
        loaded = load_config(LmcacheClassicConfig, flags=flags, flags_source=f"extra_config {prefix}*")
        connector = DfkvConnector(loaded.value, lmcache, context.metadata, context.local_cpu_backend)
        logger.info("dfkv: %s", loaded.summary())
        return connector


def _is_ours(plugin: str) -> bool:
    return plugin.split(".", 1)[0] == _TYPE


def _addresses(url: str) -> list[str]:
    """Of dfkv://host:port or dfkv://host:port,host:port."""
    if not url.startswith(_URL):
        raise ValueError(f"expected a URL such as dfkv://127.0.0.1:7440, found {url!r}")
    return [part for part in url.removeprefix(_URL).rstrip("/").split(",") if part]
