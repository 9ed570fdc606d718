"""LMCache's L1 arena: where every object lies that is stored or loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dfkv_connectors.tables import Segments


class ArenaError(ValueError):
    """Memory that this dfkv does not reach. The message says what was found."""


@dataclass(frozen=True)
class Arena:
    """One run of host memory, registered once; objects are runs inside it."""

    address: int
    size_bytes: int

    @classmethod
    def of(cls, l1_memory_desc: Any) -> Arena:
        """Of LMCache's L1MemoryDesc. Raises ArenaError where the L1 is no run of host memory."""
        if l1_memory_desc is None or not l1_memory_desc.ptr or l1_memory_desc.size <= 0:
            raise ArenaError("LMCache's L1 is not one run of host memory, which is all this dfkv moves")
        return cls(int(l1_memory_desc.ptr), int(l1_memory_desc.size))

    def segments(self, objects: Sequence[Any]) -> Segments:
        """Address and length of each MemoryObj. Raises ArenaError for one that is not inside."""
        table = np.array([(each.data_ptr, each.get_size()) for each in objects], dtype=np.uint64).reshape(-1, 2)
        first, last = self.address, self.address + self.size_bytes
        inside = (table[:, 0] >= first) & (table[:, 0] <= last) & (table[:, 1] <= last - table[:, 0])
        if not bool(inside.all()):
            index = int(np.argmin(inside))
            address, length = (int(value) for value in table[index])
            raise ArenaError(
                f"an object of {length} bytes at {address:#x} is outside the L1 arena, {self.size_bytes} bytes at {first:#x}"
            )
        return table
