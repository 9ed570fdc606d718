"""LMCache's keys as block ids, against the independent implementation, and the hashes that name no KV."""

import dataclasses
import hashlib
import struct

import pytest

from dfkv_connectors.lmcache.keys import block_id, block_ids, refusal, serves_engine
from tests.reference import identity

LMCACHE_BLAKE3 = 4


@dataclasses.dataclass(frozen=True)
class Key:
    chunk_hash: bytes = hashlib.sha256(b"chunk").digest()
    model_name: str = "/models/m"
    kv_rank: int = 1 << 24 | 1 << 8
    object_group_id: int = 0
    cache_salt: str = ""


def test_ids_are_those_of_the_format() -> None:
    key = Key(kv_rank=4 << 24 | 3 << 16 | 4 << 8 | 3, object_group_id=2, cache_salt="käse")
    extras = struct.pack("<QI", 0x04030403, 2) + "käse".encode()
    assert block_id(key) == identity.opaque_block_id(LMCACHE_BLAKE3, key.chunk_hash, extras)
    assert block_ids([key, Key()]) == block_id(key) + block_id(Key())


@pytest.mark.parametrize(
    "change",
    [
        {"chunk_hash": hashlib.sha256(b"another").digest()},
        {"kv_rank": 2 << 24 | 2 << 8},
        {"kv_rank": 1 << 24 | 1 << 16 | 1 << 8},
        {"object_group_id": 1},
        {"cache_salt": "salt"},
    ],
)
def test_each_field_alone_makes_another_id(change: dict[str, object]) -> None:
    assert block_id(dataclasses.replace(Key(), **change)) != block_id(Key())  # type: ignore[arg-type]


def test_fields_do_not_run_into_each_other() -> None:
    ids = {
        block_id(Key(object_group_id=group, cache_salt=salt)) for group in (0, 1) for salt in ("", "\x01", "\x01\x00")
    }
    assert len(ids) == 6


def test_short_hashes_are_refused() -> None:
    assert refusal(Key()) == ""
    assert refusal(Key(chunk_hash=bytes(16))) == ""
    builtin = refusal(Key(chunk_hash=bytes(8)))
    assert "64 bits" in builtin
    assert "--hash-algorithm blake3" in builtin
    assert "32 bits" in refusal(Key(chunk_hash=bytes(4)))
    # LMCache's own checks have short hashes, and ranks of a world that has none.
    check = Key(chunk_hash=bytes(4), kv_rank=0)
    assert not serves_engine(check)
    assert refusal(check) == ""
    assert "64 bits" in refusal(Key(chunk_hash=bytes(8), kv_rank=0))
