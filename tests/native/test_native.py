"""Builds the native tests under sanitizers and runs each of them."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SANITIZERS = {"asan_ubsan": "address,undefined", "tsan": "thread"}
NAMES = sorted(path.stem for path in (ROOT / "native" / "tests").glob("*_test.cpp"))
BUILD_DEADLINE_S = 1500
RUN_DEADLINE_S = 240
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}

pytestmark = [pytest.mark.native, pytest.mark.timeout(BUILD_DEADLINE_S + RUN_DEADLINE_S)]


@cache
def build(sanitizer: str) -> tuple[Path, str]:
    """(folder, what failed) of one build; targets that built can be run even when another did not."""
    folder = ROOT / "build" / f"native-{sanitizer}"
    configure = [
        *("cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", "-DDFKV_PYTHON=OFF", "-DDFKV_TESTS=ON"),
        # clang compiles instrumented code in half of gcc's time; the wheel is gcc's, so both compilers see the code.
        *("-DCMAKE_CXX_COMPILER=clang++", "-DCMAKE_BUILD_TYPE=None", f"-DDFKV_SANITIZE={SANITIZERS[sanitizer]}"),
    ]
    if shutil.which("ccache"):
        configure.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
    # Paths are hashed relative to the clone, so that another clone finds what this one compiled.
    environ = {**os.environ, "CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1"}
    for command in (configure, ["cmake", "--build", str(folder), "-j", str(os.cpu_count() or 1), "--", "-k", "0"]):
        code, output = run(command, environ, BUILD_DEADLINE_S)
        if code:
            return folder, output[-6000:]
    return folder, ""


def run(command: list[str], environ: dict[str, str], deadline_s: float) -> tuple[int, str]:
    """(exit status, output) of a command; past the deadline it is ended with all that it started."""
    with subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return 124, f"{output}\n{command[0]} took over {deadline_s} s"
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, output


@cache
def runner() -> list[str]:
    """Without address randomisation where that is allowed: older sanitizer runtimes need their shadow range free."""
    command = ["setarch", platform.machine(), "-R"]
    try:
        allowed = subprocess.run([*command, "true"], capture_output=True, timeout=10, check=False).returncode == 0
    except FileNotFoundError:
        allowed = False
    return command if allowed else []


# Grouped by sanitizer, so that each build is followed by its tests.
@pytest.mark.parametrize(("sanitizer", "name"), [pytest.param(s, n, id=f"{s}-{n}") for s in SANITIZERS for n in NAMES])
def test_native(sanitizer: str, name: str) -> None:
    folder, failure = build(sanitizer)
    executable = folder / name
    assert not failure, f"the build with {SANITIZERS[sanitizer]} failed:\n{failure}"
    code, output = run([*runner(), str(executable)], {**os.environ, **OPTIONS}, RUN_DEADLINE_S)
    assert code == 0, f"{name} ended with {code}:\n{output[-8000:]}"
    assert "test cases:" in output, f"{name} ran no doctest:\n{output[-2000:]}"
