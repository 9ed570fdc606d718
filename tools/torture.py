"""Long random tests: every fuzzer for a while, membership in virtual time, and the property tests with many more examples.

usage: python -m tools.torture [--seconds N]      N seconds per fuzzer (default 60)
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from tools import fuzz

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "build" / "corpus"
PROPERTY_DEADLINE_S = 3600
HISTORIES = 100_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60)
    seconds: int = parser.parse_args().seconds
    failed = run_fuzzers(seconds)
    print(f"torture: membership: {HISTORIES} histories", flush=True)
    histories = [sys.executable, "-m", "tests.simulation", "--histories", str(HISTORIES)]
    if subprocess.run(histories, cwd=ROOT, check=False, timeout=PROPERTY_DEADLINE_S).returncode:
        failed.append("membership")
    tests = [sys.executable, "-m", "pytest", "-m", "not engine and not native", "--hypothesis-profile=torture"]
    if subprocess.run([*tests, "tests"], cwd=ROOT, check=False, timeout=PROPERTY_DEADLINE_S).returncode:
        failed.append("property tests")
    print(f"torture: {'failed: ' + ', '.join(failed) if failed else 'passed'}")
    return 1 if failed else 0


def run_fuzzers(seconds: int) -> list[str]:
    """Names of the fuzzers that found something; what they found lies in build/fuzz."""
    if failure := fuzz.build():
        print(failure)
        return ["the build of the fuzzers"]
    failed = []
    for name in fuzz.names():
        print(f"torture: {name}: {seconds} s", flush=True)
        code, output = fuzz.finish(fuzz.start(name, seconds, CORPUS / name), seconds)
        if code:
            failed.append(name)
            print(output[-6000:])
    return failed


if __name__ == "__main__":
    sys.exit(main())
