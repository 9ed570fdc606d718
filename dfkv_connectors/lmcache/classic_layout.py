"""What lies in a chunk of LMCache's classic mode, or in one of its layers. Any thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from lmcache.v1.memory_management import MemoryFormat

from .identity import Layout


@dataclass(frozen=True)
class ChunkLayout:
    """Shapes of a chunk's tensors, which differ between chunks in the number of tokens alone.

    shapes, dtypes: torch's, of a full chunk. format: LMCache's MemoryFormat. layers: of a chunk, 0 where a chunk is one
    object.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    format: Any
    token_axis: int
    layers: int

    @classmethod
    def of(cls, shapes: Sequence[Any], dtypes: Sequence[Any], *, mla: bool, layerwise: bool) -> ChunkLayout:
        """shapes: of a full chunk of all layers, (K and V, layers, tokens, hidden) for each group of layers."""
        if not layerwise:
            kind = MemoryFormat.KV_MLA_FMT if mla else MemoryFormat.KV_2LTD
            return cls(tuple(tuple(map(int, shape)) for shape in shapes), tuple(dtypes), kind, 2, 0)
        layers = sum(int(shape[1]) for shape in shapes)
        pair, _, tokens, hidden = map(int, shapes[0])
        if mla:
            return cls(((tokens, hidden),), (dtypes[0],), MemoryFormat.KV_MLA_FMT, 0, layers)
        return cls(((tokens, pair, hidden),), (dtypes[0],), MemoryFormat.KV_T2D, 0, layers)

    @property
    def chunk_tokens(self) -> int:
        return self.shapes[0][self.token_axis]

    def identity(self) -> Layout:
        layout = Layout.of(self.shapes, self.dtypes)
        assert layout is not None
        return layout

    def shapes_of(self, tokens: int) -> list[tuple[int, ...]]:
        axis = self.token_axis
        return [(*shape[:axis], tokens, *shape[axis + 1 :]) for shape in self.shapes]

    def bytes_of(self, tokens: int) -> int:
        return sum(
            prod(shape) * int(dtype.itemsize) for shape, dtype in zip(self.shapes_of(tokens), self.dtypes, strict=True)
        )

    def tokens_of(self, memory: Any) -> int | None:
        """Tokens in a MemoryObj; None where it is not one of this layout in host memory."""
        metadata = memory.metadata
        shapes = [tuple(shape) for shape in metadata.shapes or [metadata.shape]]
        dtypes = tuple(metadata.dtypes or [metadata.dtype])
        if metadata.fmt != self.format or dtypes != self.dtypes or len(shapes[0]) <= self.token_axis:
            return None
        tokens = int(shapes[0][self.token_axis])
        if shapes != self.shapes_of(tokens) or memory.get_size() != self.bytes_of(tokens):
            return None
        return tokens if tokens > 0 and memory.raw_data.device.type == "cpu" else None

    def describe(self, memory: Any) -> str:
        """What a MemoryObj is, and what was expected."""
        metadata = memory.metadata
        found = ", ".join("x".join(map(str, shape)) for shape in metadata.shapes or [metadata.shape])
        return (
            f"{found} {metadata.dtype} {metadata.fmt.name}, where {self.identity().describe()} {self.format.name} with "
            "any number of tokens was expected"
        )
