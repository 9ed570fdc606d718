"""What every object must hold: its bytes follow from its key and its version, so that any process can judge them."""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass, field

LARGEST_BYTES = 4 << 20
VERSION_BYTES = 8
HEADER_BYTES = 40  # version, then a digest of key and version; smaller objects have one version and no header
_OFFSETS = 1 << 16
_BASE = random.Random("soak").randbytes(LARGEST_BYTES + _OFFSETS)


@dataclass(frozen=True)
class Key:
    """An object that one thread of one process writes. size_bytes: the same in every version."""

    block_id: bytes
    size_bytes: int

    @classmethod
    def of(cls, seed: int, owner: int, number: int) -> Key:
        digest = hashlib.sha256(f"{seed}/{owner}/{number}".encode()).digest()
        share = int.from_bytes(digest[16:24], "little") / 2**64
        return cls(digest[:16], max(1, int(math.exp(share * math.log(LARGEST_BYTES)))))

    @property
    def has_versions(self) -> bool:
        return self.size_bytes >= HEADER_BYTES

    def content(self, version: int) -> bytes:
        digest = hashlib.sha256(self.block_id + version.to_bytes(VERSION_BYTES, "little")).digest()
        if not self.has_versions:
            return (digest + digest)[: self.size_bytes]
        at = int.from_bytes(digest[:2], "little")
        header = version.to_bytes(VERSION_BYTES, "little") + digest
        return header + _BASE[at : at + self.size_bytes - HEADER_BYTES]

    def version_of(self, data: bytes) -> int | None:
        """Which version these bytes are, every one of them; None: of no version at all."""
        version = int.from_bytes(data[:VERSION_BYTES], "little") if self.has_versions else 0
        return version if data == self.content(version) else None


@dataclass
class Record:
    """What its one writer knows of a key. stored: the version that was acknowledged last, unless removed since. doubtful: versions
    whose fate is unknown, for ever: a frame that was on its way may arrive later than what came after it."""

    stored: int | None = None
    doubtful: set[int] = field(default_factory=set)
    next_version: int = 0

    def may_be(self, version: int) -> bool:
        return version == self.stored or version in self.doubtful

    @property
    def may_be_there(self) -> bool:
        return self.stored is not None or bool(self.doubtful)

    def put_ended(self, version: int, *, acknowledged: bool) -> None:
        """Not acknowledged is also `already`: what is there may be of the same put, sent again after its connection went."""
        if acknowledged:
            self.stored = version
        else:
            self.doubtful.add(version)

    def removed(self) -> None:
        self.stored = None
