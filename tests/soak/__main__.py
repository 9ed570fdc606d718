"""The soak from the command line: python -m tests.soak [--seconds N] [--seed N]

Prints its seed and what it saw; exits with 1 when something was not as promised.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

from tests.soak.soak import Soak, SoakError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    arguments = parser.parse_args()
    print(f"soak: seed {arguments.seed}, {arguments.seconds:.0f} s", flush=True)
    with tempfile.TemporaryDirectory(prefix="dfkv-soak-") as folder:
        tell = (lambda line: print(f"\r{line}", end="", flush=True)) if sys.stdout.isatty() else (lambda line: None)
        try:
            print(Soak(arguments.seed, arguments.seconds, Path(folder), tell).run().summary())
        except SoakError as error:
            print(f"soak: failed\n{error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
