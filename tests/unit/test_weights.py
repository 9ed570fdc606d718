"""Weights digests: content, never names or the way a checkpoint is cut into files."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from dfkv_core.weights import SAMPLE_BYTES, WeightsError, weights_digest


def write(path: Path, tensors: dict[str, bytes]) -> None:
    header, offset = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + b"".join(tensors.values()))


def model(directory: Path, tensors: dict[str, bytes], files: int = 1) -> Path:
    directory.mkdir()
    names = list(tensors)
    for index in range(files):
        write(directory / f"model-{index}.safetensors", {n: tensors[n] for n in names[index::files]})
    return directory


BIG = bytes(range(256)) * 256  # 64 KiB
TENSORS = {"a": BIG, "b": b"small", "c": BIG[::-1]}


def test_cut_and_directory_do_not_matter(tmp_path: Path) -> None:
    one, three = model(tmp_path / "one", TENSORS), model(tmp_path / "three", TENSORS, files=3)
    assert weights_digest(one) == weights_digest(three)


@pytest.mark.parametrize("at", [0, len(BIG) // 2, len(BIG) - 1])
def test_a_sampled_byte_changes_the_digest(tmp_path: Path, at: int) -> None:
    changed = bytearray(BIG)
    changed[at] ^= 1
    assert weights_digest(model(tmp_path / "x", TENSORS)) != weights_digest(
        model(tmp_path / "y", TENSORS | {"a": bytes(changed)})
    )


def test_names_and_sizes_change_the_digest(tmp_path: Path) -> None:
    digests = {
        weights_digest(model(tmp_path / str(i), tensors))
        for i, tensors in enumerate(
            [TENSORS, {"A": BIG, "b": b"small", "c": BIG[::-1]}, TENSORS | {"b": b"smal"}, TENSORS | {"d": b""}]
        )
    }
    assert len(digests) == 4


def test_only_full_mode_sees_a_byte_between_the_samples(tmp_path: Path) -> None:
    changed = bytearray(BIG)
    changed[SAMPLE_BYTES + 100] ^= 1
    one, two = model(tmp_path / "one", TENSORS), model(tmp_path / "two", TENSORS | {"a": bytes(changed)})
    assert weights_digest(one) == weights_digest(two)
    assert weights_digest(one, "full") != weights_digest(two, "full")


def test_kept_file_digests_follow_the_file(tmp_path: Path) -> None:
    directory = model(tmp_path / "m", TENSORS)
    cache = tmp_path / "cache"
    first = weights_digest(directory, "full", cache)
    assert weights_digest(directory, "full", cache) == first
    write(directory / "model-0.safetensors", TENSORS | {"b": b"other"})
    assert weights_digest(directory, "full", cache) != first


def test_an_index_names_the_files_that_count(tmp_path: Path) -> None:
    directory = model(tmp_path / "m", TENSORS)
    digest = weights_digest(directory)
    write(directory / "consolidated.safetensors", TENSORS)
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(TENSORS, "model-0.safetensors")})
    )
    assert weights_digest(directory) == digest


@pytest.mark.parametrize("content", [b"", b"short", struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 2) + b"[]"])
def test_files_that_are_not_safetensors_say_what_to_do(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError):
        weights_digest(tmp_path)


def test_no_files_ask_for_weights_id(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="weights_id"):
        weights_digest(tmp_path)


def test_an_index_that_points_outside_its_directory_reads_nothing_there(tmp_path: Path) -> None:
    directory = model(tmp_path / "m", TENSORS)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    write(tmp_path / "secret.safetensors", TENSORS)
    with pytest.raises(WeightsError):
        weights_digest(directory)
