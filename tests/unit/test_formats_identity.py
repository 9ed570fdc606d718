"""Blocks, parts and routes: the native code against the independent implementation, and against collisions."""

from __future__ import annotations

import array
import dataclasses
import hashlib
import random
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfkv_core import _native, keys
from tests.reference import identity

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
EXTRAS = st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=20)), max_size=5)


def append(buffer: Any) -> bytes:
    """The id of a first block whose tokens are in any kind of buffer."""
    return _native.BlockChain().append(buffer)


def packed(tokens: list[int]) -> array.array[int]:
    return array.array("I", tokens)


def test_many_random_keys_agree() -> None:
    """10^5 random (namespace, block, part), native and independent."""
    seed = random.SystemRandom().getrandbits(64)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(100):
        fields = sorted(
            {rng.randrange(1, 65536): rng.randbytes(rng.randrange(64)) for _ in range(rng.randrange(6))}.items()
        )
        encoded = identity.descriptor(fields)
        namespace = _native.namespace_id(encoded)
        assert namespace == identity.namespace_id(encoded)
        chain = _native.BlockChain()
        tip = identity.chain_start()
        assert chain.tip == tip
        for _ in range(1000):
            tokens = [rng.getrandbits(32) for _ in range(rng.randrange(4))]
            extras = [(rng.randrange(4), rng.randbytes(rng.randrange(3))) for _ in range(rng.randrange(3))]
            tip = identity.chain_next(tip, tokens, extras)
            block = chain.append(packed(tokens), extras)
            assert block == tip[:16]
            values = [rng.getrandbits(width) for width in (8, 8, 16, 8, 8, 8)]
            assert _native.encode_part(*values) == identity.part(*values)
            assert keys.route_of(block) == identity.route(block)


@given(TOKENS, EXTRAS, st.binary(min_size=32, max_size=32))
def test_chain_agrees_from_any_tip(tokens: list[int], extras: list[tuple[int, bytes]], tip: bytes) -> None:
    chain = _native.BlockChain(tip)
    after = identity.chain_next(tip, tokens, extras)
    assert chain.append(packed(tokens), extras) == after[:16]
    assert chain.tip == after
    reversed_order = _native.BlockChain(tip)
    assert reversed_order.append(packed(tokens), list(reversed(extras))) == after[:16]


@given(st.integers(0, 255), st.binary(max_size=80), st.binary(max_size=40))
def test_opaque_agrees(algorithm: int, engine_hash: bytes, extras: bytes) -> None:
    expected = identity.opaque_block_id(algorithm, engine_hash, extras)
    assert _native.opaque_block_id(algorithm, engine_hash, extras) == expected


@given(st.lists(st.integers(0, 2**32 - 1), max_size=100), st.integers(1, 20), st.data())
def test_many_blocks_are_the_same_as_one_by_one(tokens: list[int], block_tokens: int, data: st.DataObject) -> None:
    blocks = len(tokens) // block_tokens
    indices = st.integers(0, max(blocks - 1, 0))
    extras = data.draw(
        st.lists(st.tuples(indices, st.integers(0, 255), st.binary(max_size=8)), max_size=6 if blocks else 0)
    )
    batch = _native.BlockChain()
    joined = batch.append_blocks(packed(tokens), block_tokens, extras)
    single = _native.BlockChain()
    expected = []
    for block in range(blocks):
        own = [(tag, value) for at, tag, value in extras if at == block]
        expected.append(single.append(packed(tokens[block * block_tokens : (block + 1) * block_tokens]), own))
    assert joined == b"".join(expected)
    assert batch.tip == single.tip


# Each entry is one block; no two may have the same id.
LOOKALIKES: list[tuple[list[int], list[tuple[int, bytes]]]] = [
    ([1, 2, 3], []),
    ([1, 2, 4], []),
    ([3, 2, 1], []),
    ([1, 2], []),
    ([1, 2, 3, 0], []),
    ([1, 2, 3], [(1, b"x")]),  # LoRA "x"
    ([1, 2, 3], [(2, b"x")]),  # cache salt "x"
    ([1, 2, 3], [(1, b"x"), (2, b"x")]),
    ([1, 2, 3], [(1, b"y"), (2, b"x")]),
    ([1, 2, 3], [(1, b"x"), (2, b"y")]),
    ([1, 2, 3], [(1, b"ab"), (2, b"c")]),
    ([1, 2, 3], [(1, b"a"), (2, b"bc")]),
    ([1, 2, 3], [(1, b"ab"), (1, b"c")]),
    ([1, 2, 3], [(1, b"a"), (1, b"bc")]),
    ([1, 2, 3], [(1, b"a\1b"), (1, b"c")]),  # this and the next: the same bytes once the lengths are left out
    ([1, 2, 3], [(1, b"a"), (1, b"b\1c")]),
    ([1, 2, 3], [(1, b"")]),
    ([1, 2, 3], [(0, b"")]),
    ([1, 2, 3], [(1, b""), (1, b"")]),
    ([1, 2, 3], [(1, b"x" + struct.pack("<BI", 2, 1) + b"y")]),
    ([1, 2, 3, 1], [(1, b"x")]),
    ([], []),
    ([], [(1, b"x")]),
]


