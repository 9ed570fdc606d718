"""The namespace of a running vLLM engine: everything that must be equal for its KV to be valid elsewhere.

Derived from the engine's configuration and the files it loaded; nobody types a hash or a geometry.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dfkv_connectors import model_files
from dfkv_connectors.model_files import IdentityError, model_directory, named_weights, read_config, rope_regime
from dfkv_core.config import VllmConnectorConfig
from dfkv_core.kv_formats import KV_FORMATS, kv_format_for
from dfkv_core.namespace import Group, GroupKind, HashForm, NamespaceDescriptor, ShardScheme
from dfkv_core.weights import WeightsError, weights_digest

from .layout import HeadShare, PagedLayout


def config_digest(model_config: Any, directory: Path) -> bytes:
    """SHA-256 of config.json, with the overrides that the engine was started with. Raises IdentityError."""
    config = read_config(directory)
    overrides = model_config.hf_overrides
    if callable(overrides):
        raise IdentityError("hf_overrides is a function, which has no identity; pass its values as a dictionary")
    return model_files.config_digest(
        config,
        overrides=dict(overrides or {}),
        rope=rope_regime(model_config.hf_text_config, model_config.max_model_len),
        quantization=str(model_config.quantization or ""),
    )


def derive_namespace(
    vllm_config: Any,
    spec: Any,
    layout: PagedLayout,
    heads: HeadShare,
    chunk_blocks: int,
    page_format: str,
    config: VllmConnectorConfig,
    cache_dir: Path | None,
) -> NamespaceDescriptor:
    """Reads model files: call it once, at start. Raises IdentityError or WeightsError."""
    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    readable = Path(str(model_config.model)).is_dir()
    directory = None
    if readable or not config.weights_id:
        directory = model_directory(str(model_config.model), model_config.revision)
    if config.weights_id:
        weights = named_weights(config.weights_id)
    else:
        assert directory is not None
        weights = weights_digest(directory, config.weights_digest, cache_dir)
    if directory is not None:
        config_bytes = config_digest(model_config, directory)
    else:
        config_bytes = hashlib.sha256(
            json.dumps(model_config.hf_config.to_dict(), sort_keys=True, default=str).encode()
        ).digest()
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise IdentityError("calculate_kv_scales makes KV depend on earlier requests; such KV cannot be shared")
    window = int(getattr(spec, "sliding_window", None) or 0)
    kind = GroupKind.MLA if heads.granules == 0 else GroupKind.SLIDING_WINDOW if window else GroupKind.FULL_ATTENTION
    return NamespaceDescriptor(
        engine_family="vllm",
        kv_format=kv_format(),
        fleet_salt=config.fleet_salt.encode(),
        weights_digest=weights,
        config_digest=config_bytes,
        compute_dtype=str(model_config.dtype).removeprefix("torch."),
        kv_dtype=f"{vllm_config.cache_config.cache_dtype}:{layout.dtype}",
        # One head of a page: its tokens by its content, in the order that stands in memory.
        page_layout=(("N", layout.shape[1]), ("C", layout.shape[2])),
        page_format=page_format,
        block_tokens=layout.block_tokens,
        chunk_tokens=layout.block_tokens * chunk_blocks,
        hash_form=HashForm(),
        groups=(Group(kind, heads.total_heads, int(spec.head_size), window),),
        pp_size=parallel.pipeline_parallel_size,
        pcp_size=getattr(parallel, "prefill_context_parallel_size", 1),
        dcp_size=getattr(parallel, "decode_context_parallel_size", 1),
        shard_scheme=ShardScheme.KV_HEADS,
    )


def kv_format() -> int:
    """The number of this vLLM's KV bytes in the append-only table. Raises IdentityError for versions not in it."""
    found = version("vllm")
    number = kv_format_for("vllm", "cpu", found)
    if number is None:
        known = ", ".join(entry.describe() for entry in KV_FORMATS.values() if entry.engine_family == "vllm")
        raise IdentityError(f"the KV bytes of vLLM {found} are not known to this dfkv; it knows {known}")
    return number


def describe_page_format(vllm_config: Any, spec: Any) -> str:
    """What the opaque bytes of a page depend on beyond its shape: the instruction set on a CPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise IdentityError(f"KV on {current_platform.device_type} is not in host memory, which is all this dfkv moves")
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(
        vllm_config.model_config.dtype, spec.block_size, spec.head_size, vllm_config.cache_config.cache_dtype
    )
    return f"cpu:{current_platform.get_cpu_architecture().name.lower()}:{isa}"


__all__ = [
    "IdentityError",
    "WeightsError",
    "config_digest",
    "derive_namespace",
    "describe_page_format",
    "kv_format",
]
