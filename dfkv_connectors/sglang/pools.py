"""SGLang's host pools as objects: which memory of which page belongs to which part of which chunk.

A chunk is one page. Its parts are what this rank holds: one, or one for each granule of KV heads where SGLang splits
pages by heads. Inside a part the bytes stand as the pool's own list of buffers says; they are opaque. A pool
that cannot give addresses is moved page by page through its flat copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dfkv_connectors.tables import Segments
from dfkv_core.keys import PartFields
from dfkv_core.namespace import GroupKind
from dfkv_core.namespace_fields import MAX_STATE_SIZES

KV = "kv"
_KINDS = (
    ("mamba", GroupKind.STATE),
    ("indexer", GroupKind.INDEXER),
    ("state", GroupKind.STATE),
    ("swa", GroupKind.SLIDING_WINDOW),
)


class PoolError(Exception):
    """A pool's pages cannot be stored. The message says what was found."""


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among those that hold one model."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1
    replicated: bool = False  # every tensor-parallel rank holds the same KV
    head_granules: int = 1  # pieces that this rank's page is cut into by KV heads

    @classmethod
    def of(cls, config: Any) -> Ranks:
        """From SGLang's HiCacheStorageConfig, whose fields differ between versions."""

        def number(name: str, default: int) -> int:
            return int(getattr(config, name, None) or default)

        tp_size = number("tp_size", 1)
        split = bool(getattr(config, "should_split_heads", False))
        return cls(
            tp_rank=number("tp_rank", 0),
            tp_size=tp_size,
            pp_rank=number("pp_rank", 0),
            pp_size=number("pp_size", 1),
            cp_rank=number("attn_cp_rank", 0),
            cp_size=number("attn_cp_size", 1),
            dcp_rank=number("dcp_rank", 0),
            dcp_size=number("dcp_size", 1),
            replicated=bool(getattr(config, "is_mla_model", False)),
            head_granules=number("tp_lcm_size", tp_size) // tp_size if split else 1,
        )


@dataclass(frozen=True)
class Geometry:
    """What a pool's pages look like."""

    form: str  # how a page becomes bytes: class, layout, layers, runs or flat
    dtype: str
    axes: tuple[tuple[str, int], ...]
    page_tokens: int
    kind: GroupKind
    heads: int  # in one part
    head_size: int
    state_sizes: tuple[int, ...]
    heads_outermost: bool  # a part is a granule of KV heads


@dataclass(frozen=True)
class PagePool:
    """One host pool. It keeps the pool, hence its memory, alive. Any thread.

    runs: bytes of each buffer of one part, in order; empty where pages are moved flat.
    """

    name: str
    pool: Any
    ranks: Ranks
    geometry: Geometry
    parts: tuple[int, ...]
    runs: tuple[int, ...]
    page_slots: int  # entries of host_indices for one page

    @classmethod
    def of(cls, name: str, pool: Any, ranks: Ranks, *, flat: bool = False) -> PagePool:
        """flat: pages go through the flat tensors of the generic interface. Raises PoolError."""
        slots = int(getattr(pool, "logical_page_size", None) or getattr(pool, "page_size", None) or 1)
        heads_outermost = getattr(pool, "layout", "") == "page_head" and not flat
        granules = ranks.head_granules if heads_outermost and name == KV else 1
        runs = () if flat else _page_runs(pool, slots, granules)
        if not runs:
            heads_outermost, granules = False, 1
        return cls(
            name=name,
            pool=pool,
            ranks=ranks,
            geometry=_geometry(name, pool, ranks, runs, slots, granules, heads_outermost),
            parts=_parts(pool, ranks, granules),
            runs=runs,
            page_slots=slots,
        )

    @property
    def part_bytes(self) -> int:
        return sum(self.runs)

    def first_slots(self, host_indices: Any, pages: int) -> list[int]:
        """Index of each page's first slot. Raises PoolError where indices and pages do not go together."""
        if host_indices is None or host_indices.numel() != pages * self.page_slots:
            found = "none" if host_indices is None else host_indices.numel()
            raise PoolError(f"{pages} pages of pool {self.name} need {pages * self.page_slots} indices, found {found}")
        first: list[int] = host_indices.reshape(-1)[:: self.page_slots].tolist()
        size = int(getattr(self.pool, "logical_size", None) or self.pool.size)
        if first and not 0 <= min(first) <= max(first) <= size - self.page_slots:
            raise PoolError(f"indices {min(first)} to {max(first)} outside pool {self.name} of {size} slots")
        return first

    def segments(self, host_indices: Any, pages: int) -> Segments:
        """The memory of every part of every page, parts of a page together. Raises PoolError."""
        self.first_slots(host_indices, pages)
        granules = len(self.parts)
        found = _buffers(self.pool, host_indices, granules)
        runs = len(self.runs)
        if len(found) != pages * granules * runs or not (found[:, 1].reshape(-1, runs) == self.runs).all():
            raise PoolError(f"pool {self.name} describes its pages in another way than when it was registered")
        return found

    def flat_pages(self, host_indices: Any, pages: int) -> list[Any]:
        """A flat tensor of each page's bytes, to be stored."""
        return [self.pool.get_data_page(slot).contiguous() for slot in self.first_slots(host_indices, pages)]

    def blank_pages(self, pages: int) -> list[Any]:
        """A flat tensor for each page, to be received into."""
        return [self.pool.get_dummy_flat_data_page() for _ in range(pages)]

    def fill(self, host_indices: Any, flat: Sequence[Any], done: Sequence[bool]) -> None:
        """Copies the pages that are done from flat tensors into the pool."""
        for slot, page, arrived in zip(self.first_slots(host_indices, len(flat)), flat, done, strict=True):
            if arrived:
                self.pool.set_from_flat_data_page(slot, page)


