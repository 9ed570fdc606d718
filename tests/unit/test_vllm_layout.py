"""Page layouts as parts and segments: every byte belongs to exactly one object, at every tensor parallel size."""

from __future__ import annotations

import ctypes
import random
import struct

import numpy as np
import numpy.typing as npt
import pytest

from dfkv_connectors.tables import Segments
from dfkv_connectors.vllm.layout import (
    ChunkMap,
    LayoutError,
    PagedLayout,
    choose_chunk_blocks,
    choose_granules,
    share_heads,
)
from dfkv_core.keys import PartFields

BLOCKS, TOKENS, CONTENT = 8, 16, 4


class Tensor:
    """What PagedLayout.of reads of a torch tensor, over numpy."""

    def __init__(self, array: npt.NDArray[np.uint16], device: str = "cpu") -> None:
        self.array = array
        self.shape = array.shape
        self.dtype = f"torch.{array.dtype}"
        self.device = type("Device", (), {"type": device, "__str__": lambda _: device})()

    def dim(self) -> int:
        return self.array.ndim

    def stride(self, axis: int | None = None) -> int | tuple[int, ...]:
        strides = tuple(s // self.array.itemsize for s in self.array.strides)
        return strides if axis is None else strides[axis]

    def element_size(self) -> int:
        return self.array.itemsize

    def data_ptr(self) -> int:
        return self.array.ctypes.data


def caches(layers: int, heads: int) -> dict[str, Tensor]:
    # One storage for all layers, as the engine allocates it: [layer, block, head, token, content].
    storage = np.zeros((layers, BLOCKS, heads, TOKENS, CONTENT), dtype=np.uint16)
    return {f"layer.{i}": Tensor(storage[i]) for i in range(layers)}


def read_segments(segments: Segments) -> bytes:
    return b"".join(ctypes.string_at(int(address), int(length)) for address, length in segments)


def test_objects_hold_the_same_bytes_at_every_tensor_parallel_size() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    layers, heads, chunk_blocks = 3, 8, 2
    whole = rng.integers(0, 1 << 16, (layers, BLOCKS, heads, TOKENS, CONTENT), dtype=np.uint16)
    pages = [5, 2, 7, 1]
    objects: dict[tuple[int, int], set[bytes]] = {}
    keep = []
    for tp_size in (1, 2, 4, 8):
        for rank in range(tp_size):
            local = heads // tp_size
            storage = np.ascontiguousarray(whole[:, :, rank * local : (rank + 1) * local])
            keep.append(storage)
            tensors = {f"layer.{i}": Tensor(storage[i]) for i in range(layers)}
            layout = PagedLayout.of(tensors, list(tensors), TOKENS)
            share = share_heads(heads, tp_size, rank, replicated=False)
            chunk_map = ChunkMap(layout, share, chunk_blocks, stage=0)
            segments = chunk_map.segments(pages)
            per_part = chunk_map.segments_per_part
            for index in range(2 * len(chunk_map.parts)):
                chunk, part = divmod(index, len(chunk_map.parts))
                payload = read_segments(segments[index * per_part : (index + 1) * per_part])
                assert len(payload) == chunk_map.part_bytes
                objects.setdefault((chunk, chunk_map.parts[part]), set()).add(payload)
    assert len(objects) == 2 * 8
    assert all(len(contents) == 1 for contents in objects.values())


def test_skipped_pages_have_address_zero_and_keep_their_length() -> None:
    tensors = caches(2, 4)
    layout = PagedLayout.of(tensors, list(tensors), TOKENS)
    chunk_map = ChunkMap(layout, share_heads(4, 1, 0, replicated=False), 2, 0)
    segments = chunk_map.segments([-1, 3])
    per_block = chunk_map.segments_per_part // 2
    for part in range(len(chunk_map.parts)):
        first = segments[part * 2 * per_block : part * 2 * per_block + per_block]
        second = segments[part * 2 * per_block + per_block : (part + 1) * 2 * per_block]
        assert (first[:, 0] == 0).all()
        assert (second[:, 0] != 0).all()
    assert int(segments[:, 1].sum()) == chunk_map.part_bytes * len(chunk_map.parts)


def test_item_table_names_every_part_of_every_chunk() -> None:
    tensors = caches(2, 4)
    layout = PagedLayout.of(tensors, list(tensors), TOKENS)
    chunk_map = ChunkMap(layout, share_heads(8, 2, 1, replicated=False), 1, stage=3)
    ids = bytes(range(32))
    entries = list(struct.iter_unpack("<16sQQII", chunk_map.items(ids)))
    assert len(entries) == 2 * 4
    for index, (block, part, route, length, zero) in enumerate(entries):
        chunk, granule = divmod(index, 4)
        assert block == ids[16 * chunk : 16 * chunk + 16]
        assert PartFields.decode(part) == PartFields(stage=3, shard_index=4 + granule, shard_count=8)
        assert route == int.from_bytes(block[:8], "little")
        assert (length, zero) == (chunk_map.part_bytes, 0)


def test_layers_that_share_a_cache_are_taken_once() -> None:
    tensors = caches(2, 4)
    tensors["shared"] = tensors["layer.0"]
    assert PagedLayout.of(tensors, ["layer.0", "shared", "layer.1"], TOKENS).num_layers == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layer.1"), "no KV cache for layer"),
        (
            lambda t: t.update({"layer.1": Tensor(np.zeros((BLOCKS, 4, TOKENS, CONTENT), np.uint16), "cuda:0")}),
            "cuda:0",
        ),
        (lambda t: t.update({"layer.1": Tensor(np.zeros((2, BLOCKS, 4, TOKENS, CONTENT), np.uint16))}), "expected"),
        (lambda t: t.update({"layer.1": Tensor(np.zeros((BLOCKS, 2, TOKENS, CONTENT), np.uint16))}), "other layers"),
        (
            lambda t: t.update(
                {"layer.1": Tensor(np.zeros((BLOCKS, TOKENS, 4, CONTENT), np.uint16).transpose(0, 2, 1, 3))}
            ),
            "not contiguous",
        ),
        (lambda t: t.update({"layer.1": [1, 2]}), "several state tensors"),
    ],
)
def test_layouts_that_cannot_be_shared_say_why(change, message) -> None:  # type: ignore[no-untyped-def]
    tensors = caches(2, 4)
    change(tensors)
    with pytest.raises(LayoutError, match=message):
        PagedLayout.of(tensors, ["layer.0", "layer.1"], TOKENS)