def test_each_extra_alone_counts_and_nothing_collides() -> None:
    ids = [_native.BlockChain().append(packed(tokens), extras) for tokens, extras in LOOKALIKES]
    assert len(set(ids)) == len(LOOKALIKES)


def test_the_prefix_counts() -> None:
    tip_bit = bytes([1]) + bytes(31)
    assert _native.BlockChain(bytes(32)).append(packed([1])) != _native.BlockChain(tip_bit).append(packed([1]))
    last_bit = bytes(31) + bytes([1])
    assert _native.BlockChain(bytes(32)).append(packed([1])) != _native.BlockChain(last_bit).append(packed([1]))


def test_opaque_collisions() -> None:
    cases = [(1, b"ab", b"c"), (1, b"a", b"bc"), (1, b"abc", b""), (1, b"", b"abc"), (2, b"ab", b"c")]
    cases += [(1, b"", struct.pack("<I", 0)), (1, struct.pack("<I", 0), b"")]
    assert len({_native.opaque_block_id(*case) for case in cases}) == len(cases)
    chain_like = hashlib.sha256(b"dfkv.block.1").digest()
    assert _native.opaque_block_id(1, chain_like, b"") != chain_like[:16]


def test_token_buffers() -> None:
    expected = append(packed([1, 2, 3, 2**32 - 1]))
    unsigned = np.array([1, 2, 3, 2**32 - 1], dtype=np.uint32)
    assert append(unsigned) == expected
    assert append(unsigned.astype("<u4")) == expected
    assert append(unsigned.data) == expected
    assert append(unsigned.view(np.int32)) == expected
    assert append(unsigned.reshape(2, 2)) == expected
    shifted = np.frombuffer(b"\0" + unsigned.tobytes(), dtype=np.uint32, offset=1)
    assert shifted.ctypes.data % 4
    assert append(shifted) == expected
    wrong: list[Any] = [
        unsigned.astype(np.uint64),
        unsigned.astype(np.float32),
        unsigned.astype(">u4"),
        unsigned.tobytes(),
    ]
    for buffer in wrong:
        with pytest.raises(TypeError, match="4-byte integers"):
            append(buffer)
    for buffer in (unsigned[::2], [1, 2, 3], None):
        with pytest.raises((TypeError, BufferError, ValueError)):
            append(buffer)


def test_refused_arguments() -> None:
    for tip in (b"", bytes(31), bytes(33)):
        with pytest.raises(ValueError, match="32 bytes"):
            _native.BlockChain(tip)
    with pytest.raises(ValueError, match="block_tokens"):
        _native.BlockChain().append_blocks(packed([1]), 0)
    with pytest.raises(ValueError, match="block index 1"):
        _native.BlockChain().append_blocks(packed([1, 2, 3]), 2, [(1, 1, b"")])
    for tag in (-1, 256):
        with pytest.raises(TypeError):
            _native.BlockChain().append(packed([1]), [(tag, b"")])
    with pytest.raises(TypeError):
        _native.encode_part(256, 0, 0, 0, 0, 0)


def test_a_failed_append_leaves_the_tip() -> None:
    chain = _native.BlockChain()
    before = chain.tip
    with pytest.raises(ValueError, match="block index"):
        chain.append_blocks(packed([1, 2]), 1, [(9, 1, b"x")])
    assert chain.tip == before


def test_hashing_large_input_lets_other_threads_run() -> None:
    """Two threads hashing at once each get their own right answer."""
    data = random.Random(5).randbytes(8 << 20)
    expected = hashlib.sha256(data).digest()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(_native.sha256, [data] * 4)) == [expected] * 4
        assert len(set(pool.map(_native.xxh3_64, [data, memoryview(data), bytearray(data)]))) == 1
        assert len(set(pool.map(_native.crc32c, [data] * 4))) == 1


# ---- parts and packed tables ---------------------------------------------------------------------


PARTS = st.builds(
    keys.PartFields,
    group=st.integers(0, 255),
    component=st.integers(0, 255),
    stage=st.integers(0, 65535),
    cp_index=st.integers(0, 255),
    shard_index=st.just(0),
    shard_count=st.integers(0, 255),
).flatmap(
    lambda fields: st.builds(
        lambda index: dataclasses.replace(fields, shard_index=index), st.integers(0, max(fields.shard_count - 1, 0))
    )
)


