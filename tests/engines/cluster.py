"""What the engine tests ask and look at: prompts, requests with what they moved, objects on the node."""

import ctypes
import random
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dfkv_core._native import Client
from dfkv_core.keys import Status, pack_items, unpack_statuses
from tests.reference import identity

from .http_client import Completion, Metrics
from .setup_engine import EngineEnv
from .vllm_server import DfkvServe, VllmServer

BLOCK_TOKENS = 128
ANSWER_TOKENS = 12
PATIENT = {"lookup_deadline_ms": 3000}
"""On a busy machine half a second says more about the machine than about a lookup."""
SETTLE_DEADLINE_S = 15.0
EXTRA_CACHE_SALT = 2
_SHARING = re.compile(r"sharing KV in namespace ([0-9a-f]{32}) .*chunks of (\d+) tokens, (\d+) parts of (\d+) bytes")


@dataclass(frozen=True)
class Sharing:
    """What the engine's log says about how it shares."""

    namespace: bytes
    chunk_tokens: int
    parts: int
    part_bytes: int

    @classmethod
    def of(cls, server: VllmServer) -> "Sharing":
        found = _SHARING.findall(server.log.read_text(errors="replace"))
        assert found, f"the log of {server.name} says nothing about sharing\n{server.tail()}"
        namespace, chunk_tokens, parts, part_bytes = found[-1]
        return cls(bytes.fromhex(namespace), int(chunk_tokens), int(parts), int(part_bytes))

    def restorable(self, prompt_tokens: int) -> int:
        """Tokens of a stored prompt that a restore takes: whole chunks, at least one token is left to compute."""
        return (prompt_tokens - 1) // self.chunk_tokens * self.chunk_tokens


@dataclass
class Cluster:
    """One node and two engines on the same weights with different hash seeds.

    ``before_node``: what the reader answered before any node was there, and the seconds it took.
    """

    engine: EngineEnv
    node: DfkvServe
    model: Path
    reader: VllmServer
    writer: VllmServer
    before_node: "Answer"

    @property
    def sharing(self) -> Sharing:
        return Sharing.of(self.writer)


@dataclass(frozen=True)
class Answer:
    """A completion, and what the connector of its engine counted meanwhile (all requests of that engine)."""

    completion: Completion
    before: Metrics
    after: Metrics

    def counted(self, family: str, **labels: str) -> float:
        name = f"vllm:dfkv_{family}_total"
        return self.after.total(name, **labels) - self.before.total(name, **labels)

    @property
    def loaded(self) -> int:
        """Prompt tokens restored from dfkv."""
        return int(self.counted("tokens", kind="loaded"))

    def funnel(self) -> str:
        """What became of the request's tokens and lookups, for messages."""
        parts = []
        for family, label in (
            ("tokens", "kind"),
            ("lookups", "result"),
            ("load_objects", "status"),
            ("save_objects", "status"),
        ):
            name = f"vllm:dfkv_{family}_total"
            before = self.before.by_label(name, label)
            counted = {key: int(value - before.get(key, 0)) for key, value in self.after.by_label(name, label).items()}
            parts.append(f"{family} { {key: value for key, value in counted.items() if value} }")
        return ", ".join(parts)

    @property
    def local(self) -> int:
        """Prompt tokens that the engine had itself."""
        return self.completion.cached_tokens - self.loaded


def prompt(name: str, tokens: int) -> list[int]:
    """Random byte tokens, the same for the same name."""
    return random.Random(name).choices(range(256), k=tokens)


def ask(server: VllmServer, tokens: list[int], *, max_tokens: int = ANSWER_TOKENS, **options: Any) -> Answer:
    """A completion with what it moved. One at a time per engine."""
    before = server.client.metrics()
    completion = server.client.complete(tokens, max_tokens=max_tokens, **options)
    assert len(completion.token_ids) == max_tokens, completion
    return Answer(completion, before, settled(server, before, 1))


def settled(server: VllmServer, before: Metrics, requests: int) -> Metrics:
    """The engine's metrics once they cover `requests` more requests than `before`."""
    until = time.monotonic() + SETTLE_DEADLINE_S
    while True:
        after = server.client.metrics()
        if after.total("vllm:request_success_total") - before.total("vllm:request_success_total") >= requests:
            return after
        assert time.monotonic() < until, f"{server.name} did not count {requests} requests in {SETTLE_DEADLINE_S} s"
        time.sleep(0.02)


_salts = iter(range(1 << 30))


