"""Runs the tests and says where the time went.

usage: test.py all|fast [PYTEST ARGUMENT...]

all: build and lint, then every test. fast: build, then what needs neither an engine nor a sanitizer build. Ends with
one summary of pytest, to which tests/conftest.py adds the seconds of each share.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The quick ones first: a broken build is known in seconds.
FOLDERS = ("tests/unit", "tests/integration", "tests/native", "tests/engines")
FAST = "not engine and not native and not slow"


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in ("all", "fast"):
        print(__doc__, file=sys.stderr)
        return 2
    mode, extra = arguments[0], arguments[1:]
    steps = [["make", "-s", "build"]]
    if mode == "all":
        steps = [["make", "-s", "build/stamps/tools"], *steps, [sys.executable, "tools/lint.py"]]
    start = time.monotonic()
    for step in steps:
        code = run(step)
        if code:
            print(f"error: {' '.join(step)} ended with {code}; no test was run", file=sys.stderr)
            return code
    prepared_s = time.monotonic() - start
    command = [sys.executable, "-m", "pytest", f"--prepared-seconds={prepared_s:.1f}"]
    if mode == "fast":
        command += ["-m", FAST]
    return run([*command, *extra, *(folder for folder in FOLDERS if (ROOT / folder).is_dir())])


def run(command: list[str]) -> int:
    # A make above this one leaves its job server behind, which the makes below must not look for.
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS")}
    sys.stdout.flush()
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
