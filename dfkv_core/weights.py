"""Content digests of model weights and adapters: identity is what the files hold, never what they are called."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dfkv_core.bounded import MAX_TENSOR_INDEX_BYTES, parse_json, read_bytes, read_json

SAMPLE_BYTES = 4096
_READ_BYTES = 4 * 1024 * 1024
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")


class WeightsError(Exception):
    """The weights cannot be identified. The message says what was looked for and what to configure instead."""


@dataclass(frozen=True)
class _Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    begin: int  # absolute file offsets
    end: int


def weights_digest(
    directory: Path, mode: Literal["sampled", "full"] = "sampled", cache_dir: Path | None = None
) -> bytes:
    """SHA-256 (32 bytes) that changes when the weights in `directory` do.

    sampled: name, dtype, shape and three 4 KiB samples (start, middle, end) of every tensor of the safetensors files,
    in the order of tensor names, so that the way a checkpoint is cut into files does not matter.
    full: every byte of those files; the digest of a file is kept in `cache_dir`, keyed by path, size, mtime and inode.

    Raises WeightsError when there is no readable safetensors file. Reads files: call it off the engine's hot threads.
    """
    paths = _weight_files(directory)
    digest = hashlib.sha256(f"dfkv.weights.{mode}.1".encode())
    if mode == "full":
        for file_digest in sorted(_cached_file_digest(path, cache_dir) for path in paths):
            digest.update(file_digest)
        return digest.digest()
    tensors = sorted((tensor for path in paths for tensor in _tensors(path)), key=lambda t: (t.name, t.path.name))
    if not tensors:
        raise WeightsError(f"the safetensors files in {directory} hold no tensor; set weights_id")
    for tensor in tensors:
        _update_with_tensor(digest, tensor)
    return digest.digest()


def adapter_digest(directory: Path) -> bytes:
    """SHA-256 (32 bytes) over every byte of a PEFT adapter's weights and its configuration.

    Raises WeightsError when the directory holds no adapter weights.
    """
    digest = hashlib.sha256(b"dfkv.adapter.1")
    found = False
    for name in ("adapter_config.json", *_ADAPTER_WEIGHTS):
        path = directory / name
        if not path.is_file():
            continue
        found = found or name in _ADAPTER_WEIGHTS
        digest.update(struct.pack("<I", len(name)) + name.encode() + _file_digest(path))
    if not found:
        raise WeightsError(f"no adapter weights in {directory} (looked for {', '.join(_ADAPTER_WEIGHTS)})")
    return digest.digest()


def adapter_fingerprint(directory: Path) -> tuple[tuple[str, int, int, int], ...]:
    """(name, size, mtime_ns, inode) of the adapter's files: equal as long as nobody has touched them. No reads."""
    out = []
    for name in ("adapter_config.json", *_ADAPTER_WEIGHTS):
        try:
            stat = (directory / name).stat()
        except OSError:
            continue
        out.append((name, stat.st_size, stat.st_mtime_ns, stat.st_ino))
    return tuple(out)


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(read_json(index, MAX_TENSOR_INDEX_BYTES)["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise WeightsError(f"{index} is not a safetensors index ({error}); set weights_id") from None
        # Names come from a file: nothing outside the directory is read.
        paths = [directory / name for name in names if isinstance(name, str) and Path(name).name == name]
    else:
        paths = sorted(directory.glob("*.safetensors")) if directory.is_dir() else []
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise WeightsError(f"{directory} lacks {', '.join(missing[:3])}; complete it, or set weights_id")
    if not paths:
        raise WeightsError(
            f"no safetensors files in {directory}: KV is shared only between engines whose weights are known to be "
            "equal. Set weights_id to a text that names these weights and changes when they do"
        )
    return paths


def _tensors(path: Path) -> Iterator[_Tensor]:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            if header_bytes > min(MAX_TENSOR_INDEX_BYTES, size - 8):
                raise WeightsError(f"{path} is not a safetensors file: its header claims {header_bytes} bytes")
            header = parse_json(file.read(header_bytes))
            data = 8 + header_bytes
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                begin, end = entry["data_offsets"]
                if not 0 <= begin <= end <= size - data:
                    raise WeightsError(f"{path}: tensor {name!r} lies outside the file")
                yield _Tensor(name, entry["dtype"], tuple(entry["shape"]), path, data + begin, data + end)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise WeightsError(f"{path} cannot be read as safetensors ({error}); set weights_id") from None


def _update_with_tensor(digest: hashlib._Hash, tensor: _Tensor) -> None:
    record = json.dumps([tensor.name, tensor.dtype, tensor.shape, tensor.end - tensor.begin]).encode()
    digest.update(struct.pack("<I", len(record)) + record)
    length = tensor.end - tensor.begin
    with tensor.path.open("rb") as file:
        if length <= 3 * SAMPLE_BYTES:
            offsets = [(tensor.begin, length)]
        else:
            middle = tensor.begin + length // 2 - SAMPLE_BYTES // 2
            offsets = [(at, SAMPLE_BYTES) for at in (tensor.begin, middle, tensor.end - SAMPLE_BYTES)]
        for offset, count in offsets:
            file.seek(offset)
            digest.update(file.read(count))


def _file_digest(path: Path) -> bytes:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(_READ_BYTES):
                digest.update(piece)
    except OSError as error:
        raise WeightsError(f"{path} cannot be read ({error})") from None
    return digest.digest()


def _cached_file_digest(path: Path, cache_dir: Path | None) -> bytes:
    if cache_dir is None:
        return _file_digest(path)
    stat = path.stat()
    key = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}".encode()
    kept = cache_dir / hashlib.sha256(key).hexdigest()
    try:
        digest = read_bytes(kept, 32)
        if len(digest) == 32:
            return digest
    except (OSError, ValueError):
        pass
    digest = _file_digest(path)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        temporary = kept.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(digest)
        temporary.replace(kept)
    except OSError:
        pass  # a digest that cannot be kept is computed again next time
    return digest