@given(PARTS)
def test_parts_round_trip(fields: keys.PartFields) -> None:
    part = fields.encode()
    assert part == identity.part(*dataclasses.astuple(fields)) == _native.encode_part(*dataclasses.astuple(fields))
    assert keys.PartFields.decode(part) == fields


@pytest.mark.parametrize(
    "change",
    [
        {"group": 256},
        {"group": True},
        {"component": -1},
        {"stage": 65536},
        {"stage": "1"},
        {"cp_index": 256},
        {"shard_count": 256},
        {"shard_index": 1},
        {"shard_index": 2, "shard_count": 2},
    ],
)
def test_bad_part_fields(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        keys.PartFields(**change)


def test_parts_that_do_not_decode() -> None:
    for part in (keys.ALL_PARTS, 1 << 56, 1 << 63, -1, 1 << 64):
        with pytest.raises(ValueError, match="upper 8"):
            keys.PartFields.decode(part)
    with pytest.raises(ValueError, match="shard_index"):
        keys.PartFields.decode(identity.part(0, 0, 0, 0, 3, 2))


def test_packed_tables() -> None:
    blocks = [hashlib.sha256(bytes([i])).digest()[:16] for i in range(5)]
    joined = b"".join(blocks)
    routes = [identity.route(block) for block in blocks]
    expected = b"".join(block + identity.little(route, 8) for block, route in zip(blocks, routes, strict=True))
    assert keys.pack_chunks(joined) == keys.pack_chunks(joined, routes) == expected
    assert keys.pack_chunks(joined, [7] * 5) == b"".join(block + identity.little(7, 8) for block in blocks)
    assert len(expected) == 5 * keys.CHUNK_REF_BYTES
    for packed_items, part_list, length_list in (
        (keys.pack_items(joined, 3, 9), [3] * 5, [9] * 5),
        (
            keys.pack_items(joined, [1, 2, 3, 4, 2**64 - 1], [5, 6, 7, 8, 2**32 - 1]),
            [1, 2, 3, 4, 2**64 - 1],
            [5, 6, 7, 8, 2**32 - 1],
        ),
    ):
        items = zip(blocks, part_list, routes, length_list, strict=True)
        want = b"".join(
            block + identity.little(part, 8) + identity.little(route, 8) + identity.little(length, 4) + bytes(4)
            for block, part, route, length in items
        )
        assert packed_items == want
        assert len(want) == 5 * keys.ITEM_REF_BYTES
    assert keys.pack_items(joined[:16], 1, 1, [42])[24:32] == identity.little(42, 8)
    assert keys.pack_parts([1, 2**64 - 1]) == identity.little(1, 8) + bytes([255] * 8)
    assert keys.pack_chunks(b"") == keys.pack_items(b"", 1, 1) == b""


def test_packed_tables_check_their_counts() -> None:
    blocks = bytes(32)
    with pytest.raises(ValueError, match="multiple of 16"):
        keys.pack_chunks(bytes(17))
    with pytest.raises(ValueError, match="routes"):
        keys.pack_chunks(blocks, [1])
    with pytest.raises(ValueError, match="parts"):
        keys.pack_items(blocks, [1], 1)
    with pytest.raises(ValueError, match="lengths"):
        keys.pack_items(blocks, 1, [1, 2, 3])
    with pytest.raises(ValueError, match="routes"):
        keys.pack_items(blocks, 1, 1, [])
    with pytest.raises(struct.error):
        keys.pack_items(blocks, 1, 2**32)
    with pytest.raises(ValueError, match="16 bytes"):
        keys.route_of(bytes(15))


# ---- statuses ------------------------------------------------------------------------------------


def test_statuses_have_the_native_names() -> None:
    for value in range(65536):
        if value < 500 or value % 997 == 0 or value == 65535:
            assert keys.Status(value).label == _native.status_name(value), value
    assert len(keys.Status) == 26


def test_unknown_statuses_are_read_by_range() -> None:
    expected = {99: "DONE", 100: "MISS", 199: "MISS", 200: "AGAIN", 299: "AGAIN", 300: "REFUSED", 65535: "REFUSED"}
    for value, name in expected.items():
        assert keys.status_range(value) is keys.StatusRange[name]
        assert keys.Status(value).range is keys.StatusRange[name]
        assert keys.Status(value) == value
    assert keys.Status(150).label == "miss_other"
    assert 150 not in list(keys.Status)
    outside: list[Any] = [-1, 65536, "0", None]
    for unusable in outside:
        with pytest.raises(ValueError, match="not a valid Status"):
            keys.Status(unusable)


def test_statuses_unpack() -> None:
    assert keys.unpack_statuses(b"") == []
    assert keys.unpack_statuses(struct.pack("<3H", 0, 104, 65535)) == [0, 104, 65535]
    with pytest.raises(ValueError, match="2 bytes each"):
        keys.unpack_statuses(b"\0")
