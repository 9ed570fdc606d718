"""SGLang's page hashes as block ids, and the packed tables, against the independent implementations."""

import hashlib
import random

import numpy as np
import pytest

from dfkv_connectors.sglang.sharing import page_ids
from dfkv_connectors.tables import chunk_table, item_table
from dfkv_core import _native
from dfkv_core.keys import pack_chunks, pack_items
from tests.reference import identity

SGLANG_PAGE = 3


def test_page_hashes_become_opaque_ids() -> None:
    digests = [hashlib.sha256(bytes([index])).digest() for index in range(50)]
    wanted = [identity.opaque_block_id(SGLANG_PAGE, digest, b"") for digest in digests]
    assert page_ids([digest.hex() for digest in digests]) == b"".join(wanted)
    assert page_ids([]) == b""


def test_other_texts_are_told_apart() -> None:
    digest = hashlib.sha256(b"page").hexdigest()
    keys = [digest, digest[:-1], digest[:-2] + "zz", digest[:-1] + " ", f" {digest[:-1]}", "", "kéy", "a" * 64]
    ids = page_ids(keys)
    assert len({ids[at : at + 16] for at in range(0, len(ids), 16)}) == len(keys)
    assert ids[:16] == page_ids([digest])
    assert ids[16:32] == identity.opaque_block_id(SGLANG_PAGE, hashlib.sha256(digest[:-1].encode()).digest(), b"text")


def test_joined_hashes_must_be_whole() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        _native.opaque_block_ids(SGLANG_PAGE, b"x" * 33, 32)
    with pytest.raises(ValueError, match="multiple of 0"):
        _native.opaque_block_ids(SGLANG_PAGE, b"x" * 32, 0)


def test_tables_are_those_of_the_core() -> None:
    generator = random.Random(7)
    blocks = [generator.randbytes(15) + b"\0" for _ in range(9)]  # a trailing zero is part of an id
    ids = b"".join(blocks)
    assert chunk_table(ids) == pack_chunks(ids)
    parts = [5, 1 << 40]
    each = b"".join(block for block in blocks for _ in parts)
    assert item_table(ids, parts, 4096) == pack_items(each, parts * 9, 4096)
    lengths = [generator.randrange(1 << 20) for _ in range(18)]
    array = np.array(lengths, dtype=np.uint32).reshape(9, 2)
    assert item_table(ids, parts, array) == pack_items(each, parts * 9, lengths)
