"""What the running SGLang says about itself: its arguments and its model's configuration, in every supported version."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from dfkv_connectors.model_files import IdentityError, rope_regime
from dfkv_core.bounded import parse_json

# Formats whose tensors are those of the model's files. Others make weights up or fetch them from somewhere else.
_LOAD_FORMATS = frozenset({"auto", "safetensors", "fastsafetensors", "layered", "mistral"})


@dataclass(frozen=True)
class EngineFacts:
    """Everything but the pools that the values of KV depend on. Texts are empty where the engine says nothing."""

    version: str
    device: str
    model: str
    revision: str | None
    compute_dtype: str
    kv_cache_dtype: str
    quantization: str
    overrides: dict[str, Any]
    rope: str
    load_format: str
    scales_path: str
    drafts: tuple[tuple[str, str | None], ...]  # path and revision of a speculative draft model
    adapters: tuple[tuple[str, str], ...]  # name and path of LoRA adapters loaded at start; their ids repeat
    lora: bool
    multimodal: bool

    @property
    def weights_from_files(self) -> bool:
        return self.load_format in _LOAD_FORMATS


def engine_facts() -> EngineFacts:
    """Of the process this runs in. Reads the model's configuration. Raises IdentityError where there is no server."""
    arguments = _server_arguments()

    def get(name: str, default: Any = None) -> Any:
        value = arguments(name)
        return default if value is None else value

    model = _model_config()
    if get("decrypted_config_file"):
        raise IdentityError(
            "decrypted_config_file replaces the model's config.json; such an engine cannot be identified"
        )
    if _weight_version() not in (None, get("weight_version")):
        raise IdentityError("the weights were updated in place before the backend was attached; restart the server")
    draft = get("speculative_draft_model_path")
    return EngineFacts(
        version=version("sglang"),
        device=str(get("device", "")),
        model=str(get("model_path", "")),
        revision=get("revision"),
        compute_dtype=str(getattr(model, "dtype", None) or get("dtype", "auto")).removeprefix("torch."),
        kv_cache_dtype=str(get("kv_cache_dtype", "auto")),
        quantization=":".join(str(get(name, "")) for name in ("quantization", "torchao_config")),
        overrides=_json_object(get("json_model_override_args", "{}")),
        rope=rope_regime(getattr(model, "hf_text_config", None), int(getattr(model, "context_len", None) or 0)),
        load_format=str(get("load_format", "auto")).lower(),
        scales_path=str(get("quantization_param_path", "")),
        drafts=((str(draft), get("speculative_draft_model_revision")),) if draft else (),
        adapters=tuple(sorted(_adapters(get("lora_paths", ())))),
        lora=bool(get("enable_lora", False) or get("lora_paths")),
        multimodal=bool(getattr(model, "is_multimodal", False)),
    )


def hash_covers_namespace() -> bool:
    """Whether SGLang's page hash covers a request's adapter and cache salt; older versions hash tokens alone."""
    try:
        from sglang.srt.mem_cache.utils import storage_namespace_seed
    except ImportError:
        return False
    return callable(storage_namespace_seed)


def _server_arguments() -> Callable[[str], Any]:
    """The arguments in effect, by name."""
    try:
        from sglang.srt.runtime_context import get_server_args
    except ImportError:
        from sglang.srt.server_args import get_global_server_args as get_server_args
    try:
        arguments = get_server_args()
    except Exception as error:
        raise IdentityError(f"this process serves no model ({error}); set weights_id") from None
    try:  # newer versions keep what was typed and what is in effect apart
        from sglang.srt.arg_groups.overrides import resolution_result
    except ImportError:
        return lambda name: getattr(arguments, name, None)
    return lambda name: resolution_result(arguments, name, None)


def _model_config() -> Any:
    """SGLang's ModelConfig of this process, None where the model has no files."""
    try:
        if (context := sys.modules.get("sglang.srt.runtime_context")) and hasattr(context, "process_model_config"):
            return context.process_model_config()
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.server_args import get_global_server_args

        return ModelConfig.from_server_args(get_global_server_args())
    except Exception:
        return None


def _weight_version() -> Any:
    """The version that the last update of weights gave, where SGLang keeps it; the one of the start without updates."""
    try:
        from sglang.srt.runtime_context import get_serving

        return get_serving().weight_version
    except Exception:
        return None


def _json_object(text: Any) -> dict[str, Any]:
    value = parse_json(text) if isinstance(text, str) else text
    return value if isinstance(value, dict) else {}


def _adapters(paths: Any) -> Iterable[tuple[str, str]]:
    """lora_paths in any of its forms: {name: path}, "name=path" texts, dictionaries, LoRARef objects."""
    if isinstance(paths, dict):
        paths = [f"{name}={path}" for name, path in paths.items()]
    for each in paths:
        if isinstance(each, str):
            name, equals, path = each.partition("=")
            yield (name, path) if equals else (each, each)
        elif isinstance(each, dict):
            yield str(each.get("lora_name")), str(each.get("lora_path"))
        else:
            yield str(each.lora_name), str(each.lora_path)
