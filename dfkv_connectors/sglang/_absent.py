"""Stands in for the backend where SGLang is not installed: importing is fine, using it says what to install."""

from __future__ import annotations

from typing import Any


class DfkvHiCache:
    """Raises ImportError when instantiated."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ImportError(
            "dfkv_connectors.sglang.DfkvHiCache runs inside SGLang, which is not installed in this Python environment. "
            "Install sglang (0.5.12 or newer) beside dfkv"
        )
