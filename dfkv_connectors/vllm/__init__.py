"""dfkv for vLLM. Importing has no side effects.

--kv-transfer-config
'{"kv_connector":"DfkvConnector","kv_connector_module_path":"dfkv_connectors.vllm","kv_role":"kv_both"}'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    from .connector import DfkvConnector
except ModuleNotFoundError as error:
    if TYPE_CHECKING or (error.name or "").partition(".")[0] not in {"vllm", "torch", "numpy"}:
        raise
    from ._absent import DfkvConnector

__all__ = ["DfkvConnector"]
