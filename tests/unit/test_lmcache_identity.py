"""LMCache's namespaces: each field alone makes another one, and what cannot be identified is not shared."""

import dataclasses
import json
import struct
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dfkv_connectors import lmcache
from dfkv_connectors.lmcache import identity, namespaces
from dfkv_connectors.lmcache.identity import (
    Layout,
    ModelIdentity,
    ObjectKind,
    find_model,
    identify_model,
    layout_refusal,
    object_descriptor,
)
from dfkv_connectors.lmcache.namespaces import Namespaces
from dfkv_connectors.model_files import IdentityError
from dfkv_core.config import LmcacheConnectorConfig
from dfkv_core.namespace import HashAlgorithm, NamespaceDescriptor, difference, namespace_id
from dfkv_core.weights import WeightsError

DEVICE = "cpu x86_64 avx2"
LAYOUT = Layout(((2, 4, 256, 128),), ("bfloat16",), 2 * 4 * 256 * 128 * 2)
OBJECTS = ObjectKind("mp", HashAlgorithm.LMCACHE_BLAKE3, "0.5.6", DEVICE)
LIMIT_S = 10.0


def config(**values: Any) -> LmcacheConnectorConfig:
    return LmcacheConnectorConfig.model_validate(values)


def model(path: Path, fill: int = 1) -> Path:
    """A model's files."""
    path.mkdir(parents=True, exist_ok=True)
    header = json.dumps({"w": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}}).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes([fill]) * 64)
    (path / "config.json").write_text(json.dumps({"hidden_size": 64}))
    return path


def describe(
    found: ModelIdentity, layout: Layout = LAYOUT, version: str = "0.5.6", device: str = DEVICE, **values: Any
) -> NamespaceDescriptor:
    objects = ObjectKind("mp", HashAlgorithm.LMCACHE_BLAKE3, version, device)
    return object_descriptor(found, layout, config(**values), objects)


def test_content_is_the_identity(tmp_path: Path) -> None:
    one, same = (
        identify_model(str(model(tmp_path / "a")), config()),
        identify_model(str(model(tmp_path / "b")), config()),
    )
    other = identify_model(str(model(tmp_path / "c", fill=2)), config())
    assert describe(one).id == describe(same).id
    assert difference(describe(one), describe(other)) == ["weights_digest"]
    (tmp_path / "b" / "config.json").write_text(json.dumps({"hidden_size": 64, "rope_theta": 5}))
    assert difference(describe(one), describe(identify_model(str(tmp_path / "b"), config()))) == ["config_digest"]


def test_each_field_alone_makes_another_namespace(tmp_path: Path) -> None:
    found = identify_model(str(model(tmp_path)), config())
    base = describe(found)
    half = dataclasses.replace(LAYOUT, dtypes=("float16",))
    turned = dataclasses.replace(LAYOUT, shapes=((4, 2, 256, 128),))
    two = Layout((*LAYOUT.shapes, (4, 256, 64)), ("bfloat16", "float32"), LAYOUT.object_bytes + 4 * 256 * 64 * 4)
    swapped = dataclasses.replace(two, shapes=two.shapes[::-1], dtypes=two.dtypes[::-1])
    others = [
        describe(found, half),
        describe(found, turned),
        describe(found, two),
        describe(found, swapped),
        describe(found, version="0.5.7"),
        describe(found, device="cpu x86_64 avx2 avx512f"),
        describe(found, fleet_salt="salt"),
        describe(found, kv_cache_dtype="fp8_e4m3"),
        describe(found, kv_cache_dtype="fp8_e5m2"),
        object_descriptor(found, LAYOUT, config(), dataclasses.replace(OBJECTS, mode="classic")),
    ]
    assert len({base.id, *(other.id for other in others)}) == 1 + len(others)
    assert difference(base, others[0]) == ["compute_dtype", "kv_dtype", "page_layout"]
    assert difference(base, others[1]) == ["page_layout"]
    assert difference(base, others[4]) == ["page_format"]
    assert difference(base, others[-1]) == ["kv_format"]


def test_layouts_of_many_tensors_are_told_apart(tmp_path: Path) -> None:
    found = identify_model(str(model(tmp_path)), config())
    many = Layout(((2, 256, 128),) * 40, ("bfloat16", "float16") * 20, 40 * 2 * 256 * 128 * 2)
    turned = dataclasses.replace(many, dtypes=many.dtypes[::-1])
    sized = dataclasses.replace(many, shapes=((2, 128, 256), *many.shapes[1:]))
    assert len({describe(found, layout).id for layout in (many, turned, sized)}) == 3


def test_weights_id_stands_for_weights_but_not_for_models() -> None:
    ids = [
        describe(identify_model(name, config(weights_id=weights))).id
        for name in ("org/a", "org/b")
        for weights in ("first", "second")
    ]
    assert len(set(ids)) == 4
    assert ids[0] == describe(identify_model("org/a", config(weights_id="first"))).id


