"""dfkv for LMCache: an L2 of its multiprocess server, and a remote backend of its classic mode. No side effects.

lmcache server --l2-adapter
'{"type":"plugin","module_path":"dfkv_connectors.lmcache","class_name":"DfkvL2Adapter","adapter_params":{}}'

remote_storage_plugins: ["dfkv"]
extra_config: {remote_storage_plugin.dfkv.module_path: dfkv_connectors.lmcache,
               remote_storage_plugin.dfkv.class_name: DfkvConnectorAdapter}
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    from .adapter import DfkvL2Adapter
    from .classic_adapter import DfkvConnectorAdapter
except ModuleNotFoundError as error:
    if TYPE_CHECKING or (error.name or "").partition(".")[0] not in {"lmcache", "torch", "numpy"}:
        raise
    from ._absent import DfkvConnectorAdapter, DfkvL2Adapter

__all__ = ["DfkvConnectorAdapter", "DfkvL2Adapter"]
