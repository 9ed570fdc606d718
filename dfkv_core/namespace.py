"""Namespace descriptors: everything that must be equal for the KV bytes of one engine to be valid in another.

A descriptor is {u16 tag, u32 length, bytes} in ascending tag order, little-endian; a field at its default is
omitted. Its identity is the first 16 bytes of SHA-256("dfkv.ns.1" || descriptor). The width and the encoding of every
field are in docs/formats.md. Everything here is pure, needs no native code, and may be called from any thread.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from dfkv_core.kv_formats import KV_FORMATS
from dfkv_core.namespace_fields import (
    MAX_GROUPS,
    OWN_CHAIN,
    U16,
    U32,
    U64,
    FieldBytes,
    Group,
    GroupKind,
    HashAlgorithm,
    HashForm,
    NamespaceFieldError,
    ShardScheme,
    check_blob,
    check_digest,
    check_enum,
    check_int,
    check_layout,
    check_text,
    check_tuple,
    decode_groups,
    decode_hash_form,
    decode_layout,
    encode_groups,
    encode_hash_form,
    encode_layout,
)

__all__ = [
    "ID_PREFIX",
    "MAX_DESCRIPTOR_BYTES",
    "OWN_CHAIN",
    "TAG_NAMES",
    "DescriptorError",
    "Group",
    "GroupKind",
    "HashAlgorithm",
    "HashForm",
    "NamespaceDescriptor",
    "NamespaceFieldError",
    "ShardScheme",
    "difference",
    "field_names",
    "namespace_id",
    "raw_fields",
]

ID_PREFIX: Final = b"dfkv.ns.1"
MAX_DESCRIPTOR_BYTES: Final = 64 * 1024

# Append-only: a tag is never reused, and the default of a new one means what was so before it existed.
TAG_NAMES: Final[Mapping[int, str]] = MappingProxyType(
    {
        1: "tenant",
        2: "engine_family",
        3: "kv_format",
        4: "fleet_salt",
        5: "weights_digest",
        6: "weights_generation",
        7: "config_digest",
        8: "compute_dtype",
        9: "kv_dtype",
        10: "kv_scales_digest",
        11: "page_layout",
        12: "page_format",
        13: "block_tokens",
        14: "chunk_tokens",
        15: "hash_form",
        16: "groups",
        17: "pp_size",
        18: "pcp_size",
        19: "dcp_size",
        20: "shard_scheme",
    }
)


class DescriptorError(ValueError):
    """Bytes that are no canonical descriptor, or that hold a tag or a value this version does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceDescriptor:
    """One typed field for each tag. Raises NamespaceFieldError, which names the field, for a bad value.

    engine_family  name of the engine, for example "vllm"
    kv_format      number out of dfkv_core.kv_formats: an engine version range known to keep its KV bytes
    *_digest       a SHA-256, 32 bytes; kv_scales_digest is empty where there are no scales
    page_layout    axes inside one page of one head group, outermost first: (("N", 128), ("C", 64))
    page_format    order of elements below the axes, for example an ISA's packing; empty: plain row-major
    block_tokens   tokens of one engine block; chunk_tokens is a multiple of it, from the unsharded geometry
    """

    tenant: str = ""
    engine_family: str
    kv_format: int
    fleet_salt: bytes = b""
    weights_digest: bytes
    weights_generation: int = 0
    config_digest: bytes
    compute_dtype: str
    kv_dtype: str
    kv_scales_digest: bytes = b""
    page_layout: tuple[tuple[str, int], ...] = ()
    page_format: str = ""
    block_tokens: int
    chunk_tokens: int
    hash_form: HashForm = OWN_CHAIN
    groups: tuple[Group, ...]
    pp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1
    shard_scheme: ShardScheme = ShardScheme.KV_HEADS

    def __post_init__(self) -> None:
        check_text("tenant", self.tenant, required=False)
        check_text("engine_family", self.engine_family)
        check_int("kv_format", self.kv_format, 1, U32)
        check_blob("fleet_salt", self.fleet_salt)
        check_digest("weights_digest", self.weights_digest)
        check_int("weights_generation", self.weights_generation, 0, U64)
        check_digest("config_digest", self.config_digest)
        check_text("compute_dtype", self.compute_dtype)
        check_text("kv_dtype", self.kv_dtype)
        if self.kv_scales_digest != b"":
            check_digest("kv_scales_digest", self.kv_scales_digest)
        check_layout("page_layout", self.page_layout)
        check_text("page_format", self.page_format, required=False)
        check_int("block_tokens", self.block_tokens, 1, U32)
        check_int("chunk_tokens", self.chunk_tokens, 1, U32)
        if self.chunk_tokens % self.block_tokens:
            expected = f"a multiple of block_tokens ({self.block_tokens})"
            raise NamespaceFieldError("chunk_tokens", expected, self.chunk_tokens)
        if not isinstance(self.hash_form, HashForm):
            raise NamespaceFieldError("hash_form", "a HashForm", self.hash_form)
        check_tuple("groups", self.groups, MAX_GROUPS)
        if not self.groups or not all(isinstance(group, Group) for group in self.groups):
            raise NamespaceFieldError("groups", "one Group or more", self.groups)
        check_int("pp_size", self.pp_size, 1, U16)
        check_int("pcp_size", self.pcp_size, 1, U16)
        check_int("dcp_size", self.dcp_size, 1, U16)
        check_enum("shard_scheme", self.shard_scheme, ShardScheme)
        if len(self.encode()) > MAX_DESCRIPTOR_BYTES:
            raise NamespaceFieldError("groups", f"a descriptor of at most {MAX_DESCRIPTOR_BYTES} bytes", self.groups)

    def encode(self) -> bytes:
        """The canonical bytes."""
        parts = []
        for tag, name in TAG_NAMES.items():
            codec = _CODECS[name]
            value = getattr(self, name)
            if codec.required or value != codec.default:
                encoded = codec.encode(value)
                parts.append(struct.pack("<HI", tag, len(encoded)) + encoded)
        return b"".join(parts)

    @property
    def id(self) -> bytes:
        """The 16 bytes that name this namespace on the wire."""
        return namespace_id(self.encode())

    @classmethod
    def decode(cls, data: bytes) -> NamespaceDescriptor:
        """Reads canonical bytes. Raises DescriptorError for anything else, also for an unknown tag."""
        values: dict[str, Any] = {}
        for tag, encoded in raw_fields(data).items():
            if tag not in TAG_NAMES:
                raise DescriptorError(f"tag {tag} is of a later version; raw_fields() and difference() still read it")
            name = TAG_NAMES[tag]
            try:
                values[name] = _CODECS[name].decode(encoded)
            except ValueError as error:
                raise DescriptorError(f"field {name} (tag {tag}) does not decode: {error}") from error
        missing = [name for name, codec in _CODECS.items() if codec.required and name not in values]
        if missing:
            raise DescriptorError(f"required fields are missing: {', '.join(missing)}")
        try:
            decoded = cls(**values)
        except NamespaceFieldError as error:
            raise DescriptorError(str(error)) from error
        if decoded.encode() != data:
            raise DescriptorError("not canonical: a field at its default is written out")
        return decoded

    def describe(self) -> dict[str, Any]:
        """A readable, JSON-ready form of every field: digests in hex, numbers with their names."""
        readable: dict[str, Any] = {}
        for name in TAG_NAMES.values():
            value = getattr(self, name)
            readable[name] = value.hex() if isinstance(value, bytes) else value
        known = KV_FORMATS.get(self.kv_format)
        readable["kv_format"] = f"{self.kv_format} ({known.describe() if known else 'unknown to this version'})"
        readable["page_layout"] = " ".join(f"{axis}={size}" for axis, size in self.page_layout)
        readable["hash_form"] = "own chain"
        if self.hash_form.algorithm is not None:
            seed = self.hash_form.seed.hex() or "none"
            readable["hash_form"] = f"{self.hash_form.algorithm.name.lower()}, seed {seed}"
        readable["groups"] = [
            {
                "kind": group.kind.name.lower(),
                "heads": group.heads,
                "head_size": group.head_size,
                "window": group.window,
                "state_sizes": list(group.state_sizes),
            }
            for group in self.groups
        ]
        readable["shard_scheme"] = self.shard_scheme.name.lower()
        return readable