def test_engines_installed_beside_it_are_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def described(version: str) -> NamespaceDescriptor:
        monkeypatch.setattr(identity, "version", lambda name: version if name == "vllm" else "1")
        return describe(identify_model("org/a", config(weights_id="w")))

    assert difference(described("0.32.0"), described("0.33.0")) == ["config_digest"]


def test_models_that_are_not_certain_demand_weights_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(IdentityError, match="set weights_id"):
        find_model(str(tmp_path / "absent"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(WeightsError, match="weights_id"):
        identify_model(str(tmp_path / "empty"), config())
    model(tmp_path / "relative")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(IdentityError, match="relative path"):
        find_model("relative")
    snapshots = tmp_path / "hub" / "snapshots"
    served = model(snapshots / "1111")
    monkeypatch.setattr(identity, "model_directory", lambda *_: served)
    assert find_model("org/name") == served
    model(snapshots / "2222")
    with pytest.raises(IdentityError, match="2 revisions of 'org/name'"):
        find_model("org/name")


def test_unknown_versions_do_not_share() -> None:
    with pytest.raises(IdentityError, match=r"LMCache 0\.6\.0 are not known.*lmcache mp >=0\.5,<0\.6"):
        describe(identify_model("m", config(weights_id="w")), version="0.6.0")


def test_layouts_that_do_not_say_enough_are_refused() -> None:
    assert layout_refusal(LAYOUT, "") == ""
    assert "serde" in layout_refusal(dataclasses.replace(LAYOUT, shapes=((4096,),)), "")
    eight = dataclasses.replace(LAYOUT, dtypes=("uint8",))
    assert "set kv_cache_dtype" in layout_refusal(eight, "")
    assert layout_refusal(eight, "fp8_e4m3") == ""
    assert layout_refusal(dataclasses.replace(LAYOUT, dtypes=("float8_e4m3fn",)), "") == ""


def test_layouts_of_objects() -> None:
    half = types.SimpleNamespace(itemsize=2)
    metadata = types.SimpleNamespace(shape=(5, 3), dtype=half, shapes=None, dtypes=None)
    one = Layout.of_object(metadata)
    assert one is not None
    assert (one.shapes, one.object_bytes) == (((5, 3),), 30)
    metadata = types.SimpleNamespace(shape=(5, 3), dtype=half, shapes=[(5, 3), (7, 2)], dtypes=[half, half])
    two = Layout.of_object(metadata)
    assert two is not None
    assert two.object_bytes == 58
    assert Layout.of([], []) is None


class Spaces:
    """Namespaces over a model on disk, and what they registered."""

    def __init__(self, **values: Any) -> None:
        self.labels: dict[bytes, str] = {}
        self.of = Namespaces(config(**values), self._add, OBJECTS)

    def _add(self, descriptor: bytes, label: str) -> bytes:
        self.labels[namespace_id(descriptor)] = label
        return namespace_id(descriptor)

    def read(self, *names: str, limit_s: float = LIMIT_S) -> None:
        read = threading.Event()
        self.of.when_read(names, read.set, limit_s)
        assert read.wait(LIMIT_S)


def test_namespaces_of_models(tmp_path: Path) -> None:
    spaces = Spaces()
    names = str(model(tmp_path / "a")), str(model(tmp_path / "b", fill=2)), str(tmp_path / "absent")
    spaces.read(*names)
    (first, _), (again, _), (second, _) = (spaces.of.find(name, LAYOUT) for name in (names[0], names[0], names[1]))
    assert first is not None
    assert first == again != second
    assert set(spaces.labels.values()) == set(names[:2])
    nothing, reason = spaces.of.find(names[2], LAYOUT)
    assert nothing is None
    assert "set weights_id" in reason


def test_a_model_that_changes_under_a_running_server_is_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespaces, "CHECK_S", 0.0)
    spaces = Spaces()
    name = str(model(tmp_path))
    spaces.read(name)
    assert spaces.of.find(name, LAYOUT)[0] is not None
    model(tmp_path, fill=9)
    nothing, reason = spaces.of.find(name, LAYOUT)
    assert nothing is None
    assert "restart it" in reason


def test_slow_files_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = threading.Event()

    def identify(name: str, _: Any) -> ModelIdentity:
        slow.wait(LIMIT_S)
        return ModelIdentity(name, bytes(32), bytes(32))

    monkeypatch.setattr(namespaces, "identify_model", identify)
    spaces = Spaces()
    spaces.read("m", limit_s=0.05)
    assert spaces.of.find("m", LAYOUT) == (None, "its files are still being read")
    calls: list[int] = []
    spaces.of.when_read(["m"], _append(calls), LIMIT_S)
    slow.set()
    spaces.read("m")
    assert calls == [1]
    assert spaces.of.find("m", LAYOUT)[0] is not None


def _append(calls: list[int]) -> Callable[[], None]:
    return lambda: calls.append(1)


def test_it_can_be_imported_without_lmcache() -> None:
    with pytest.raises(ImportError, match=r"Install lmcache \(0\.5\)"):
        lmcache.DfkvL2Adapter({})
