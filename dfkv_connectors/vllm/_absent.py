"""Stands in for the connector where vLLM is not installed: importing is fine, using it says what to install."""

from __future__ import annotations

from typing import Any


class DfkvConnector:
    """Raises ImportError when instantiated."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ImportError(
            "dfkv_connectors.vllm.DfkvConnector runs inside vLLM, which is not installed in this Python environment. "
            "Install vllm (0.32 or newer) beside dfkv"
        )
