"""The fuzzers of native/fuzz: how they are built and run. tools/torture.py and the gate's own short run use this."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "fuzz"
SOURCES = ROOT / "native" / "fuzz"
# One input may take so long; a whole run, so much longer than it was asked to.
INPUT_DEADLINE_S = 10
RUN_SLACK_S = 120
BUILD_DEADLINE_S = 1500


def names() -> list[str]:
    return [source.stem for source in sorted(SOURCES.glob("*_fuzz.cpp"))]


def build() -> str:
    """Compiles all of them under sanitizers. Returns what went wrong, or nothing."""
    configure = [
        *("cmake", "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", "-DCMAKE_CXX_COMPILER=clang++"),
        *("-DDFKV_PYTHON=OFF", "-DDFKV_FUZZ=ON", "-DDFKV_SANITIZE=address,undefined"),
    ]
    if shutil.which("ccache"):
        configure.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
    # Paths are hashed relative to the clone, so that another clone finds what this one compiled.
    environ = {**os.environ, "CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1"}
    for command in (configure, ["cmake", "--build", str(BUILD)]):
        done = subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=BUILD_DEADLINE_S,
            check=False,
        )
        if done.returncode:
            return done.stdout[-6000:]
    return ""


def start(name: str, seconds: int, corpus: Path) -> subprocess.Popen[str]:
    """A fuzzer that runs for so long, from the seeds in native/fuzz/corpus and what `corpus` has, which it adds to.

    It writes what it found into build/fuzz and ends with an exit status other than 0.
    """
    corpus.mkdir(parents=True, exist_ok=True)
    limits = [
        f"-max_total_time={seconds}",
        f"-timeout={INPUT_DEADLINE_S}",
        "-rss_limit_mb=2048",
        "-print_final_stats=1",
    ]
    return subprocess.Popen(
        [str(BUILD / name), *limits, str(corpus), str(SOURCES / "corpus" / name)],
        cwd=BUILD,
        env={**os.environ, "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def finish(process: subprocess.Popen[str], seconds: int) -> tuple[int, str]:
    """(exit status, output); it is ended when it runs far beyond its time."""
    try:
        output, _ = process.communicate(timeout=seconds + RUN_SLACK_S)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        return 124, f"{output}\nstill running {RUN_SLACK_S} s after its time"
    except BaseException:
        process.kill()
        raise
    return process.returncode, output
