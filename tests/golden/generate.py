"""Writes the golden vectors and frames out of the independent implementation: python -m tests.golden.generate

Run it only when a format changes on purpose, and read the difference: a changed vector is a changed format.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.golden import traffic, vectors

GOLDEN_DIR = Path(__file__).parent
CORPUS_DIR = GOLDEN_DIR.parents[1] / "native" / "fuzz" / "corpus"


def files() -> dict[Path, bytes]:
    """Every golden file and every seed of the fuzzers, by its path."""
    made = {GOLDEN_DIR / name: content for name, content in {**vectors.files(), **traffic.files()}.items()}
    return {**made, **{CORPUS_DIR / name: content for name, content in traffic.fuzz_seeds().items()}}


def main() -> None:
    """Writes them and names those that are new or different."""
    for path, content in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)
            sys.stdout.write(f"wrote {path}\n")


if __name__ == "__main__":
    main()
