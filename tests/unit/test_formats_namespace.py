"""Namespace descriptors: each field counts, nothing collides, nothing malformed is read."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfkv_core import _native
from dfkv_core.kv_formats import KV_FORMATS, kv_format_for
from dfkv_core.namespace import (
    MAX_DESCRIPTOR_BYTES,
    TAG_NAMES,
    DescriptorError,
    Group,
    GroupKind,
    HashAlgorithm,
    HashForm,
    NamespaceDescriptor,
    NamespaceFieldError,
    ShardScheme,
    difference,
    field_names,
    raw_fields,
)
from tests.reference import identity

DIGEST = hashlib.sha256(b"a").digest()
OTHER_DIGEST = hashlib.sha256(b"b").digest()
BASE = NamespaceDescriptor(
    engine_family="vllm",
    kv_format=2,
    weights_digest=DIGEST,
    config_digest=DIGEST,
    compute_dtype="bfloat16",
    kv_dtype="bfloat16",
    block_tokens=128,
    chunk_tokens=256,
    groups=(Group(GroupKind.FULL_ATTENTION, heads=4, head_size=64),),
)
GROUP = BASE.groups[0]
STATE_GROUP = Group(GroupKind.STATE, state_sizes=(1, 2))

# Every field alone, with each thing inside it that can vary.
MUTATIONS: dict[str, list[Any]] = {
    "tenant": ["t", "tt"],
    "engine_family": ["sglang"],
    "kv_format": [1, 3, 0x02000000],
    "fleet_salt": [b"\0", b"\0\0", b"t"],
    "weights_digest": [OTHER_DIGEST, DIGEST[:-1] + bytes([DIGEST[-1] ^ 1])],
    "weights_generation": [1, 2, 2**64 - 1],
    "config_digest": [OTHER_DIGEST],
    "compute_dtype": ["float16", "bfloat16 "],
    "kv_dtype": ["float16", "fp8"],
    "kv_scales_digest": [DIGEST, OTHER_DIGEST],
    "page_layout": [(("N", 128),), (("N", 128), ("C", 64)), (("C", 64), ("N", 128)), (("NC", 128), ("", 64))[:1]],
    "page_format": ["amx", "avx2"],
    "block_tokens": [64, 1],
    "chunk_tokens": [128, 512],
    "hash_form": [
        HashForm(HashAlgorithm.VLLM_SHA256_CBOR),
        HashForm(HashAlgorithm.VLLM_SHA256_CBOR, b"0"),
        HashForm(HashAlgorithm.VLLM_SHA256, b"0"),
    ],
    "groups": [
        (dataclasses.replace(GROUP, kind=GroupKind.MLA),),
        (dataclasses.replace(GROUP, heads=64, head_size=4),),
        (dataclasses.replace(GROUP, heads=8),),
        (dataclasses.replace(GROUP, head_size=128),),
        (dataclasses.replace(GROUP, window=64),),
        (GROUP, GROUP),
        (GROUP, STATE_GROUP),
        (STATE_GROUP, GROUP),
        (dataclasses.replace(STATE_GROUP, state_sizes=(2, 1)),),
        (dataclasses.replace(STATE_GROUP, state_sizes=(1,)),),
        (dataclasses.replace(STATE_GROUP, state_sizes=(1, 2, 3)),),
    ],
    "pp_size": [2],
    "pcp_size": [2],
    "dcp_size": [2, 3],
    "shard_scheme": [ShardScheme.RANK],
}


def changed(name: str, value: Any) -> NamespaceDescriptor:
    """BASE with one other field."""
    fields: dict[str, Any] = {name: value}
    return dataclasses.replace(BASE, **fields)


def test_fields_and_tags_agree() -> None:
    assert list(TAG_NAMES) == list(range(1, 21))
    assert list(TAG_NAMES.values()) == [field.name for field in dataclasses.fields(NamespaceDescriptor)]
    assert set(MUTATIONS) == set(TAG_NAMES.values())


def test_each_field_alone_changes_the_id() -> None:
    found = {BASE.id: "nothing"}
    for name, values in MUTATIONS.items():
        for value in values:
            other = changed(name, value)
            assert other.id not in found, f"{name}={value!r} collides with {found[other.id]}"
            found[other.id] = f"{name}={value!r}"
            assert difference(BASE, other) == [name]
            assert difference(other.encode(), BASE) == [name]
            assert NamespaceDescriptor.decode(other.encode()) == other
            assert _native.namespace_id(other.encode()) == other.id
    assert len(found) == 1 + sum(map(len, MUTATIONS.values()))


def test_same_bytes_in_two_fields_differ() -> None:
    names = ["tenant", "engine_family", "compute_dtype", "kv_dtype", "page_format"]
    ids = {changed(name, "x").id for name in names}
    assert len(ids) == len(names)
    pairs = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc")]
    split = {dataclasses.replace(BASE, tenant=one, page_format=other).id for one, other in pairs}
    assert len(split) == len(pairs)
    sizes = {
        dataclasses.replace(BASE, pp_size=pp, pcp_size=pcp, dcp_size=dcp).id
        for pp, pcp, dcp in itertools.permutations((1, 2, 3))
    }
    assert len(sizes) == 6


def test_a_value_that_holds_another_field_differs() -> None:
    inner = identity.descriptor([(2, b"y")])
    as_value = identity.descriptor([(1, b"x" + inner)])
    beside = identity.descriptor([(1, b"x"), (2, b"y")])
    assert as_value != beside
    assert _native.namespace_id(as_value) != _native.namespace_id(beside)
    salted = dataclasses.replace(BASE, fleet_salt=struct.pack("<HI", 5, 32) + DIGEST)
    assert salted.id != BASE.id
    assert raw_fields(salted.encode())[4] == struct.pack("<HI", 5, 32) + DIGEST
    axes = {dataclasses.replace(BASE, page_layout=layout).id for layout in ((("ab", 1),), (("a", 1), ("b", 1)))}
    assert len(axes) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tenant", None),
        ("tenant", "x" * 129),
        ("tenant", "ä" * 65),
        ("tenant", "line\nbreak"),
        ("tenant", b"bytes"),
        ("engine_family", ""),
        ("kv_format", 0),
        ("kv_format", 2**32),
        ("kv_format", True),
        ("kv_format", 2.0),
        ("fleet_salt", "text"),
        ("fleet_salt", bytes(257)),
        ("weights_digest", b""),
        ("weights_digest", bytes(31)),
        ("weights_digest", DIGEST.hex()),
        ("weights_generation", -1),
        ("weights_generation", 2**64),
        ("config_digest", bytes(33)),
        ("compute_dtype", ""),
        ("kv_dtype", "\ud800"),
        ("kv_scales_digest", bytes(1)),
        ("page_layout", [("N", 1)]),
        ("page_layout", (("N", 0),)),
        ("page_layout", (("", 1),)),
        ("page_layout", (("N",),)),
        ("page_layout", (("N", 1),) * 17),
        ("page_format", 3),
        ("block_tokens", 0),
        ("chunk_tokens", 200),
        ("chunk_tokens", 2**32),
        ("hash_form", 1),
        ("groups", ()),
        ("groups", (1,)),
        ("groups", (GROUP,) * 256),
        ("pp_size", 0),
        ("pcp_size", 65536),
        ("dcp_size", "1"),
        ("shard_scheme", 1),
    ],
)
def test_bad_values_name_their_field(name: str, value: Any) -> None:
    with pytest.raises(NamespaceFieldError, match=name) as caught:
        changed(name, value)
    assert caught.value.field.startswith(name)
    assert repr(caught.value.found) in str(caught.value)


def test_bad_values_inside_groups_and_hash_forms() -> None:
    good: dict[str, Any] = {"kind": GroupKind.STATE, "state_sizes": (1,)}
    bad: list[dict[str, Any]] = [{"kind": 1}, {"heads": -1}, {"head_size": 2**32}, {"window": None}]
    bad += [{"state_sizes": [1]}, {"state_sizes": (0,)}, {"state_sizes": (1,) * 256}]
    for change in bad:
        with pytest.raises(NamespaceFieldError, match=f"groups.{next(iter(change))}"):
            Group(**{**good, **change})
    with pytest.raises(NamespaceFieldError, match="own chain"):
        HashForm(None, b"seed")
    with pytest.raises(NamespaceFieldError, match=r"hash_form\.algorithm"):
        HashForm(1)  # type: ignore[arg-type]
    with pytest.raises(NamespaceFieldError, match=r"hash_form\.seed"):
        HashForm(HashAlgorithm.SGLANG_PAGE, bytes(257))


def test_too_large_in_all() -> None:
    wide = Group(GroupKind.STATE, state_sizes=(1,) * 255)
    with pytest.raises(NamespaceFieldError, match=str(MAX_DESCRIPTOR_BYTES)):
        dataclasses.replace(BASE, groups=(wide,) * 64)


def _with_field(tag: int, value: bytes) -> bytes:
    return identity.descriptor({**raw_fields(BASE.encode()), tag: value}.items())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (_with_field(21, b""), "tag 21"),
        (_with_field(65535, b"x"), "tag 65535"),
        (_with_field(1, b""), "not canonical"),
        (_with_field(17, struct.pack("<H", 1)), "not canonical"),
        (_with_field(15, struct.pack("<BI", 0, 0)), "not canonical"),
        (_with_field(11, b"\0"), "not canonical"),
        (_with_field(1, b"\xff"), "tenant"),
        (_with_field(3, b"\1"), "kv_format"),
        (_with_field(3, bytes(5)), "kv_format"),
        (_with_field(5, bytes(31)), "weights_digest"),
        (_with_field(11, b"\1\1N"), "page_layout"),
        (_with_field(11, b"\xff"), "page_layout"),
        (_with_field(15, struct.pack("<BI", 99, 0)), "hash_form"),
        (_with_field(15, struct.pack("<BI", 1, 2**32 - 1)), "hash_form"),
        (_with_field(16, b"\0"), "groups"),
        (_with_field(16, b"\1\x63" + bytes(13)), "groups"),
        (_with_field(16, b"\1\1" + bytes(12) + b"\xff"), "groups"),
        (_with_field(20, struct.pack("<H", 7)), "shard_scheme"),
        (b"", "required fields"),
        (identity.descriptor([(1, b"x")]), "engine_family"),
    ],
)
def test_descriptors_that_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(DescriptorError, match=message):
        NamespaceDescriptor.decode(data)


def test_framing_faults() -> None:
    good = BASE.encode()
    ends = {0}
    for value in raw_fields(good).values():
        ends.add(max(ends) + 6 + len(value))
    for size in range(len(good)):
        with pytest.raises(DescriptorError):
            NamespaceDescriptor.decode(good[:size])
        if size not in ends:
            with pytest.raises(ValueError, match="tag order"):
                _native.namespace_id(good[:size])
    faults = [
        struct.pack("<HI", 0, 0),
        struct.pack("<HI", 1, 2**32 - 1),
        struct.pack("<HIHI", 2, 0, 1, 0),
        struct.pack("<HIHI", 2, 0, 2, 0),
        bytes(MAX_DESCRIPTOR_BYTES + 1),
    ]
    for data in faults:
        with pytest.raises(DescriptorError):
            raw_fields(data)
        with pytest.raises(ValueError, match="descriptor"):
            _native.namespace_id(data)


def test_difference_reads_what_decode_refuses() -> None:
    later = _with_field(21, b"x")
    assert difference(BASE, later) == ["tag 21"]
    assert field_names([1, 20, 999]) == ["tenant", "shard_scheme", "tag 999"]


def test_describe_is_json_and_names_every_field() -> None:
    for values in MUTATIONS.values():
        assert values
    rich = dataclasses.replace(
        BASE, **{name: values[0] for name, values in MUTATIONS.items() if name != "block_tokens"}
    )
    for descriptor in (BASE, rich):
        described = json.loads(json.dumps(descriptor.describe()))
        assert list(described) == list(TAG_NAMES.values())
        assert described["weights_digest"] == descriptor.weights_digest.hex()
    assert BASE.describe()["kv_format"] == "2 (vllm cpu >=0.32,<0.33)"
    assert BASE.describe()["hash_form"] == "own chain"
    assert rich.describe()["hash_form"] == "vllm_sha256_cbor, seed none"
    assert "unknown" in dataclasses.replace(BASE, kv_format=999).describe()["kv_format"]


def test_kv_formats() -> None:
    assert list(KV_FORMATS) == list(range(1, len(KV_FORMATS) + 1))
    assert kv_format_for("vllm", "cpu", "0.32.0") == 2
    assert kv_format_for("vllm", "cpu", "0.32.1+cpu") == 2
    assert kv_format_for("vllm", "cpu", "0.33.0") is None
    assert kv_format_for("vllm", "cpu", "0.31.9") is None
    assert kv_format_for("vllm", "cuda", "0.32.0") is None
    assert kv_format_for("dfkv", "synthetic", "7.0") == 1
    for version in ("", "0", "x.y", "0.x"):
        with pytest.raises(ValueError, match=r"major\.minor"):
            kv_format_for("vllm", "cpu", version)


def texts(least: int) -> st.SearchStrategy[str]:
    """Text that a field takes."""
    return st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=least, max_size=20)


DIGESTS = st.binary(min_size=32, max_size=32)
U16S, U32S, U64S = (st.integers(1, 2**width - 1) for width in (16, 32, 64))
GROUPS = st.builds(
    Group,
    kind=st.sampled_from(GroupKind),
    heads=U32S,
    head_size=U32S,
    window=U32S,
    state_sizes=st.lists(U64S, max_size=5).map(tuple),
)
FORMS = st.just(HashForm()) | st.builds(HashForm, st.sampled_from(HashAlgorithm), st.binary(max_size=64))


@st.composite
def descriptors(draw: st.DrawFn) -> NamespaceDescriptor:
    """Any valid descriptor."""
    block_tokens = draw(st.integers(1, 4096))
    return NamespaceDescriptor(
        tenant=draw(texts(0)),
        engine_family=draw(texts(1)),
        kv_format=draw(U32S),
        fleet_salt=draw(st.binary(max_size=40)),
        weights_digest=draw(DIGESTS),
        weights_generation=draw(U64S),
        config_digest=draw(DIGESTS),
        compute_dtype=draw(texts(1)),
        kv_dtype=draw(texts(1)),
        kv_scales_digest=draw(st.just(b"") | DIGESTS),
        page_layout=draw(st.lists(st.tuples(texts(1), U64S), max_size=6).map(tuple)),
        page_format=draw(texts(0)),
        block_tokens=block_tokens,
        chunk_tokens=block_tokens * draw(st.integers(1, 1024)),
        hash_form=draw(FORMS),
        groups=draw(st.lists(GROUPS, min_size=1, max_size=4).map(tuple)),
        pp_size=draw(U16S),
        pcp_size=draw(U16S),
        dcp_size=draw(U16S),
        shard_scheme=draw(st.sampled_from(ShardScheme)),
    )


@given(descriptors(), descriptors(), st.sets(st.sampled_from(list(TAG_NAMES.values()))))
def test_round_trip_and_difference(a: NamespaceDescriptor, b: NamespaceDescriptor, names: set[str]) -> None:
    if names & {"block_tokens", "chunk_tokens"}:
        names |= {"block_tokens", "chunk_tokens"}  # one has to divide the other
    fields: dict[str, Any] = {name: getattr(b, name) for name in names}
    mixed = dataclasses.replace(a, **fields)
    assert NamespaceDescriptor.decode(mixed.encode()) == mixed
    assert identity.namespace_id(mixed.encode()) == mixed.id == _native.namespace_id(mixed.encode())
    expected = [name for name in TAG_NAMES.values() if getattr(a, name) != getattr(mixed, name)]
    assert difference(a, mixed) == expected
    assert (a.id == mixed.id) == (not expected)


@given(st.binary(max_size=200))
def test_random_bytes_never_break_the_reader(data: bytes) -> None:
    try:
        decoded = NamespaceDescriptor.decode(data)
    except DescriptorError:
        return
    assert decoded.encode() == data
