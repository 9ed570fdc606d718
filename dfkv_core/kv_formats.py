"""The append-only table of kv_format numbers: engine version ranges known to keep the bytes of their KV pages.

A number never changes its meaning and is never reused. When an engine changes what it puts into a page, the new
versions get a new number. An engine version that no entry covers must not share: its bytes are unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class KvFormat:
    """One entry. Versions are (major, minor): from `first` on, before `end` (None: open, for dfkv's own tools)."""

    number: int
    engine_family: str
    backend: str
    first: tuple[int, int]
    end: tuple[int, int] | None
    pages: str

    def covers(self, engine_family: str, backend: str, version: tuple[int, int]) -> bool:
        """True where this entry describes the pages of that engine."""
        same = (self.engine_family, self.backend) == (engine_family, backend)
        return same and self.first <= version and (self.end is None or version < self.end)

    def describe(self) -> str:
        """A short text for operators, for example "vllm cpu >=0.32,<0.33"."""
        until = "" if self.end is None else f",<{self.end[0]}.{self.end[1]}"
        return f"{self.engine_family} {self.backend} >={self.first[0]}.{self.first[1]}{until}"


KV_FORMATS: Final[Mapping[int, KvFormat]] = MappingProxyType(
    {
        entry.number: entry
        for entry in (
            KvFormat(1, "dfkv", "synthetic", (0, 0), None, "pages of dfkv's own benchmarks and tests"),
            KvFormat(2, "vllm", "cpu", (0, 32), (0, 33), "(heads, tokens, K and V); packing depends on the ISA"),
            KvFormat(3, "sglang", "host", (0, 5), (0, 6), "pages of HiCache's host pools; the page format says which"),
            KvFormat(
                4, "lmcache", "mp", (0, 5), (0, 6), "objects of its multiprocess server; the page format says which"
            ),
            KvFormat(5, "lmcache", "classic", (0, 5), (0, 6), "chunks and layers of chunks of an engine's own LMCache"),
        )
    }
)


def kv_format_for(engine_family: str, backend: str, version: str) -> int | None:
    """The number for an engine, or None where its version is not covered. Any thread.

    version: text that begins with "major.minor", as engines report it ("0.32.0", "0.32.1+cpu").
    Raises ValueError where it does not.
    """
    parts = version.split(".")
    if len(parts) < 2 or not parts[0].isdecimal() or not parts[1].isdecimal():
        raise ValueError(f"engine version: expected text that begins with 'major.minor', found {version!r}")
    number = (int(parts[0]), int(parts[1]))
    for entry in KV_FORMATS.values():
        if entry.covers(engine_family, backend, number):
            return entry.number
    return None
