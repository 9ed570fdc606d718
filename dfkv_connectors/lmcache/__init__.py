"""dfkv for LMCache: an L2 of its multiprocess server. Importing has no side effects.

lmcache server --l2-adapter
'{"type":"plugin","module_path":"dfkv_connectors.lmcache","class_name":"DfkvL2Adapter","adapter_params":{}}'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    from .adapter import DfkvL2Adapter
except ModuleNotFoundError as error:
    if TYPE_CHECKING or (error.name or "").partition(".")[0] not in {"lmcache", "torch", "numpy"}:
        raise
    from ._absent import DfkvL2Adapter

__all__ = ["DfkvL2Adapter"]
