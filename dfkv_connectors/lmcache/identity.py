"""The namespaces of LMCache's objects: everything that must be equal for one to be valid on another server.

LMCache's keys hold tokens, salt, rank and the model's name; what they leave out is here. Content is what identifies a
model: its files are found on this machine by its name, or weights_id says what they are.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from typing import Any

from dfkv_connectors.model_files import (
    WEIGHTS_CACHE,
    IdentityError,
    config_digest,
    model_directory,
    named_weights,
    read_config,
)
from dfkv_core.config import LmcacheConnectorConfig
from dfkv_core.host import cpu_flags
from dfkv_core.kv_formats import KV_FORMATS, kv_format_for
from dfkv_core.namespace import Group, GroupKind, HashAlgorithm, HashForm, NamespaceDescriptor, ShardScheme
from dfkv_core.namespace_fields import MAX_AXES
from dfkv_core.weights import weights_digest

_ENGINES = ("vllm", "sglang")
# What CPU kernels choose the order of elements in a page by.
_PACKING_FLAGS = ("amx_bf16", "amx_tile", "asimd", "avx2", "avx512_bf16", "avx512f")
_EIGHT_BITS = frozenset({"uint8", "int8"})

Fingerprint = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True)
class Layout:
    """Shapes and data types of the tensors that lie one behind the other in an object."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    object_bytes: int

    @classmethod
    def of(cls, shapes: Sequence[Any], dtypes: Sequence[Any]) -> Layout | None:
        """Of torch's shapes and data types; None where there are none."""
        if not shapes:
            return None
        sizes = tuple(tuple(int(size) for size in shape) for shape in shapes)
        total = sum(prod(shape) * int(dtype.itemsize) for shape, dtype in zip(sizes, dtypes, strict=True))
        return cls(sizes, tuple(str(dtype).removeprefix("torch.") for dtype in dtypes), total)

    @classmethod
    def of_object(cls, metadata: Any) -> Layout | None:
        """Of the metadata of LMCache's MemoryObj."""
        if metadata.shapes is not None:
            return cls.of(metadata.shapes, metadata.dtypes)
        return cls.of([metadata.shape], [metadata.dtype])

    @property
    def is_tensor(self) -> bool:
        """Not a flat run of bytes, as LMCache's serializers make them."""
        return all(len(shape) > 1 for shape in self.shapes)

    def describe(self) -> str:
        return ", ".join(
            f"{'x'.join(map(str, shape))} {dtype}" for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )


@dataclass(frozen=True)
class ObjectKind:
    """Whose objects these are, beyond model and layout."""

    mode: str
    """Of LMCache: mp (its server) or classic (inside an engine)."""
    hash_algorithm: HashAlgorithm
    lmcache_version: str
    form: str
    """What the order of an object's elements depends on."""


@dataclass(frozen=True)
class ModelIdentity:
    """The part of a namespace that is the same for every layout of a model."""

    name: str
    weights: bytes
    config: bytes
    directory: Path | None = None
    fingerprint: Fingerprint = ()

    def is_current(self) -> bool:
        """Whether nobody has touched the model's files since they were read. A few calls of the file system."""
        return self.directory is None or self.fingerprint == files_fingerprint(self.directory)


def identify_model(name: str, config: LmcacheConnectorConfig) -> ModelIdentity:
    """Reads the files of the model that LMCache calls `name`. Raises IdentityError or WeightsError: what to configure."""
    engines = {engine: _version(engine) for engine in _ENGINES}
    if config.weights_id:
        # One id may stand for several models of a server, which their names tell apart.
        settings = {"name": name, "engines": engines}
        return ModelIdentity(name, named_weights(config.weights_id), config_digest({}, **settings))
    directory = find_model(name)
    fingerprint = files_fingerprint(directory)
    return ModelIdentity(
        name,
        weights_digest(directory, config.weights_digest, WEIGHTS_CACHE),
        config_digest(read_config(directory), engines=engines),
        directory,
        fingerprint,
    )


