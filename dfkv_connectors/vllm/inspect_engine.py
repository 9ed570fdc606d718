"""Reads identity and layout off a running vLLM worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from dfkv_core.config import VllmConnectorConfig

from .identity import derive_namespace, describe_page_format
from .layout import ChunkMap, EngineView, LayoutError, PagedLayout, choose_chunk_blocks, share_heads

_SHAREABLE_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")
_WEIGHTS_CACHE = Path.home() / ".cache" / "dfkv" / "weights"


def tp_rank() -> int:
    return int(get_tp_group().rank_in_group)


def inspect_engine(
    vllm_config: Any, kv_cache_config: Any, kv_caches: dict[str, Any], config: VllmConnectorConfig
) -> EngineView:
    """Worker thread, once, after the engine has allocated its KV cache. Reads model files.

    Raises LayoutError, IdentityError or WeightsError: what was found and what to configure.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise LayoutError(f"the model has {len(groups)} KV cache groups; only models with one can be shared")
    group = groups[0]
    spec = group.kv_cache_spec
    kind = type(spec).__name__
    if kind not in _SHAREABLE_SPECS:
        raise LayoutError(f"KV of kind {kind} cannot be shared; only {' and '.join(_SHAREABLE_SPECS)} can")
    page_format = describe_page_format(vllm_config, spec)
    layout = PagedLayout.of(kv_caches, group.layer_names, spec.block_size)
    tp, stage = get_tp_group(), get_pp_group().rank_in_group
    mla = kind == "MLAAttentionSpec"
    model_config = vllm_config.model_config
    total_heads = layout.shape[0] if mla else model_config.get_total_num_kv_heads()
    heads = share_heads(total_heads, tp.world_size, tp.rank_in_group, replicated=mla, granules=config.granules)
    per_granule = total_heads // heads.granules if heads.granules else total_heads
    # The unsharded geometry, so that the chunk does not depend on how this engine is spread over ranks.
    all_layers = max(model_config.get_total_num_hidden_layers(), layout.num_layers)
    chunk_blocks = choose_chunk_blocks(all_layers * per_granule * layout.head_bytes, config.chunk_bytes)
    chunks = ChunkMap(layout, heads, chunk_blocks, stage)
    descriptor = derive_namespace(vllm_config, spec, layout, heads, chunk_blocks, page_format, config, _WEIGHTS_CACHE)
    served = getattr(model_config, "served_model_name", None) or model_config.model
    label = str(served[0] if isinstance(served, list) else served)[:256]
    return EngineView(chunks, heads.writes, descriptor.encode(), label)
