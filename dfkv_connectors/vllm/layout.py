"""vLLM's paged KV as parts and segments: which bytes of which page belong to which object.

An object is one part of one chunk. A part is one granule of KV heads (or the whole page where heads are replicated,
as under MLA) over all layers of this pipeline stage; a chunk is `chunk_blocks` consecutive blocks. Inside an
object the bytes stand in the order block, layer, head of the granule; inside a head they are the
engine's own and opaque.

Everything but `PagedLayout.of` is arithmetic; nothing here holds tensors beyond their addresses, so the engine must
keep the KV caches alive while the connector is (it does: they are its own).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dfkv_connectors.tables import Segments, item_table
from dfkv_core.keys import PartFields

MAX_DEFAULT_GRANULES = 8
MAX_CHUNK_BLOCKS = 16


class LayoutError(Exception):
    """The engine's KV cache has a shape that cannot be shared. The message says what was found."""


@dataclass(frozen=True)
class HeadShare:
    """Which KV heads of the model this rank holds, in units of the granules that they are stored in."""

    total_heads: int
    local_heads: int
    granules: int  # of the whole model; 0: replicated, one part for all ranks
    first_granule: int  # held by this rank
    local_granules: int
    writes: bool  # exactly one rank of those that hold a granule writes it


def choose_granules(total_heads: int, tp_size: int) -> int:
    """Number of granules that `total_heads` KV heads are stored in.

    Engines of any tensor parallel size that divides it share; it is gcd(heads, 8), so that the sizes in
    common use do, unless `tp_size` needs a finer cut.
    """
    if tp_size > total_heads:
        return total_heads
    granules = math.gcd(total_heads, MAX_DEFAULT_GRANULES)
    if granules % tp_size != 0:
        granules = math.lcm(granules, tp_size)
    return granules