def find_model(name: str) -> Path:
    """The directory of a model's files. Raises IdentityError where it is not certain that the engine loaded these."""
    path = Path(name).expanduser()
    if path.is_dir() and not path.is_absolute():
        raise IdentityError(
            f"model {name!r} is a relative path, and the engine's may start elsewhere; name an absolute one, or set weights_id"
        )
    directory = model_directory(name, None)
    if not path.is_dir():
        revisions = sorted(each.name for each in directory.parent.iterdir())
        if len(revisions) > 1:
            raise IdentityError(
                f"{len(revisions)} revisions of {name!r} are on this machine, and LMCache does not say which one is served; "
                "set weights_id"
            )
    return directory


def files_fingerprint(directory: Path) -> Fingerprint:
    """(name, size, mtime_ns, inode) of a model's files: equal as long as nobody has touched them."""
    found = []
    for path in sorted(directory.iterdir()):
        if path.suffix in (".safetensors", ".json"):
            stat = path.stat()
            found.append((path.name, stat.st_size, stat.st_mtime_ns, stat.st_ino))
    return tuple(found)


def describe_device(device: str) -> str:
    """What the order of elements depends on beyond shapes: a CPU's kernels pack by its instruction set."""
    if device != "cpu":
        return device
    flags = cpu_flags()
    return " ".join([device, platform.machine(), *(flag for flag in _PACKING_FLAGS if flag in flags)])


def layout_refusal(layout: Layout, kv_cache_dtype: str) -> str:
    """Why objects of an engine cannot be shared in this layout, empty where they can."""
    if not layout.is_tensor:
        return "LMCache's serializers are not part of its keys; take \"serde\" out of the adapter's configuration"
    if not kv_cache_dtype and not _EIGHT_BITS.isdisjoint(layout.dtypes):
        return "KV in 8 bits has several formats; set kv_cache_dtype to that of the engines (fp8_e4m3, fp8_e5m2, ...)"
    return ""


def object_descriptor(
    model: ModelIdentity, layout: Layout, config: LmcacheConnectorConfig, objects: ObjectKind
) -> NamespaceDescriptor:
    """The namespace of a model's objects of one layout. Raises IdentityError, or NamespaceFieldError where it does not fit."""
    number = kv_format_for("lmcache", objects.mode, objects.lmcache_version)
    if number is None:
        known = ", ".join(entry.describe() for entry in KV_FORMATS.values() if entry.engine_family == "lmcache")
        raise IdentityError(
            f"the objects of LMCache {objects.lmcache_version} are not known to this dfkv; it knows {known}"
        )
    axes, dtypes = _axes(layout), ",".join(dict.fromkeys(layout.dtypes))
    return NamespaceDescriptor(
        engine_family="lmcache",
        kv_format=number,
        fleet_salt=config.fleet_salt.encode(),
        weights_digest=model.weights,
        config_digest=model.config,
        # LMCache does not know it; without a format of 8 bits it is that of the cache.
        compute_dtype=dtypes,
        kv_dtype=f"{config.kv_cache_dtype}:{dtypes}",
        page_layout=axes,
        # The bytes are LMCache's own, so that another version of it is another format.
        page_format=f"{objects.lmcache_version} {objects.form}",
        # An object's tokens are an axis of its layout.
        block_tokens=1,
        chunk_tokens=1,
        hash_form=HashForm(objects.hash_algorithm),
        groups=(Group(GroupKind.STATE, state_sizes=(layout.object_bytes,)),),
        shard_scheme=ShardScheme.RANK,
    )


def _axes(layout: Layout) -> tuple[tuple[str, int], ...]:
    """Sizes by "tensor.axis", and each tensor's data type. Those of many tensors are one digest."""
    axes = []
    for index, (shape, dtype) in enumerate(zip(layout.shapes, layout.dtypes, strict=True)):
        axes += [(f"{index}.{axis}", size) for axis, size in enumerate(shape)]
        axes.append((f"{index} {dtype}", 1))
    if len(axes) <= MAX_AXES:
        return tuple(axes)
    return ((f"sha256 {hashlib.sha256(layout.describe().encode()).hexdigest()}", 1),)


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
