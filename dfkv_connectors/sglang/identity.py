"""The namespaces of a running SGLang: one for each host pool, everything that must be equal for its pages to be valid elsewhere.

SGLang's page hash covers tokens, adapter and cache salt; what it leaves out is here. Derived from the engine and the
files it loaded; nobody types a hash or a geometry.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from dfkv_connectors import model_files
from dfkv_connectors.model_files import WEIGHTS_CACHE, IdentityError, model_directory, named_weights, read_config
from dfkv_core.bounded import MAX_MODEL_CONFIG_BYTES, TooLargeError, read_bytes
from dfkv_core.config import SglangConnectorConfig
from dfkv_core.kv_formats import KV_FORMATS, kv_format_for
from dfkv_core.namespace import Group, HashAlgorithm, HashForm, NamespaceDescriptor, ShardScheme
from dfkv_core.weights import adapter_digest, weights_digest

from .engine import EngineFacts, engine_facts, hash_covers_namespace
from .pools import PagePool


@dataclass(frozen=True)
class ModelIdentity:
    """The part of a namespace that is the same for every pool."""

    engine_version: str
    kv_format: int
    device: str
    weights: bytes
    config: bytes
    compute_dtype: str
    kv_cache_dtype: str
    scales: bytes
    fleet_salt: bytes


def identify_model(config: SglangConnectorConfig, *, watched: bool) -> ModelIdentity:
    """Reads the engine and the model's files. watched: updates of its weights are noticed.

    Raises IdentityError or WeightsError: what was found, what to configure.
    """
    if not watched:
        raise IdentityError("how this version of SGLang updates weights in place is not known to this dfkv")
    return model_identity(engine_facts(), config, hash_covers_namespace())


def model_identity(facts: EngineFacts, config: SglangConnectorConfig, seeded_hash: bool) -> ModelIdentity:
    """Raises IdentityError or WeightsError. seeded_hash: what hash_covers_namespace() says."""
    number = kv_format_for("sglang", "host", facts.version)
    if number is None:
        known = ", ".join(entry.describe() for entry in KV_FORMATS.values() if entry.engine_family == "sglang")
        raise IdentityError(f"the KV bytes of SGLang {facts.version} are not known to this dfkv; it knows {known}")
    if facts.multimodal:
        raise IdentityError("SGLang names images by 64 bits, too few to share their KV; start it with a text model")
    if facts.lora and not seeded_hash:
        raise IdentityError(f"SGLang {facts.version} leaves the adapter out of its page hash; LoRA cannot be shared")
    directory = _directory(facts, config)
    settings = {
        "overrides": facts.overrides,
        "rope": facts.rope,
        "quantization": facts.quantization,
        # Adapters loaded at start have ids made of name and path; those loaded later have random ones.
        "adapters": {name: _adapter(path).hex() for name, path in facts.adapters},
    }
    return ModelIdentity(
        engine_version=facts.version,
        kv_format=number,
        device=facts.device,
        weights=_weights(facts, config, directory),
        config=model_files.config_digest(read_config(directory) if directory is not None else {}, **settings),
        compute_dtype=facts.compute_dtype,
        kv_cache_dtype=facts.kv_cache_dtype,
        scales=_file_digest(facts.scales_path) if facts.scales_path else b"",
        fleet_salt=config.fleet_salt.encode(),
    )


def pool_descriptor(model: ModelIdentity, pool: PagePool) -> NamespaceDescriptor:
    """The namespace of one pool's pages. Raises NamespaceFieldError where it does not fit."""
    geometry = pool.geometry
    ranks = pool.ranks
    return NamespaceDescriptor(
        engine_family="sglang",
        kv_format=model.kv_format,
        fleet_salt=model.fleet_salt,
        weights_digest=model.weights,
        config_digest=model.config,
        compute_dtype=model.compute_dtype,
        kv_dtype=f"{model.kv_cache_dtype}:{geometry.dtype}",
        kv_scales_digest=model.scales,
        page_layout=geometry.axes,
        # The bytes of a page are the engine's own, so that another version of it is another format.
        page_format=f"{model.engine_version} {model.device} {pool.name} {geometry.form}",
        block_tokens=geometry.page_tokens,
        chunk_tokens=geometry.page_tokens,
        hash_form=HashForm(HashAlgorithm.SGLANG_PAGE),
        groups=(Group(geometry.kind, geometry.heads, geometry.head_size, state_sizes=geometry.state_sizes),),
        pp_size=ranks.pp_size,
        pcp_size=ranks.cp_size,
        dcp_size=ranks.dcp_size,
        shard_scheme=ShardScheme.KV_HEADS if geometry.heads_outermost else ShardScheme.RANK,
    )


def _directory(facts: EngineFacts, config: SglangConnectorConfig) -> Path | None:
    if config.weights_id and not Path(facts.model).is_dir():
        return None
    return model_directory(facts.model, facts.revision)


def _weights(facts: EngineFacts, config: SglangConnectorConfig, directory: Path | None) -> bytes:
    if config.weights_id:
        return named_weights(config.weights_id)
    if not facts.weights_from_files:
        raise IdentityError(f"load_format {facts.load_format!r} takes weights from elsewhere; set weights_id")
    assert directory is not None
    digest = weights_digest(directory, config.weights_digest, WEIGHTS_CACHE)
    # A draft model's KV lies in pools of its own, or in the target's pages: it is part of what is stored either way.
    for model, revision in facts.drafts:
        draft = weights_digest(model_directory(model, revision), config.weights_digest, WEIGHTS_CACHE)
        digest = hashlib.sha256(b"dfkv.weights.draft.1" + digest + draft).digest()
    return digest


def _adapter(path: str) -> bytes:
    return adapter_digest(model_directory(path, None))


def _file_digest(path: str) -> bytes:
    try:
        return hashlib.sha256(read_bytes(path, MAX_MODEL_CONFIG_BYTES)).digest()
    except (OSError, TooLargeError) as error:
        raise IdentityError(f"the KV scales {path} cannot be read ({error})") from None
