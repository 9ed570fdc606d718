"""The objects of a measurement: the same memory for every store, and the proof that what came back is what was written."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import struct

_numbers = itertools.count()
_run = os.urandom(8)
_MARK = struct.Struct("<QQ")


class Objects:
    """`count` objects of `size_bytes`, one behind the other, under names that nobody has stored."""

    def __init__(self, count: int, size_bytes: int) -> None:
        self.count = count
        self.size_bytes = size_bytes
        self._file = os.memfd_create("bench-peers")
        os.ftruncate(self._file, count * size_bytes)
        self.memory = mmap.mmap(self._file, count * size_bytes)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"  # where another process can map the same memory
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        whole = memoryview(self.memory)
        self.views = [whole[i * size_bytes : (i + 1) * size_bytes] for i in range(count)]
        self._pattern = os.urandom(size_bytes)
        for index, view in enumerate(self.views):
            view[:] = self._expected(index)
        self.ids: list[bytes] = []
        self.rename()

    @property
    def total_bytes(self) -> int:
        return self.count * self.size_bytes

    def rename(self) -> None:
        """The same bytes under new names, 16 bytes each."""
        self.ids = [
            _run + struct.pack("<Q", next(_numbers) * 0x9E3779B97F4A7C15 & (1 << 64) - 1) for _ in range(self.count)
        ]

    def blank(self) -> None:
        ctypes.memset(self.base, 0, self.total_bytes)

    def are_right(self) -> bool:
        """Every byte of every object."""
        return all(bytes(view) == self._expected(index) for index, view in enumerate(self.views))

    def close(self) -> None:
        """The memory itself goes with the last view of it."""
        os.close(self._file)

    def _expected(self, index: int) -> bytes:
        return _MARK.pack(index, ~index & (1 << 64) - 1) + self._pattern[_MARK.size :]
