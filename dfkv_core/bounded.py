"""Reads files that others wrote: never more than a limit, and no JSON that takes the process down.

Every parser of the project reads through here or counts by itself; no file is trusted to be as small as it should be.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

MIB = 1024 * 1024
MAX_CONFIG_BYTES = MIB
MAX_SECRET_BYTES = 64 * 1024
MAX_MODEL_CONFIG_BYTES = 16 * MIB
# What the safetensors format itself allows for a header.
MAX_TENSOR_INDEX_BYTES = 100_000_000
MAX_TRACE_LINE_BYTES = 8 * MIB


class TooLargeError(ValueError):
    """A file is larger than anything of its kind is."""


def read_bytes(path: str | os.PathLike[str], limit_bytes: int) -> bytes:
    """The whole file. Raises OSError, and TooLargeError without having read more than the limit."""
    with Path(path).open("rb") as file:
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise TooLargeError(f"more than {limit_bytes} bytes, which is too large for such a file")
    return data


def parse_json(data: bytes | str) -> Any:
    """The value. Raises ValueError, also for nesting that is too deep. The size is the caller's to limit."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deep") from None


def read_json(path: str | os.PathLike[str], limit_bytes: int) -> Any:
    """The value in a JSON file. Raises OSError and ValueError."""
    return parse_json(read_bytes(path, limit_bytes))
