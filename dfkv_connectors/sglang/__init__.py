"""dfkv for SGLang: the L3 of HiCache. Importing has no side effects.

--hicache-storage-backend dynamic --hicache-storage-backend-extra-config
'{"backend_name":"dfkv","module_path":"dfkv_connectors.sglang","class_name":"DfkvHiCache","interface_v1":1}'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    from .backend import DfkvHiCache
except ModuleNotFoundError as error:
    if TYPE_CHECKING or (error.name or "").partition(".")[0] not in {"sglang", "torch", "numpy"}:
        raise
    from ._absent import DfkvHiCache

__all__ = ["DfkvHiCache"]
