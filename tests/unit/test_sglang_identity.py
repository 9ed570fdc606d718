"""SGLang's namespaces: each field alone makes another one, and what cannot be identified is not shared."""

import dataclasses
import hashlib
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dfkv_connectors import sglang
from dfkv_connectors.model_files import IdentityError
from dfkv_connectors.pending import Pending
from dfkv_connectors.sglang import weights_watch
from dfkv_connectors.sglang.engine import EngineFacts
from dfkv_connectors.sglang.identity import ModelIdentity, model_identity, pool_descriptor
from dfkv_connectors.sglang.leases import MOST, LeaseBook
from dfkv_connectors.sglang.pools import Geometry, PagePool, Ranks
from dfkv_core.config import SglangConnectorConfig
from dfkv_core.namespace import GroupKind, difference

CONFIG = SglangConnectorConfig.model_validate({"weights_id": "these weights"})


def facts(model: Path, **changes: Any) -> EngineFacts:
    values: dict[str, Any] = {
        "version": "0.5.23",
        "device": "cpu",
        "model": str(model),
        "revision": None,
        "compute_dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "quantization": "",
        "overrides": {},
        "rope": "",
        "load_format": "auto",
        "scales_path": "",
        "drafts": (),
        "adapters": (),
        "lora": False,
        "multimodal": False,
    }
    return EngineFacts(**values | changes)


def pool(**changes: Any) -> PagePool:
    ranks = changes.pop("ranks", Ranks())
    name = changes.pop("name", "kv")
    geometry: dict[str, Any] = {
        "form": "MHATokenToKVPoolHost page_first runs from layer 0",
        "dtype": "bfloat16",
        "axes": (("layers", 4), ("slots", 64), ("heads", 4), ("head size", 32), ("runs", 2), ("run bytes", 65536)),
        "page_tokens": 64,
        "kind": GroupKind.FULL_ATTENTION,
        "heads": 4,
        "head_size": 32,
        "state_sizes": (),
        "heads_outermost": False,
    }
    return PagePool(name, None, ranks, Geometry(**geometry | changes), (0,), (65536, 65536), 64)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 256}))
    return tmp_path


def test_each_field_alone_makes_another_namespace(model: Path) -> None:
    base = model_identity(facts(model), CONFIG, True)
    names = {pool_descriptor(base, pool()).id}
    changed: list[tuple[ModelIdentity, PagePool, str]] = [
        (dataclasses.replace(base, weights=hashlib.sha256(b"others").digest()), pool(), "weights_digest"),
        (dataclasses.replace(base, config=hashlib.sha256(b"others").digest()), pool(), "config_digest"),
        (dataclasses.replace(base, compute_dtype="float16"), pool(), "compute_dtype"),
        (dataclasses.replace(base, kv_cache_dtype="fp8_e5m2"), pool(), "kv_dtype"),
        (dataclasses.replace(base, scales=hashlib.sha256(b"scales").digest()), pool(), "kv_scales_digest"),
        (dataclasses.replace(base, fleet_salt=b"ours"), pool(), "fleet_salt"),
        (dataclasses.replace(base, engine_version="0.5.22"), pool(), "page_format"),
        (dataclasses.replace(base, device="cuda"), pool(), "page_format"),
        (base, pool(name="draft"), "page_format"),
        (base, pool(form="MHATokenToKVPoolHost page_head runs from layer 0"), "page_format"),
        (base, pool(form="MHATokenToKVPoolHost page_first flat from layer 0"), "page_format"),
        (base, pool(form="MHATokenToKVPoolHost page_first runs from layer 2"), "page_format"),
        (base, pool(dtype="float16"), "kv_dtype"),
        (base, pool(axes=(("layers", 5),)), "page_layout"),
        (base, pool(page_tokens=32), "block_tokens"),
        (base, pool(heads=2), "groups"),
        (base, pool(kind=GroupKind.MLA), "groups"),
        (base, pool(state_sizes=(1, 2)), "groups"),
        (base, pool(heads_outermost=True), "shard_scheme"),
        (base, pool(ranks=Ranks(pp_size=2)), "pp_size"),
        (base, pool(ranks=Ranks(cp_size=2)), "pcp_size"),
        (base, pool(ranks=Ranks(dcp_size=2)), "dcp_size"),
    ]
    for identity, variant, field in changed:
        descriptor = pool_descriptor(identity, variant)
        assert field in difference(pool_descriptor(base, pool()), descriptor), field
        names.add(descriptor.id)
    assert len(names) == len(changed) + 1


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization": "fp8:"},
        {"overrides": {"rope_theta": 1}},
        {"rope": "longrope:4096"},
    ],
)
def test_settings_are_part_of_the_configuration(model: Path, changes: dict[str, Any]) -> None:
    base = model_identity(facts(model), CONFIG, True)
    assert model_identity(facts(model, **changes), CONFIG, True).config != base.config


