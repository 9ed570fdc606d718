"""Long random tests: every fuzzer for a while, membership in virtual time, a thousand crashes of a store, a soak of real
nodes and clients, and the property tests with many more examples.

usage: python -m tools.torture [--seconds N] [--crashes N] [--soak-seconds N]

N seconds per fuzzer (default 60), N crashes (default 1000), a soak of N seconds (default 300)
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tools import fuzz

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "native-asan_ubsan"  # that of tests/native
CRASH_TEST = "slab_crash_test"
CORPUS = ROOT / "build" / "corpus"
PROPERTY_DEADLINE_S = 3600
BUILD_DEADLINE_S = 1500
CRASH_DEADLINE_S = 30  # of one crash, with its restart
HISTORIES = 100_000
SOAK_END_DEADLINE_S = 300  # beyond the soak's own length


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--crashes", type=int, default=1000)
    parser.add_argument("--soak-seconds", type=int, default=300)
    arguments = parser.parse_args()
    failed = run_fuzzers(arguments.seconds)
    print(f"torture: membership: {HISTORIES} histories", flush=True)
    histories = [sys.executable, "-m", "tests.simulation", "--histories", str(HISTORIES)]
    if subprocess.run(histories, cwd=ROOT, check=False, timeout=PROPERTY_DEADLINE_S).returncode:
        failed.append("membership")
    if not crash(arguments.crashes):
        failed.append("crashes")
    soak = [sys.executable, "-m", "tests.soak", "--seconds", str(arguments.soak_seconds)]
    limit = arguments.soak_seconds + SOAK_END_DEADLINE_S
    if subprocess.run(soak, cwd=ROOT, check=False, timeout=limit).returncode:
        failed.append("soak")
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


def crash(rounds: int) -> bool:
    """Kills a store that many times; the test prints its seed."""
    print(f"torture: {CRASH_TEST}: {rounds} rounds", flush=True)
    configure = [
        *("cmake", "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", "-DDFKV_PYTHON=OFF", "-DDFKV_TESTS=ON"),
        *("-DCMAKE_CXX_COMPILER=clang++", "-DCMAKE_BUILD_TYPE=None", "-DDFKV_SANITIZE=address,undefined"),
    ]
    for command in (configure, ["cmake", "--build", str(BUILD), "--target", CRASH_TEST]):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=BUILD_DEADLINE_S)
    environ = {**os.environ, "DFKV_CRASH_ROUNDS": str(rounds)}
    limit = rounds * CRASH_DEADLINE_S
    return subprocess.run([str(BUILD / CRASH_TEST)], env=environ, timeout=limit, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
