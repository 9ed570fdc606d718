"""Reads traces: JSON lines, one request each, plain or gzipped.

A request has `hash_ids`, the ids of its prompt's blocks in order, where an id stands for the whole prefix up to its block;
`timestamp` in milliseconds, and `input_length` and `output_length` in tokens. Only the ids are needed to replay.
"""

from __future__ import annotations

import gzip
import io
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from dfkv_core.bounded import MAX_TRACE_LINE_BYTES, parse_json

if TYPE_CHECKING:
    from dfkv_core import _native

_GZIP_MAGIC = b"\x1f\x8b"
_BATCH_REQUESTS = 65536
_REPORT_EVERY_LINES = 4096
# JSON lines shrink about tenfold. What grows more than this on being unpacked was made to fill memory.
_MAX_EXPANSION = 200
_UNPACKED_FREE_BYTES = 64 * 1024 * 1024

Progress = Callable[[int, int], None]
"""Called with the bytes of the file that have been read and those it has."""


class TraceError(ValueError):
    """The file is not a trace. The message names file and line, what was found and what was expected."""


@dataclass
class RequestTrace:
    """The requests of one file, in its order. Arrays have one entry per request."""

    path: Path
    native: _native.Trace
    block_counts: array[int] = field(default_factory=lambda: array("I"))
    timestamps_ms: array[float] = field(default_factory=lambda: array("d"))  # empty: the trace has none
    input_tokens: array[int] = field(default_factory=lambda: array("Q"))  # empty: the trace has none
    output_tokens: int = 0

    @property
    def requests(self) -> int:
        return len(self.block_counts)

    @property
    def duration_s(self) -> float:
        """From the first request to the last; 0 where there are no timestamps."""
        if not self.timestamps_ms:
            return 0.0
        return (max(self.timestamps_ms) - min(self.timestamps_ms)) / 1000

    def prompt_tokens(self, block_tokens: int) -> int:
        """Tokens of all prompts; whole blocks where the trace does not say."""
        return sum(self.input_tokens) if self.input_tokens else self.native.blocks * block_tokens


def read_trace(path: Path, progress: Progress | None = None) -> RequestTrace:
    """Reads a file while it streams by. Raises TraceError, and OSError where it cannot be opened."""
    from dfkv_core import _native

    trace = RequestTrace(path, _native.Trace())
    counts, ids = array("I"), array("Q")
    has: tuple[bool, bool] | None = None  # timestamps, input lengths
    for number, line in _lines(path, progress):
        request = _request(path, number, line)
        hash_ids = request.get("hash_ids")
        if not isinstance(hash_ids, list):
            raise _fault(path, number, f"expected a list of block ids as hash_ids, found {hash_ids!r}")
        try:
            ids.extend(hash_ids)
        except (TypeError, OverflowError):
            raise _fault(path, number, f"expected block ids from 0 to 2^64 - 1, found {_odd_one(hash_ids)!r}") from None
        counts.append(len(hash_ids))
        timestamp, tokens = request.get("timestamp"), request.get("input_length")
        if has is None:
            has = timestamp is not None, tokens is not None
        if has != (timestamp is not None, tokens is not None):
            raise _fault(path, number, "timestamp and input_length are given in all requests or in none")
        if has[0]:
            trace.timestamps_ms.append(_number(path, number, "timestamp", timestamp))
        if has[1]:
            trace.input_tokens.append(int(_number(path, number, "input_length", tokens)))
        trace.output_tokens += int(_number(path, number, "output_length", request.get("output_length", 0)))
        if len(counts) == _BATCH_REQUESTS:
            trace.native.append(counts, ids)
            trace.block_counts.extend(counts)
            counts, ids = array("I"), array("Q")
    trace.native.append(counts, ids)
    trace.block_counts.extend(counts)
    if not trace.native.blocks:
        raise TraceError(f"{path} has no request with blocks; expected JSON lines with hash_ids")
    return trace


def _request(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        request = parse_json(line)
    except ValueError as error:
        raise _fault(path, number, f"expected a JSON object, found {_start_of(line)} ({error})") from None
    if not isinstance(request, dict):
        raise _fault(path, number, f"expected a JSON object, found {_start_of(line)}")
    return request


def _lines(path: Path, progress: Progress | None) -> Iterator[tuple[int, bytes]]:
    size = path.stat().st_size
    with path.open("rb") as raw, _unpacked(raw) as lines:
        number, unpacked = 0, 0
        try:
            # A limit for each line, so that a file without line breaks is not read as one.
            while line := lines.readline(MAX_TRACE_LINE_BYTES + 1):
                number += 1
                unpacked += len(line)
                if len(line) > MAX_TRACE_LINE_BYTES:
                    raise _fault(path, number, f"the line is longer than {MAX_TRACE_LINE_BYTES} bytes")
                if unpacked > _MAX_EXPANSION * size + _UNPACKED_FREE_BYTES:
                    raise _fault(path, number, f"the file unpacks to more than {_MAX_EXPANSION} times its size")
                if progress is not None and number % _REPORT_EVERY_LINES == 0:
                    progress(raw.tell(), size)
                if line.strip():
                    yield number, line
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TraceError(f"{path} is damaged after line {number}: {error}; copy or compress it again") from None
    if progress is not None:
        progress(size, size)


@contextmanager
def _unpacked(raw: BinaryIO) -> Iterator[BinaryIO]:
    packed = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    raw.seek(0)
    if packed:
        with gzip.open(raw, "rb") as lines:
            yield io.BufferedReader(lines, 1 << 20)
    else:
        yield raw


def _number(path: Path, number: int, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**63:
        raise _fault(path, number, f"expected a number of 0 or more as {name}, found {value!r}")
    return value


def _odd_one(ids: list[Any]) -> Any:
    return next((one for one in ids if not isinstance(one, int) or not 0 <= one < 2**64), None)


def _start_of(line: bytes) -> str:
    text = line.decode("utf-8", "replace").strip()
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


def _fault(path: Path, number: int, what: str) -> TraceError:
    return TraceError(f"{path}:{number}: {what}")
