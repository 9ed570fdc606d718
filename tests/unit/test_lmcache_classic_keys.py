"""Keys of LMCache's classic mode: ids against the independent implementation, and the hashes that name no KV."""

import dataclasses
import hashlib
import itertools
import struct
import sys
import types
from typing import Any

import pytest

from dfkv_connectors.lmcache.classic_keys import FULL, TAIL, TAIL_TOKENS, HashRule, block_id, layer_of, part
from dfkv_core.keys import PartFields
from tests.reference import identity

LMCACHE_CLASSIC = 5
DIGEST = hashlib.sha256(b"chunk").digest()
LONG = int.from_bytes(DIGEST, "big")
SHORT = int.from_bytes(DIGEST[:8], "big")


@dataclasses.dataclass(frozen=True)
class Key:
    chunk_hash: int | bytes = LONG
    model_name: str = "org/model@v1"
    world_size: int = 2
    worker_id: int = 1
    dtype: str = "torch.bfloat16"
    tags: tuple[tuple[str, str], ...] | None = None


def text(value: str) -> bytes:
    return struct.pack("<I", len(value.encode())) + value.encode()


def test_ids_are_those_of_the_format() -> None:
    key = Key(tags=(("user", "käse"), ("a", "b")))
    extras = struct.pack("<QQ", 2, 1) + b"".join(map(text, ("torch.bfloat16", "a", "b", "user", "käse")))
    # One byte more than the digest where its first bit is set, for the sign.
    encoded = LONG.to_bytes(33 if DIGEST[0] & 0x80 else 32, "big")
    assert block_id(key) == identity.opaque_block_id(LMCACHE_CLASSIC, encoded, extras)


@pytest.mark.parametrize(
    "change",
    [
        {"chunk_hash": LONG + 1},
        {"chunk_hash": -LONG},
        {"world_size": 1},
        {"worker_id": 0},
        {"dtype": "torch.float16"},
        {"tags": (("user", "x"),)},
    ],
)
def test_each_field_alone_makes_another_id(change: dict[str, Any]) -> None:
    assert block_id(dataclasses.replace(Key(), **change)) != block_id(Key())


def test_fields_do_not_run_into_each_other() -> None:
    texts = ("", "a", "ab", "b", "a\0b")
    tags = [((one, two),) for one, two in itertools.product(texts, texts)]
    assert len({block_id(Key(tags=each)) for each in tags}) == len(tags)
    assert block_id(Key(tags=(("a", "b"), ("c", "d")))) == block_id(Key(tags=(("c", "d"), ("a", "b"))))


def test_parts_keep_layers_and_tails_apart() -> None:
    parts = [part(component, layer) for component in (FULL, TAIL_TOKENS, TAIL) for layer in (None, 0, 1, 79)]
    assert len(set(parts)) == len(parts)
    assert PartFields.decode(part(TAIL, 79)) == PartFields(component=TAIL, stage=80)
    assert layer_of(Key()) is None


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A stand-in for the module in which LMCache looks for hash functions."""

    def find(name: str) -> object:
        if name not in ("sha256", "sha256_cbor"):
            raise ValueError(name)
        return find

    hashing = types.ModuleType("vllm.utils.hashing")
    hashing.get_hash_fn_by_name = find  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.utils.hashing", hashing)
    return hashing


def test_long_hashes_are_taken_whoever_made_them() -> None:
    rule = HashRule("builtin", accept_short=False)
    assert rule.refusal(LONG) == ""
    assert rule.refusal(DIGEST) == ""
    assert rule.refusal(DIGEST[:16]) == ""
    assert rule.refusal(DIGEST[:15])


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("algorithm", ["sha256_cbor", "sha256", "sha256_cbor_64bit"])
def test_short_hashes_of_vllm_have_to_be_accepted(algorithm: str) -> None:
    refused = HashRule(algorithm, accept_short=False).refusal(SHORT)
    assert "accept_short_hashes" in refused
    assert "pre_caching_hash_algorithm" not in refused
    assert HashRule(algorithm, accept_short=True).refusal(SHORT) == ""
    assert HashRule(algorithm, accept_short=True).refusal(1 << 64)


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("algorithm", ["builtin", "xxhash"])
@pytest.mark.parametrize("accept", [False, True])
def test_builtin_hashes_are_never_taken(algorithm: str, accept: bool) -> None:
    for chunk_hash in (SHORT, -SHORT, -LONG):
        refused = HashRule(algorithm, accept_short=accept).refusal(chunk_hash)
        assert "set pre_caching_hash_algorithm to sha256_cbor" in refused
        assert "PYTHONHASHSEED" in refused


@pytest.mark.usefixtures("vllm")
def test_a_negative_hash_gives_the_builtin_one_away() -> None:
    rule = HashRule("sha256_cbor", accept_short=True)
    assert rule.refusal(SHORT) == ""
    assert "builtin" in rule.refusal(-SHORT)
    assert "builtin" in rule.refusal(SHORT)


def test_without_vllm_lmcache_takes_the_builtin_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm", "vllm.utils", "vllm.utils.hashing"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "builtin" in HashRule("sha256_cbor", accept_short=True).refusal(SHORT)
