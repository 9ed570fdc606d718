"""Made-up traffic for trying things out: conversations over a few system prompts, and single questions among them.

The same seed gives the same trace.
"""

from __future__ import annotations

import gzip
import heapq
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 512


@dataclass(frozen=True)
class Traffic:
    """What the traffic is like. Lengths are in blocks of 512 tokens, times in seconds."""

    system_prompts: int = 8
    system_blocks: int = 4  # of each system prompt
    first_blocks: float = 12  # of a first message, on average
    turn_blocks: float = 4  # that a turn adds, on average
    more_turns: float = 0.75  # chance that a conversation goes on
    think_s: float = 45  # between a turn and the next, on average
    requests_per_s: float = 4


@dataclass
class _Conversation:
    blocks: list[int]
    last_tokens: int  # in the last block


def requests(count: int, seed: int, traffic: Traffic | None = None) -> Iterator[dict[str, Any]]:
    """`count` requests in the order of their time, as a trace has them."""
    kind = traffic or Traffic()
    rng = random.Random(seed)  # noqa: S311 - traffic, not secrets
    next_id = kind.system_prompts * kind.system_blocks
    waiting: list[tuple[float, int, _Conversation]] = []
    now_s = 0.0
    arrivals_per_s = kind.requests_per_s * (1 - kind.more_turns)
    next_arrival_s = rng.expovariate(arrivals_per_s)
    for number in range(count):
        if waiting and waiting[0][0] < next_arrival_s:
            now_s, _, conversation = heapq.heappop(waiting)
            grown = 1 + int(rng.expovariate(1 / kind.turn_blocks))
        else:
            now_s = next_arrival_s
            next_arrival_s += rng.expovariate(arrivals_per_s)
            # The first system prompt is the most used one.
            system = min(int(rng.expovariate(0.7)), kind.system_prompts - 1)
            first = system * kind.system_blocks
            conversation = _Conversation(list(range(first, first + kind.system_blocks)), BLOCK_TOKENS)
            grown = 1 + int(rng.expovariate(1 / kind.first_blocks))
        conversation.blocks.extend(range(next_id, next_id + grown))
        next_id += grown
        conversation.last_tokens = rng.randint(1, BLOCK_TOKENS)
        yield {
            "timestamp": int(now_s * 1000),
            "input_length": (len(conversation.blocks) - 1) * BLOCK_TOKENS + conversation.last_tokens,
            "output_length": 1 + int(rng.expovariate(1 / 300)),
            "hash_ids": list(conversation.blocks),
        }
        if rng.random() < kind.more_turns:
            heapq.heappush(waiting, (now_s + rng.expovariate(1 / kind.think_s), number, conversation))


def write(path: Path, count: int, seed: int, traffic: Traffic | None = None) -> None:
    """Writes a trace, gzipped where the name ends in .gz."""
    with gzip.open(path, "wt", compresslevel=1) if path.suffix == ".gz" else path.open("w") as out:
        for request in requests(count, seed, traffic):
            out.write(json.dumps(request, separators=(",", ":")))
            out.write("\n")