def share_heads(
    total_heads: int, tp_size: int, tp_rank: int, *, replicated: bool, granules: int | None = None
) -> HeadShare:
    """Places this rank's heads. With more ranks than heads, consecutive ranks hold the same head and the first writes.

    replicated: the cache has no head axis to shard (MLA): every rank holds all of it, rank 0 writes.
    Raises LayoutError when heads, ranks and granules do not divide.
    """
    if replicated:
        return HeadShare(total_heads, total_heads, 0, 0, 1, tp_rank == 0)
    count = granules if granules is not None else choose_granules(total_heads, tp_size)
    if not 1 <= count <= 255 or total_heads % count != 0:
        raise LayoutError(f"{total_heads} KV heads cannot be cut into {count} granules; set granules to a divisor")
    if tp_size <= total_heads:
        if total_heads % tp_size != 0 or count % tp_size != 0:
            raise LayoutError(
                f"{count} granules of {total_heads} KV heads cannot be spread over tensor parallel size {tp_size}; "
                "set granules to a multiple of it"
            )
        local = count // tp_size
        return HeadShare(total_heads, total_heads // tp_size, count, tp_rank * local, local, True)
    if tp_size % total_heads != 0 or count != total_heads:
        raise LayoutError(
            f"tensor parallel size {tp_size} over {total_heads} KV heads needs granules = {total_heads}, not {count}"
        )
    replicas = tp_size // total_heads
    return HeadShare(total_heads, 1, count, tp_rank // replicas, 1, tp_rank % replicas == 0)


def choose_chunk_blocks(part_bytes_per_block: int, chunk_bytes: int) -> int:
    """The fewest blocks that make a part of at least `chunk_bytes`, at most MAX_CHUNK_BLOCKS."""
    return max(1, min(MAX_CHUNK_BLOCKS, math.ceil(chunk_bytes / part_bytes_per_block)))


@dataclass(frozen=True)
class PagedLayout:
    """Addresses and strides of every layer's pages, in bytes. Layers in the model's order."""

    num_blocks: int
    block_tokens: int
    head_bytes: int  # one head's bytes of one page of one layer
    bases: tuple[int, ...]
    block_strides: tuple[int, ...]
    head_strides: tuple[int, ...]
    shape: tuple[int, ...]  # of one page: (heads, tokens, content), as the engine names them
    dtype: str

    @staticmethod
    def of(kv_caches: Mapping[str, Any], layer_names: Sequence[str], block_tokens: int) -> PagedLayout:
        """Reads the layout off the tensors, logical shape [blocks, heads, tokens, content] per layer.

        Layers that share another layer's cache alias its storage and are taken once. Raises LayoutError for
        tensors that are not in host memory or whose heads are not contiguous.
        """
        seen: set[int] = set()
        bases, block_strides, head_strides = [], [], []
        first: Any = None
        for name in layer_names:
            tensor = kv_caches.get(name)
            if tensor is None:
                raise LayoutError(f"the engine registered no KV cache for layer {name!r}")
            if isinstance(tensor, (list, tuple)):
                raise LayoutError(f"layer {name!r} has several state tensors; only attention pages can be shared")
            if tensor.device.type != "cpu":
                raise LayoutError(f"layer {name!r} is on {tensor.device}; only KV in host memory can be shared")
            if tensor.dim() != 4:
                raise LayoutError(f"layer {name!r} is {tuple(tensor.shape)}, expected [blocks, heads, tokens, content]")
            if first is None:
                first = tensor
            if tensor.shape != first.shape or tensor.dtype != first.dtype:
                found, others = (f"{tuple(t.shape)} {t.dtype}" for t in (tensor, first))
                raise LayoutError(f"layer {name!r} is {found}, other layers are {others}")
            if tensor.shape[2] != block_tokens:
                raise LayoutError(f"layer {name!r} has pages of {tensor.shape[2]} tokens, blocks have {block_tokens}")
            content = tensor.shape[3]
            if tensor.stride(3) != 1 or tensor.stride(2) != content:
                raise LayoutError(
                    f"layer {name!r} has strides {tensor.stride()}: the tokens of a head are not contiguous; "
                    "ask the engine for a head-major layout"
                )
            if tensor.data_ptr() in seen:
                continue
            seen.add(tensor.data_ptr())
            size = tensor.element_size()
            bases.append(tensor.data_ptr())
            block_strides.append(tensor.stride(0) * size)
            head_strides.append(tensor.stride(1) * size)
        if first is None:
            raise LayoutError("the engine registered no KV cache")
        heads, tokens, content = (int(n) for n in first.shape[1:])
        return PagedLayout(
            num_blocks=int(first.shape[0]),
            block_tokens=block_tokens,
            head_bytes=tokens * content * first.element_size(),
            bases=tuple(bases),
            block_strides=tuple(block_strides),
            head_strides=tuple(head_strides),
            shape=(heads, tokens, content),
            dtype=str(first.dtype).removeprefix("torch."),
        )

    @property
    def num_layers(self) -> int:
        return len(self.bases)


class ChunkMap:
    """Turns chunks of page ids into the item table and the segments of a GET or PUT. Worker thread only."""

    def __init__(self, layout: PagedLayout, heads: HeadShare, chunk_blocks: int, stage: int) -> None:
        page_heads = layout.shape[0]
        if heads.granules and page_heads != heads.local_heads:
            raise LayoutError(f"pages hold {page_heads} heads, expected {heads.local_heads} on this rank")
        self.layout = layout
        self.chunk_blocks = chunk_blocks
        per_granule = page_heads // heads.local_granules
        self.part_bytes = chunk_blocks * layout.num_layers * per_granule * layout.head_bytes
        self.parts = tuple(
            PartFields(
                stage=stage,
                shard_index=heads.first_granule + granule if heads.granules else 0,
                shard_count=heads.granules,
            ).encode()
            for granule in range(heads.local_granules)
        )
        # Heads that lie one behind the other make one segment, others one each.
        adjacent = all(stride == layout.head_bytes for stride in layout.head_strides)
        runs, run_heads = (1, per_granule) if adjacent else (per_granule, 1)
        self._segment_bytes = run_heads * layout.head_bytes
        bases = np.array(layout.bases, dtype=np.uint64)
        head_strides = np.array(layout.head_strides, dtype=np.uint64)
        first_heads = np.arange(heads.local_granules, dtype=np.uint64) * np.uint64(per_granule)
        inner = np.arange(runs, dtype=np.uint64)
        # [granule, layer, run]: address of each run in page 0.
        self._origins = (
            bases[None, :, None] + (first_heads[:, None, None] + inner[None, None, :]) * head_strides[None, :, None]
        )
        self._block_strides = np.array(layout.block_strides, dtype=np.uint64)
        self.segments_per_part = chunk_blocks * layout.num_layers * runs

    def segments(self, page_ids: Sequence[int]) -> Segments:
        """Segments of every part of every chunk, parts of a chunk together.

        page_ids: chunk_blocks per chunk, in order; -1 stands for a page that is to be skipped (address 0).
        """
        pages = np.array(page_ids, dtype=np.int64).reshape(-1, self.chunk_blocks)
        if pages.size and (pages.max() >= self.layout.num_blocks or pages.min() < -1):
            raise LayoutError(f"page ids {pages.min()}..{pages.max()} outside 0..{self.layout.num_blocks - 1}")
        skipped = pages < 0
        offsets = np.where(skipped, 0, pages).astype(np.uint64)
        # [chunk, granule, block, layer, run]
        addresses = (
            self._origins[None, :, None, :, :]
            + offsets[:, None, :, None, None] * self._block_strides[None, None, None, :, None]
        )
        addresses = np.where(skipped[:, None, :, None, None], np.uint64(0), addresses)
        out = np.empty((addresses.size, 2), dtype=np.uint64)
        out[:, 0] = addresses.reshape(-1)
        out[:, 1] = self._segment_bytes
        return out

    def counts(self, chunks: int) -> npt.NDArray[np.uint32]:
        """Segments of each item, for `chunks` chunks."""
        return np.full(chunks * len(self.parts), self.segments_per_part, dtype=np.uint32)

    def items(self, chunk_ids: bytes) -> bytes:
        """The packed item table: every local part of every chunk, {block 16, part 8, route 8, u32 length, u32 0}."""
        return item_table(chunk_ids, self.parts, self.part_bytes)


@dataclass(frozen=True)
class EngineView:
    """Everything the worker's half needs to know of an engine."""

    chunks: ChunkMap
    writes: bool  # this rank stores what it holds
    descriptor: bytes  # canonical namespace descriptor
    label: str  # for operators
