"""Which prefixes of a request can be restored, from what each pool has. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Found = Sequence[bool] | npt.NDArray[np.bool_]


def leading(found: Found) -> int:
    """The run of True at the front."""
    missing = np.flatnonzero(np.logical_not(found))
    return int(missing[0]) if len(missing) else len(found)


def trailing_boundaries(found: Found, window: int) -> list[int]:
    """Prefix lengths, ascending from 1, whose last `window` pages (all, where it is shorter) are there."""
    out = []
    run = 0
    for index, there in enumerate(found):
        run = run + 1 if there else 0
        if run >= min(window, index + 1):
            out.append(index + 1)
    return out


def group_pages(found: Found, keys_per_group: int, pages_per_group: int) -> int:
    """Pages that the leading complete groups of keys cover."""
    if keys_per_group <= 0 or pages_per_group <= 0:
        return 0
    return leading(found) // keys_per_group * pages_per_group


@dataclass(frozen=True)
class Prefix:
    """What a request can be restored to, in pages."""

    boundaries: dict[Any, int]  # by pool: the pages that it has of its own
    restorable: list[int]  # every length at which all pools can, ascending

    @property
    def pages(self) -> int:
        """The longest."""
        return self.restorable[-1] if self.restorable else 0


def fold(kv: Found, transfers: Sequence[Any], found: Sequence[Found]) -> Prefix:
    """kv: what the pool of KV has, per page. found: the same for each of SGLang's transfers; under block_groups per key.

    Raises ValueError for a hit policy that is not known.
    """
    pages = leading(kv)
    boundaries: dict[Any, int] = {"kv": pages} if pages else {}
    restorable = list(range(1, pages + 1))
    for transfer, there in zip(transfers, found, strict=True):
        policy = getattr(transfer.hit_policy, "value", transfer.hit_policy)
        if policy == "block_groups":
            # A second form of the same pages: it reports its own verdict and limits nothing.
            boundaries[transfer.name] = group_pages(there, transfer.group_pages, transfer.block_pages)
            continue
        if policy == "all_pages":
            possible = list(range(1, leading(there[:pages]) + 1))
        elif policy == "trailing_pages":
            possible = trailing_boundaries(there[:pages], max(1, len(transfer.keys or ())))
        else:
            raise ValueError(f"hit policy {policy!r} of pool {transfer.name} is not known")
        if possible:
            boundaries[transfer.name] = possible[-1]
        usable = set(possible)
        restorable = [length for length in restorable if length in usable]
    return Prefix(boundaries, restorable)
