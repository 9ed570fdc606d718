"""How many bytes of KV a model keeps for one token, from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dfkv_core.bounded import MAX_MODEL_CONFIG_BYTES, read_json

_TYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}


class ModelConfigError(ValueError):
    """The file does not say how large the KV of a token is."""


def read_kv_bytes_per_token(path: Path, kv_dtype: str = "auto") -> int:
    """path: config.json or the folder it is in. Raises ModelConfigError, OSError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = read_json(file, MAX_MODEL_CONFIG_BYTES)
    except ValueError as error:
        raise ModelConfigError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelConfigError(f"{file}: expected a JSON object")
    try:
        return kv_bytes_per_token(config, kv_dtype)
    except ModelConfigError as error:
        raise ModelConfigError(f"{file}: {error}") from None


def kv_bytes_per_token(config: Mapping[str, Any], kv_dtype: str = "auto") -> int:
    """Of all layers and heads together, which is what a cache stores for one token.

    Every layer counts as one that keeps all tokens, so this is an upper bound for models with sliding windows.
    kv_dtype: "auto" is the model's own type. Raises ModelConfigError.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = {**config, **text}
    layers = _whole(config, "num_hidden_layers")
    each = _type_bytes(config, kv_dtype)
    if config.get("kv_lora_rank"):  # latent attention: one compressed vector for all heads
        return layers * (_whole(config, "kv_lora_rank") + _whole(config, "qk_rope_head_dim")) * each
    heads = _whole(config, "num_attention_heads")
    kv_heads = _whole(config, "num_key_value_heads") if config.get("num_key_value_heads") else heads
    head_dim = _whole(config, "head_dim") if config.get("head_dim") else _whole(config, "hidden_size") // heads
    return 2 * layers * kv_heads * head_dim * each


def _type_bytes(config: Mapping[str, Any], kv_dtype: str) -> int:
    name = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16") if kv_dtype == "auto" else kv_dtype
    if name not in _TYPE_BYTES:
        raise ModelConfigError(f"the KV type {name!r} is not known; choose one of {', '.join(_TYPE_BYTES)}")
    return _TYPE_BYTES[name]


def _whole(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelConfigError(f"expected a positive number as {name}, found {value!r}; give --kv-bytes-per-token")
    return value
