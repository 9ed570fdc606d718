"""Stands in for the adapter where LMCache is not installed: importing is fine, using it says what to install."""

from __future__ import annotations

from typing import Any


class DfkvL2Adapter:
    """Raises ImportError when instantiated."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ImportError(
            "dfkv_connectors.lmcache.DfkvL2Adapter runs inside LMCache's server, which is not installed in this Python "
            "environment. Install lmcache (0.5) beside dfkv"
        )