def cold(server: VllmServer, tokens: list[int], *, max_tokens: int = ANSWER_TOKENS, **options: Any) -> Completion:
    """The same prompt computed from the first token: a cache salt that nobody else has shares with nobody."""
    completion = server.client.complete(
        tokens, max_tokens=max_tokens, cache_salt=f"cold-{server.port}-{next(_salts)}", **options
    )
    assert completion.cached_tokens == 0, "a run that should be cold took something from a cache"
    return completion


def store(cluster: Cluster, tokens: list[int], **options: Any) -> Answer:
    """Computes a prompt on the writer and waits until it is stored."""
    answer = ask(cluster.writer, tokens, **options)
    if answer.counted("lookups", result="not_found"):
        wait_saved(cluster.writer, answer, len(tokens))
    cluster.node.wait_quiet(quiet_s=0.3)
    return answer


def wait_saved(server: VllmServer, answer: Answer, tokens: int) -> Answer:
    """Waits until every full chunk of a prompt that nobody had is stored. Returns the answer with what was counted since."""
    sharing = Sharing.of(server)
    expected = tokens // sharing.chunk_tokens * sharing.parts
    until = time.monotonic() + SETTLE_DEADLINE_S
    while True:
        later = Answer(answer.completion, answer.before, server.client.metrics())
        if later.counted("save_objects") >= expected:
            return later
        assert time.monotonic() < until, f"{server.name} did not store {expected} objects: {later.funnel()}"
        time.sleep(0.05)


def chunk_ids(sharing: Sharing, tokens: list[int], *, cache_salt: str = "") -> list[bytes]:
    """Ids of a prompt's chunks, from the independent implementation: a chunk's is that of its last block."""
    tip = identity.chain_start()
    extras = [(EXTRA_CACHE_SALT, cache_salt.encode())] if cache_salt else []
    ids = []
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        tip = identity.chain_next(tip, tokens[end - BLOCK_TOKENS : end], extras)
        extras = []
        if end % sharing.chunk_tokens == 0:
            ids.append(tip[:16])
    return ids


class Objects:
    """The objects of one engine's namespace on a node, by chunk and part. Closes with its context."""

    def __init__(self, node: DfkvServe, sharing: Sharing) -> None:
        self._client = Client([("127.0.0.1", node.port)], name="engine tests")
        self._sharing = sharing
        assert self._client.wait_ready(5000)

    def __enter__(self) -> "Objects":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def _items(self, chunks: Iterable[bytes], length: int) -> bytes:
        parts = [identity.part(0, 0, 0, 0, index, self._sharing.parts) for index in range(self._sharing.parts)]
        keys = [(chunk, part) for chunk in chunks for part in parts]
        return pack_items(b"".join(chunk for chunk, _ in keys), [part for _, part in keys], length)

    def read(self, chunks: list[bytes]) -> list[bytes | None]:
        """The payload of every part of every chunk, parts of a chunk together; None for what is not there."""
        count, size = len(chunks) * self._sharing.parts, self._sharing.part_bytes
        buffer = bytearray(count * size)
        address = _address(buffer)
        segments = b"".join(
            (address + index * size).to_bytes(8, "little") + size.to_bytes(8, "little") for index in range(count)
        )
        counts = (1).to_bytes(4, "little") * count
        operation = self._client.get(self._sharing.namespace, self._items(chunks, size), segments, counts, 5000)
        assert operation.wait(6000)
        statuses = unpack_statuses(operation.statuses())
        return [
            bytes(buffer[index * size : (index + 1) * size]) if status == Status.OK else None
            for index, status in enumerate(statuses)
        ]

    def replace(self, chunk: bytes, payload: bytes) -> None:
        """Puts `payload` in the place of every part of a chunk."""
        parts = self._sharing.parts
        source = bytearray(payload)
        segment = _address(source).to_bytes(8, "little") + len(source).to_bytes(8, "little")
        operation = self._client.put(
            self._sharing.namespace,
            self._items([chunk], len(source)),
            segment * parts,
            (1).to_bytes(4, "little") * parts,
            5000,
            replace=True,
        )
        assert operation.wait(6000)
        assert unpack_statuses(operation.statuses()) == [Status.OK] * parts


def _address(buffer: bytearray) -> int:
    return ctypes.addressof((ctypes.c_char * len(buffer)).from_buffer(buffer))


def load_adapter(server: VllmServer, name: str, path: Path) -> None:
    server.client.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
