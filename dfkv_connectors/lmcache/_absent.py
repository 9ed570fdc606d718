"""Stands in for the classes where LMCache is not installed: importing is fine, using them says what to install."""

from __future__ import annotations

from typing import Any, ClassVar


class _Absent:
    _runs_inside: ClassVar[str]

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ImportError(
            f"dfkv_connectors.lmcache.{type(self).__name__} runs inside {self._runs_inside}, which is not installed in this "
            "Python environment. Install lmcache (0.5) beside dfkv"
        )


class DfkvL2Adapter(_Absent):
    """Raises ImportError when instantiated."""

    _runs_inside = "LMCache's server"


class DfkvConnectorAdapter(_Absent):
    """Raises ImportError when instantiated."""

    _runs_inside = "an engine's LMCache"
