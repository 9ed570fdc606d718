"""Runs the tests and says where the time went.

usage: test.py all|fast [PYTEST ARGUMENT...]

all: build and lint, then every test. fast: build, then what needs neither an engine nor a sanitizer build. Ends with
one summary of pytest, to which tests/conftest.py adds the seconds of each share.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The quick ones first: a broken build is known in seconds.
FOLDERS = ("tests/unit", "tests/integration", "tests/native", "tests/engines")
FAST = "not engine and not native and not slow and not torture"
STEPS = {
    "all": (["make", "-s", "build/stamps/tools"], ["make", "-s", "build"], [sys.executable, "tools/lint.py"]),
    "fast": (["make", "-s", "build"],),
}


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in ("all", "fast"):
        print(__doc__, file=sys.stderr)
        return 2
    mode, extra = arguments[0], arguments[1:]
    with engine_setup() if mode == "all" else contextlib.nullcontext():
        start = time.monotonic()
        for step in STEPS[mode]:
            code = run(step)
            if code:
                print(f"error: {' '.join(step)} ended with {code}; no test was run", file=sys.stderr)
                return code
        command = [sys.executable, "-m", "pytest", f"--prepared-seconds={time.monotonic() - start:.1f}"]
        if mode == "fast":
            command += ["-m", FAST]
        return run([*command, *extra, *(folder for folder in FOLDERS if (ROOT / folder).is_dir())])


@contextlib.contextmanager
def engine_setup() -> Iterator[None]:
    """Installs the engines, which mostly waits for the network, while the compilers work. The tests wait for its locks."""
    log = ROOT / "build" / "engine-setup.log"
    log.parent.mkdir(exist_ok=True)
    with log.open("wb") as output:
        setup = subprocess.Popen(
            [sys.executable, "tests/engines/setup_engine.py", "vllm_cpu", "sglang_cpu", "lmcache_cpu"],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield
        finally:
            # An interrupt, not a termination: it then ends the installer below it too.
            setup.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                setup.wait(15)
            setup.kill()
            setup.wait()


def run(command: Sequence[str]) -> int:
    # A make above this one leaves its job server behind, which the makes below must not look for.
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS")}
    sys.stdout.flush()
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