def test_adapters_loaded_at_start_are_named_by_content(model: Path, tmp_path: Path) -> None:
    """SGLang makes their ids of name and path, so that the page hash says nothing of what is in them."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(b"one")
    with_lora = facts(model, lora=True, adapters=(("a", str(adapter)),))
    first = model_identity(with_lora, CONFIG, True)
    weights.write_bytes(b"two")
    assert model_identity(with_lora, CONFIG, True).config != first.config
    assert model_identity(facts(model, lora=True), CONFIG, True).config != first.config


@pytest.mark.parametrize(
    ("changes", "seeded", "message"),
    [
        ({"version": "0.6.0"}, True, "not known"),
        ({"multimodal": True}, True, "64 bits"),
        ({"lora": True}, False, "adapter"),
        ({"scales_path": "/nowhere/scales.json"}, True, "cannot be read"),
    ],
)
def test_what_cannot_be_identified_is_refused(model: Path, changes: dict[str, Any], seeded: bool, message: str) -> None:
    with pytest.raises(IdentityError, match=message):
        model_identity(facts(model, **changes), CONFIG, seeded)


def test_weights_from_elsewhere_need_a_name(model: Path) -> None:
    with pytest.raises(IdentityError, match="load_format"):
        model_identity(facts(model, load_format="dummy"), SglangConnectorConfig.model_validate({}), True)
    named = model_identity(facts(model, load_format="dummy"), CONFIG, True)
    assert (
        named.weights
        != model_identity(facts(model), SglangConnectorConfig.model_validate({"weights_id": "other"}), True).weights
    )


def test_ranks_read_what_the_version_offers() -> None:
    old = types.SimpleNamespace(tp_rank=1, tp_size=2, is_mla_model=False)
    assert Ranks.of(old) == Ranks(tp_rank=1, tp_size=2)
    new = types.SimpleNamespace(
        tp_rank=1, tp_size=2, pp_rank=1, pp_size=3, attn_cp_rank=1, attn_cp_size=2, dcp_rank=0, dcp_size=1,
        is_mla_model=True, tp_lcm_size=8, should_split_heads=True,
    )  # fmt: skip
    assert Ranks.of(new) == Ranks(1, 2, 1, 3, 1, 2, 0, 1, True, 4)
    assert Ranks.of(None) == Ranks()


def test_identity_is_waited_for_no_longer_than_asked() -> None:
    pending = Pending(_raise(IdentityError("set weights_id")))
    assert pending.wait(5) is None
    assert pending.error == "set weights_id"


def _raise(error: Exception) -> Callable[[], ModelIdentity]:
    def identify() -> ModelIdentity:
        raise error

    return identify


def test_leases_end_with_the_load_or_with_newer_ones() -> None:
    released: list[Any] = []
    book = LeaseBook(released.append)
    book.keep(b"a", [("node", 1)])
    book.loaded(b"b")
    assert released == []
    book.loaded(b"a")
    book.loaded(b"a")
    assert released == [[("node", 1)]]
    for index in range(MOST + 1):
        book.keep(index.to_bytes(2, "little"), [("node", index)])
    assert len(released) == 2
    book.close()
    assert len(released) == 2 + MOST


def test_updates_of_weights_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class ModelRunner:
        def update_weights_from_disk(self) -> str:
            return f"update {weights_watch.updates()}"

        def forward(self) -> None:
            """Not an update."""

    module = types.ModuleType("sglang.srt.model_executor.model_runner")
    monkeypatch.setattr(module, "ModelRunner", ModelRunner, raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert weights_watch.watch()
    assert weights_watch.watch()  # wraps once
    before = weights_watch.updates()
    ModelRunner().forward()
    assert weights_watch.updates() == before
    assert ModelRunner().update_weights_from_disk() == f"update {before + 1}"  # counted before it begins
    assert weights_watch.updates() == before + 1


def test_an_unknown_way_to_update_weights_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("sglang.srt.model_executor.model_runner")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert not weights_watch.watch()


@pytest.mark.skipif("sglang" in sys.modules, reason="SGLang is installed here")
def test_importing_needs_no_engine() -> None:
    with pytest.raises(ImportError, match="Install sglang"):
        sglang.DfkvHiCache(None, {})