def test_page_ids_outside_the_cache_are_refused() -> None:
    tensors = caches(1, 4)
    chunk_map = ChunkMap(PagedLayout.of(tensors, list(tensors), TOKENS), share_heads(4, 1, 0, replicated=False), 1, 0)
    for pages in ([BLOCKS], [-2]):
        with pytest.raises(LayoutError, match="outside"):
            chunk_map.segments(pages)


@pytest.mark.parametrize(
    ("heads", "tp_size", "granules"),
    [(8, 1, 8), (8, 8, 8), (4, 2, 4), (12, 4, 4), (12, 3, 12), (32, 16, 16), (1, 4, 1), (16, 32, 16)],
)
def test_granules_fit_heads_and_ranks(heads: int, tp_size: int, granules: int) -> None:
    assert choose_granules(heads, tp_size) == granules
    shares = [share_heads(heads, tp_size, rank, replicated=False) for rank in range(tp_size)]
    held = [set(range(s.first_granule, s.first_granule + s.local_granules)) for s in shares if s.writes]
    assert sorted(g for s in held for g in s) == list(range(granules)), "each granule has exactly one writer"


def test_more_ranks_than_heads_share_heads_and_one_of_them_writes() -> None:
    shares = [share_heads(2, 8, rank, replicated=False) for rank in range(8)]
    assert [s.first_granule for s in shares] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [s.writes for s in shares] == [True, False, False, False] * 2


def test_replicated_heads_are_one_part_that_rank_zero_writes() -> None:
    shares = [share_heads(1, 4, rank, replicated=True) for rank in range(4)]
    assert {(s.granules, s.first_granule, s.local_granules) for s in shares} == {(0, 0, 1)}
    assert [s.writes for s in shares] == [True, False, False, False]


@pytest.mark.parametrize(
    ("heads", "tp_size", "granules"), [(8, 4, 2), (8, 1, 3), (6, 4, None), (2, 3, None), (2, 4, 1)]
)
def test_shapes_that_do_not_divide_are_refused(heads: int, tp_size: int, granules: int | None) -> None:
    with pytest.raises(LayoutError, match=r"granules|spread"):
        share_heads(heads, tp_size, 0, replicated=False, granules=granules)


def test_a_chunk_is_the_fewest_blocks_of_that_size() -> None:
    assert choose_chunk_blocks(393216, 262144) == 1
    assert choose_chunk_blocks(65536, 262144) == 4
    assert choose_chunk_blocks(65537, 262144) == 4
    assert choose_chunk_blocks(1, 262144) == 16
