"""A connector that holds nothing, for the second of two that LMCache makes for one cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector


class IdleConnector(RemoteConnector):
    """Any thread."""

    async def exists(self, key: Any) -> bool:
        return False

    def exists_sync(self, key: Any) -> bool:
        return False

    async def get(self, key: Any) -> None:
        return None

    async def put(self, key: Any, memory_obj: Any) -> None:
        return None

    async def list(self) -> Sequence[str]:
        return []

    async def close(self) -> None:
        return None

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: Sequence[Any], memory_objs: Sequence[Any]) -> None:
        return None

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: Sequence[Any]) -> int:
        return 0

    def remove_sync(self, key: Any) -> bool:
        return False
