"""Value types of namespace fields, their checks, and their fixed-width encodings (docs/formats.md).

Pure and free of native code. Any thread.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeVar

DIGEST_BYTES: Final = 32
MAX_TEXT_BYTES: Final = 128
MAX_BLOB_BYTES: Final = 256
MAX_AXES: Final = 16
MAX_GROUPS: Final = 255
MAX_STATE_SIZES: Final = 255
U16: Final = 0xFFFF
U32: Final = 0xFFFFFFFF
U64: Final = 0xFFFFFFFFFFFFFFFF

EnumT = TypeVar("EnumT", bound=IntEnum)


class NamespaceFieldError(ValueError):
    """A field of a descriptor has the wrong type or is out of range. `field` names it."""

    def __init__(self, field: str, expected: str, found: object) -> None:
        self.field = field
        self.expected = expected
        self.found = found
        super().__init__(f"namespace field {field}: expected {expected}, found {found!r}")


class GroupKind(IntEnum):
    """What the layers of one KV-cache group keep. Append-only: the numbers are part of the identity."""

    FULL_ATTENTION = 1
    SLIDING_WINDOW = 2
    CHUNKED_LOCAL = 3
    MLA = 4
    STATE = 5  # Mamba, linear attention: one opaque state for each block
    INDEXER = 6
    CROSS_ATTENTION = 7


class HashAlgorithm(IntEnum):
    """Engine hashes that are taken as opaque block hashes. Append-only; also the algorithm byte of opaque block ids."""

    VLLM_SHA256_CBOR = 1
    VLLM_SHA256 = 2  # of a pickle, with a fixed seed
    SGLANG_PAGE = 3
    LMCACHE_BLAKE3 = 4
    LMCACHE_CLASSIC = 5  # whichever a classic engine is configured with


class ShardScheme(IntEnum):
    """What shard index and shard count of a part mean. Append-only."""

    KV_HEADS = 0  # equal granules of KV heads, in head order
    RANK = 1  # one opaque piece for each tensor-parallel rank


def check_int(name: str, value: object, low: int, high: int) -> None:
    """Raises NamespaceFieldError unless value is an int (no bool) from low to high."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise NamespaceFieldError(name, f"an int from {low} to {high}", value)


def check_enum(name: str, value: object, kind: type[IntEnum]) -> None:
    """Raises NamespaceFieldError unless value is a member of the enumeration."""
    if not isinstance(value, kind):
        raise NamespaceFieldError(name, f"a {kind.__name__}", value)


def check_text(name: str, value: object, *, required: bool = True) -> None:
    """Raises NamespaceFieldError unless value is printable text of at most MAX_TEXT_BYTES bytes in UTF-8."""
    low = 1 if required else 0
    fits = isinstance(value, str) and value.isprintable() and low <= len(value.encode()) <= MAX_TEXT_BYTES
    if not fits:
        raise NamespaceFieldError(name, f"printable text of {low} to {MAX_TEXT_BYTES} bytes", value)


def check_digest(name: str, value: object) -> None:
    """Raises NamespaceFieldError unless value is the 32 bytes of a SHA-256."""
    if not isinstance(value, bytes) or len(value) != DIGEST_BYTES:
        raise NamespaceFieldError(name, f"the {DIGEST_BYTES} bytes of a SHA-256", value)


def check_blob(name: str, value: object) -> None:
    """Raises NamespaceFieldError unless value is at most MAX_BLOB_BYTES bytes."""
    if not isinstance(value, bytes) or len(value) > MAX_BLOB_BYTES:
        raise NamespaceFieldError(name, f"at most {MAX_BLOB_BYTES} bytes", value)


def check_tuple(name: str, value: object, most: int) -> None:
    """Raises NamespaceFieldError unless value is a tuple of at most `most` items."""
    if not isinstance(value, tuple) or len(value) > most:
        raise NamespaceFieldError(name, f"a tuple of at most {most} items", value)


def check_layout(name: str, value: object) -> None:
    """Raises NamespaceFieldError unless value is a tuple of (axis name, size) pairs."""
    check_tuple(name, value, MAX_AXES)
    assert isinstance(value, tuple)
    for axis in value:
        if not isinstance(axis, tuple) or len(axis) != 2:
            raise NamespaceFieldError(name, "pairs of axis name and size", axis)
        check_text(f"{name} axis", axis[0])
        check_int(f"{name} size", axis[1], 1, U64)


