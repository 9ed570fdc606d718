"""What a request adds to its blocks' identity, and what keeps it from being shared."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dfkv_connectors.vllm.extras import (
    EXTRA_ADAPTER,
    EXTRA_CACHE_SALT,
    EXTRA_MULTIMODAL,
    AdapterDigests,
    NotShareableError,
    request_extras,
)


def request(**fields: Any) -> Any:
    return SimpleNamespace(**fields)


def adapter(directory: Path, content: bytes) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.safetensors").write_bytes(content)
    return directory


def lora(path: Path, number: int = 1, **fields: Any) -> Any:
    return SimpleNamespace(lora_name="name", lora_path=str(path), lora_int_id=number, **fields)


def test_adapter_content_is_identity_its_name_and_path_are_not(tmp_path: Path) -> None:
    one, same, other = (adapter(tmp_path / name, content) for name, content in (("a", b"x"), ("b", b"x"), ("c", b"y")))
    digests = [request_extras(request(lora_request=lora(path)), 16, AdapterDigests()) for path in (one, same, other)]
    assert digests[0] == digests[1] != digests[2]
    assert [(block, tag) for block, tag, _ in digests[0]] == [(0, EXTRA_ADAPTER)]


def test_an_adapter_whose_files_change_later_is_not_shared_any_more(tmp_path: Path) -> None:
    path = adapter(tmp_path / "a", b"old")
    adapters = AdapterDigests()
    request_extras(request(lora_request=lora(path)), 16, adapters)
    adapter(path, b"newer")
    with pytest.raises(NotShareableError, match="adapter_changed"):
        request_extras(request(lora_request=lora(path)), 16, adapters)
    # Loaded anew under another number it is known again.
    assert request_extras(request(lora_request=lora(path, number=2)), 16, adapters)


def test_salt_enters_the_first_block() -> None:
    assert request_extras(request(cache_salt="s"), 16, AdapterDigests()) == [(0, EXTRA_CACHE_SALT, b"s")]


def test_an_image_enters_every_block_it_overlaps_at_its_offset() -> None:
    feature = SimpleNamespace(identifier="img", mm_position=SimpleNamespace(offset=20, length=30))
    extras = request_extras(request(mm_features=[feature]), 16, AdapterDigests())
    assert [(block, tag) for block, tag, _ in extras] == [(b, EXTRA_MULTIMODAL) for b in (1, 2, 3)]
    assert [int.from_bytes(value[:8], "little", signed=True) for _, _, value in extras] == [4, -12, -28]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt_embeds": object()}, "prompt_embeds"),
        ({"resumable": True}, "resumable"),
        ({"pooling_params": object()}, "pooling"),
        ({"lora_request": lora(Path("/nowhere"))}, "adapter_unreadable"),
        ({"lora_request": lora(Path("/nowhere"), load_inplace=True)}, "adapter_loaded_in_place"),
        (
            {"mm_features": [SimpleNamespace(identifier="", mm_position=SimpleNamespace(offset=0, length=1))]},
            "multimodal_without_identifier",
        ),
    ],
)
def test_what_has_no_content_identity_is_not_shared(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotShareableError, match=reason):
        request_extras(request(**fields), 16, AdapterDigests())