def is_logical(pool: Any) -> bool:
    """A pool that deals out indices and holds no bytes."""
    return getattr(pool, "kv_buffer", 0) is None and "Logical" in type(pool).__name__


def tensor_segments(pages: Sequence[Any]) -> Segments:
    """One segment for each tensor, which must outlive the transfer. Raises PoolError for one that is no plain memory."""
    for page in pages:
        if page.device.type != "cpu" or not page.is_contiguous():
            raise PoolError(f"a page on {page.device} with strides {page.stride()} is no contiguous host memory")
    return np.array([(page.data_ptr(), page.numel() * page.element_size()) for page in pages], dtype=np.uint64).reshape(
        -1, 2
    )


def _buffers(pool: Any, host_indices: Any, granules: int) -> Segments:
    if granules > 1:
        addresses, sizes = pool.get_split_heads_page_buffer_meta(host_indices, granules)
    else:
        addresses, sizes = pool.get_page_buffer_meta(host_indices)
    out = np.empty((len(addresses), 2), dtype=np.uint64)
    out[:, 0] = addresses
    out[:, 1] = sizes
    return out


def _page_runs(pool: Any, slots: int, granules: int) -> tuple[int, ...]:
    """The buffers of the first part of the first page; empty where the pool gives none."""
    import torch

    try:
        found = _buffers(pool, torch.arange(slots, dtype=torch.int64), granules)
    except (NotImplementedError, ValueError, AttributeError):
        return ()
    per_part = len(found) // granules
    if not per_part or len(found) % granules:
        raise PoolError(f"a page of pool {type(pool).__name__} gives {len(found)} buffers for {granules} parts")
    return tuple(int(size) for size in found[:per_part, 1])


def _geometry(
    name: str, pool: Any, ranks: Ranks, runs: tuple[int, ...], slots: int, granules: int, heads_outermost: bool
) -> Geometry:
    heads = int(getattr(pool, "head_num", None) or 0) // granules
    head_size = int(getattr(pool, "head_dim", None) or getattr(pool, "kv_cache_dim", None) or 0)
    first = int(getattr(pool, "start_layer", None) or 0)
    layers = int(getattr(pool, "layer_num", None) or getattr(pool, "num_mamba_layers", None) or 0)
    axes = [("layers", layers), ("slots", slots), ("heads", heads), ("head size", head_size)]
    uneven = len(set(runs)) > 1
    if runs and not uneven:
        axes += [("runs", len(runs)), ("run bytes", runs[0])]
    elif len(runs) > MAX_STATE_SIZES:
        raise PoolError(f"a page of pool {name} falls into {len(runs)} buffers of different sizes")
    if not runs:
        page = pool.get_dummy_flat_data_page()
        axes.append(("flat bytes", page.numel() * page.element_size()))
    kind = GroupKind.MLA if ranks.replicated else GroupKind.FULL_ATTENTION
    if name != KV:
        kind = next((kind for part, kind in _KINDS if part in name), kind)
    moved = "runs" if runs else "flat"
    # Which layers, not only how many: stages may be cut unevenly.
    form = f"{type(pool).__name__} {getattr(pool, 'layout', '')} {moved} from layer {first}"
    return Geometry(
        form=form,
        dtype=str(getattr(pool, "dtype", "")).removeprefix("torch."),
        axes=tuple((axis, size) for axis, size in axes if size),
        page_tokens=slots,
        kind=kind,
        heads=heads,
        head_size=head_size,
        state_sizes=runs if uneven else (),
        heads_outermost=heads_outermost,
    )


def _parts(pool: Any, ranks: Ranks, granules: int) -> tuple[int, ...]:
    if ranks.replicated and not _sharded_by_rank(pool):
        shards = [(ranks.dcp_rank, ranks.dcp_size if ranks.dcp_size > 1 else 0)]
    else:
        shards = [(ranks.tp_rank * granules + index, ranks.tp_size * granules) for index in range(granules)]
    try:
        return tuple(
            PartFields(stage=ranks.pp_rank, cp_index=ranks.cp_rank, shard_index=index, shard_count=count).encode()
            for index, count in shards
        )
    except ValueError as error:
        raise PoolError(str(error)) from None


def _sharded_by_rank(pool: Any) -> bool:
    """Pools that every rank holds its own piece of, even beside a KV that is replicated: Mamba states, and attention
    with heads (a draft model's)."""
    return any("Mamba" in kind.__name__ or "MHA" in kind.__name__ for kind in type(pool).__mro__)