@dataclass(frozen=True, slots=True)
class HashForm:
    """How block hashes are made: our own chain (algorithm None), or an engine's hash with its seed."""

    algorithm: HashAlgorithm | None = None
    seed: bytes = b""

    def __post_init__(self) -> None:
        check_blob("hash_form.seed", self.seed)
        if self.algorithm is not None:
            check_enum("hash_form.algorithm", self.algorithm, HashAlgorithm)
        elif self.seed:
            raise NamespaceFieldError("hash_form.seed", "no seed with the own chain", self.seed)


OWN_CHAIN: Final = HashForm()


@dataclass(frozen=True, slots=True)
class Group:
    """One KV-cache group. heads before sharding, head_size in elements, window in tokens (0: none), states in bytes."""

    kind: GroupKind
    heads: int = 0
    head_size: int = 0
    window: int = 0
    state_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_enum("groups.kind", self.kind, GroupKind)
        check_int("groups.heads", self.heads, 0, U32)
        check_int("groups.head_size", self.head_size, 0, U32)
        check_int("groups.window", self.window, 0, U32)
        check_tuple("groups.state_sizes", self.state_sizes, MAX_STATE_SIZES)
        for size in self.state_sizes:
            check_int("groups.state_sizes", size, 1, U64)


# ---- encodings -----------------------------------------------------------------------------------


class FieldBytes:
    """Reads the bytes of one field from front to end. Raises ValueError where they do not fit."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> bytes:
        """The next `size` bytes."""
        if size > len(self._data) - self._at:
            raise ValueError(f"truncated: {size} bytes wanted, {len(self._data) - self._at} left")
        taken = self._data[self._at : self._at + size]
        self._at += size
        return taken

    def uint(self, code: str) -> int:
        """The next unsigned integer; code as in the struct module (B, H, I, Q)."""
        return int(struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0])

    def finish(self) -> None:
        """Raises ValueError unless everything was read."""
        if self._at != len(self._data):
            raise ValueError(f"{len(self._data) - self._at} bytes too many")


def encode_layout(axes: tuple[tuple[str, int], ...]) -> bytes:
    """u8 count, then for each axis u8 length, name, u64 size."""
    parts = [struct.pack("<B", len(axes))]
    for axis, size in axes:
        name = axis.encode()
        parts.append(struct.pack("<B", len(name)) + name + struct.pack("<Q", size))
    return b"".join(parts)


def decode_layout(data: bytes) -> tuple[tuple[str, int], ...]:
    """The reverse of encode_layout. Raises ValueError where the bytes do not fit."""
    reader = FieldBytes(data)
    count = reader.uint("B")
    axes = tuple((reader.take(reader.uint("B")).decode(), reader.uint("Q")) for _ in range(count))
    reader.finish()
    return axes


def encode_hash_form(form: HashForm) -> bytes:
    """u8 algorithm, u32 length, seed. The own chain is the default and never encoded alone: algorithm 0."""
    return struct.pack("<BI", form.algorithm or 0, len(form.seed)) + form.seed


def decode_hash_form(data: bytes) -> HashForm:
    """The reverse of encode_hash_form. Raises ValueError where the bytes do not fit."""
    reader = FieldBytes(data)
    algorithm = reader.uint("B")
    seed = reader.take(reader.uint("I"))
    reader.finish()
    return HashForm(HashAlgorithm(algorithm) if algorithm else None, seed)


def encode_groups(groups: tuple[Group, ...]) -> bytes:
    """u8 count, then for each group u8 kind, u32 window, u32 heads, u32 head size, u8 states, states x u64."""
    parts = [struct.pack("<B", len(groups))]
    for group in groups:
        sizes = group.state_sizes
        parts.append(struct.pack("<BIII", group.kind, group.window, group.heads, group.head_size))
        parts.append(struct.pack(f"<B{len(sizes)}Q", len(sizes), *sizes))
    return b"".join(parts)


def decode_groups(data: bytes) -> tuple[Group, ...]:
    """The reverse of encode_groups. Raises ValueError where the bytes do not fit."""
    reader = FieldBytes(data)
    groups = []
    for _ in range(reader.uint("B")):
        kind = GroupKind(reader.uint("B"))
        window, heads, head_size = reader.uint("I"), reader.uint("I"), reader.uint("I")
        sizes = tuple(reader.uint("Q") for _ in range(reader.uint("B")))
        groups.append(Group(kind, heads, head_size, window, sizes))
    reader.finish()
    return tuple(groups)
