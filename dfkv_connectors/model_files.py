"""What an engine's model is, read from the files it loaded: shared by the connectors. Reads files; any thread."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dfkv_core.bounded import MAX_MODEL_CONFIG_BYTES, read_json

# Keys of config.json that say nothing about the values of KV. Append only.
CONFIG_IGNORED = frozenset(
    {
        "_name_or_path",
        "architectures_comment",
        "transformers_version",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "id2label",
        "label2id",
    }
)

WEIGHTS_CACHE = Path.home() / ".cache" / "dfkv" / "weights"


class IdentityError(Exception):
    """The engine cannot be identified well enough to share. The message says what to configure."""


def model_directory(model: str, revision: str | None) -> Path:
    """The directory that an engine loaded a model from: a path, or a snapshot in the hub's local cache."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception as error:
        raise IdentityError(f"no local files of model {model!r} ({type(error).__name__}); set weights_id") from None


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a model. Raises IdentityError."""
    path = directory / "config.json"
    try:
        config = read_json(path, MAX_MODEL_CONFIG_BYTES)
        if not isinstance(config, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        raise IdentityError(f"{path} cannot be read ({error})") from None
    return config


def config_digest(config: Mapping[str, Any], **settings: Any) -> bytes:
    """SHA-256 of config.json less CONFIG_IGNORED, and of the settings that the engine was started with.

    Raises IdentityError for a setting that cannot be written as JSON.
    """
    record = {"config": {key: value for key, value in config.items() if key not in CONFIG_IGNORED}, **settings}
    try:
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).digest()
    except TypeError as error:
        raise IdentityError(f"an override of the model's configuration cannot be written as JSON ({error})") from None


def rope_regime(text_config: Any, max_tokens: int) -> str:
    """Long-context rope variants choose their factors by the declared maximum, so that it changes KV there only."""
    rope = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    kind = str(rope.get("rope_type") or rope.get("type") or "") if isinstance(rope, dict) else ""
    if kind not in {"longrope", "su", "dynamic"}:
        return ""
    return f"{kind}:{max_tokens}"


def named_weights(weights_id: str) -> bytes:
    """The digest that stands for weights whose files cannot be read: of the name that the operator gave them."""
    return hashlib.sha256(b"dfkv.weights.id\0" + weights_id.encode()).digest()
