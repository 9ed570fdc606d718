"""Which prefixes can be restored from what the pools have: against the definition, written out naively."""

import random

import pytest

from dfkv_connectors.sglang.hits import group_pages, leading, trailing_boundaries


def test_leading_run() -> None:
    assert leading([]) == 0
    assert leading([True, True, False, True]) == 2
    assert leading([True] * 5) == 5


@pytest.mark.parametrize("window", [1, 2, 3, 7])
def test_trailing_windows_against_the_definition(window: int) -> None:
    seed = random.randrange(1 << 30)
    generator = random.Random(seed)
    for _ in range(200):
        found = [generator.random() < 0.7 for _ in range(generator.randrange(12))]
        wanted = [
            length
            for length in range(1, len(found) + 1)
            if all(found[index] for index in range(max(0, length - window), length))
        ]
        assert trailing_boundaries(found, window) == wanted, f"seed {seed}: {found}"


def test_groups_count_when_complete() -> None:
    assert group_pages([True] * 6, 2, 8) == 24
    assert group_pages([True, True, True, False, True, True], 2, 8) == 8
    assert group_pages([False] * 4, 2, 8) == 0
    assert group_pages([True] * 4, 0, 8) == 0