@dataclass(frozen=True, slots=True)
class _Codec:
    """Bytes of one field. A required field has no default and is always written."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]
    required: bool = True
    default: Any = None


def _uint(code: str, *, default: int | None = None, kind: Callable[[int], int] = int) -> _Codec:
    """A fixed-width unsigned integer; code as in the struct module."""

    def decode(data: bytes) -> int:
        reader = FieldBytes(data)
        value = kind(reader.uint(code))
        reader.finish()
        return value

    return _Codec(lambda value: struct.pack("<" + code, value), decode, default is None, default)


def _text(*, default: str | None = None) -> _Codec:
    return _Codec(str.encode, bytes.decode, default is None, default)


def _blob(*, default: bytes | None = None) -> _Codec:
    return _Codec(bytes, bytes, default is None, default)


_CODECS: Final[dict[str, _Codec]] = {
    "tenant": _text(default=""),
    "engine_family": _text(),
    "kv_format": _uint("I"),
    "fleet_salt": _blob(default=b""),
    "weights_digest": _blob(),
    "weights_generation": _uint("Q", default=0),
    "config_digest": _blob(),
    "compute_dtype": _text(),
    "kv_dtype": _text(),
    "kv_scales_digest": _blob(default=b""),
    "page_layout": _Codec(encode_layout, decode_layout, False, ()),
    "page_format": _text(default=""),
    "block_tokens": _uint("I"),
    "chunk_tokens": _uint("I"),
    "hash_form": _Codec(encode_hash_form, decode_hash_form, False, OWN_CHAIN),
    "groups": _Codec(encode_groups, decode_groups),
    "pp_size": _uint("H", default=1),
    "pcp_size": _uint("H", default=1),
    "dcp_size": _uint("H", default=1),
    "shard_scheme": _uint("H", default=0, kind=ShardScheme),
}


def raw_fields(data: bytes) -> dict[int, bytes]:
    """Tag and bytes of every field, unknown tags too. Raises DescriptorError where the framing is not canonical."""
    if len(data) > MAX_DESCRIPTOR_BYTES:
        raise DescriptorError(f"expected at most {MAX_DESCRIPTOR_BYTES} bytes, found {len(data)}")
    found: dict[int, bytes] = {}
    at = 0
    previous = 0
    while at < len(data):
        if len(data) - at < 6:
            raise DescriptorError(f"truncated inside the head of a field at byte {at}")
        tag, length = struct.unpack_from("<HI", data, at)
        at += 6
        if tag <= previous:
            raise DescriptorError(f"tags must ascend from 1: found {tag} after {previous}")
        if length > len(data) - at:
            raise DescriptorError(f"tag {tag} says {length} bytes, {len(data) - at} are left")
        found[tag] = bytes(data[at : at + length])
        at += length
        previous = tag
    return found


def namespace_id(descriptor: bytes) -> bytes:
    """The 16-byte id of an encoded descriptor."""
    return hashlib.sha256(ID_PREFIX + descriptor).digest()[:16]


def field_names(tags: Iterable[int]) -> list[str]:
    """Names of tags, as a node reports them; a tag of a later version reads "tag N"."""
    return [TAG_NAMES.get(tag, f"tag {tag}") for tag in tags]


def difference(a: NamespaceDescriptor | bytes, b: NamespaceDescriptor | bytes) -> list[str]:
    """Names of the fields in which two namespaces differ, in tag order. Raises DescriptorError for malformed bytes."""
    left, right = (raw_fields(side if isinstance(side, bytes) else side.encode()) for side in (a, b))
    return field_names(tag for tag in sorted(left.keys() | right.keys()) if left.get(tag) != right.get(tag))
