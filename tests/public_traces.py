"""Where the public traces are that the simulator is checked against. They belong to others and are not in the project."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = {
    "conversation": "mooncake_conversation_trace.jsonl",
    "synthetic": "mooncake_synthetic_trace.jsonl",
    "agentic": "agentic_subset_blk512.jsonl.gz",
}


def public_trace(name: str) -> Path:
    """The file, from the folder DFKV_TRACES or one beside the project. Skips the test where there is none."""
    given = os.environ.get("DFKV_TRACES")
    folder = Path(given) if given else ROOT.parent / "shared" / "traces"
    path = folder / FILES[name]
    if not path.is_file():
        pytest.skip(f"no public trace {FILES[name]}: set DFKV_TRACES to the folder that has it")
    return path
