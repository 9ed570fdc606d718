"""Long random tests: every fuzzer for a while, and the property tests with many more examples.

usage: torture.py [--seconds N]      N seconds per fuzzer (default 60)
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "fuzz"
CORPUS = ROOT / "build" / "corpus"
PROPERTY_DEADLINE_S = 3600


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60)
    seconds: int = parser.parse_args().seconds
    failed = fuzz(seconds)
    tests = [sys.executable, "-m", "pytest", "-m", "not engine and not native", "--hypothesis-profile=torture"]
    if subprocess.run([*tests, "tests"], cwd=ROOT, check=False, timeout=PROPERTY_DEADLINE_S).returncode:
        failed.append("property tests")
    print(f"torture: {'failed: ' + ', '.join(failed) if failed else 'passed'}")
    return 1 if failed else 0


def fuzz(seconds: int) -> list[str]:
    """Names of the fuzzers that found something; what they found lies in build/fuzz."""
    configure = [
        *("cmake", "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", "-DCMAKE_CXX_COMPILER=clang++"),
        *("-DDFKV_PYTHON=OFF", "-DDFKV_FUZZ=ON", "-DDFKV_SANITIZE=address,undefined"),
    ]
    for command in (configure, ["cmake", "--build", str(BUILD)]):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    failed = []
    for source in sorted((ROOT / "native" / "fuzz").glob("*_fuzz.cpp")):
        name = source.stem
        corpus = CORPUS / name
        corpus.mkdir(parents=True, exist_ok=True)
        seeds = ROOT / "native" / "fuzz" / "corpus" / name
        print(f"torture: {name}: {seconds} s", flush=True)
        done = subprocess.run(
            [
                str(BUILD / name),
                f"-max_total_time={seconds}",
                "-timeout=10",
                "-rss_limit_mb=2048",
                str(corpus),
                str(seeds),
            ],
            cwd=BUILD,
            env={**os.environ, "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=seconds + 120,
            check=False,
        )
        if done.returncode:
            failed.append(name)
            print(done.stdout[-6000:])
    return failed


if __name__ == "__main__":
    sys.exit(main())
