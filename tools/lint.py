"""Every check of style and types: ruff, mypy, clang-format, clang-tidy. Prints one line per check.

clang-tidy is slow, so what it found clean is remembered by content in ${XDG_CACHE_HOME:-~/.cache}/dfkv/tidy: a file is
read again when it, a header of ours that it includes, its flags, the checks or the tool have changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "tidy"
TIDY_FOLDERS = ("wire", "slab", "ram", "net", "plan", "bind")
REMEMBERED_DAYS = 60
TIDY_DEADLINE_S = 240


def main() -> int:
    failed = []
    checks: list[tuple[str, Callable[[], str]]] = [
        ("ruff", lambda: tool([sys.executable, "-m", "ruff", "check", "-q", "."])),
        ("ruff format", lambda: tool([sys.executable, "-m", "ruff", "format", "--check", "-q", "."])),
        ("mypy", lambda: tool([sys.executable, "-m", "mypy", "--no-error-summary"])),
        ("clang-format", clang_format),
        ("clang-tidy", clang_tidy),
    ]
    for name, check in checks:
        start = time.monotonic()
        output = check()
        print(f"lint: {name}: {'failed' if output else 'ok'} ({time.monotonic() - start:.1f} s)", flush=True)
        if output:
            failed.append(name)
            print(output.rstrip(), flush=True)
    if failed:
        print(f"lint: failed: {', '.join(failed)} (`make format` mends the layout)", file=sys.stderr)
    return 1 if failed else 0


def tool(command: Sequence[str]) -> str:
    """Nothing when the command was content, else what it printed."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stdout + done.stderr) or f"ended with {done.returncode}"


def clang_format() -> str:
    files = sorted(
        str(path.relative_to(ROOT)) for kind in ("cpp", "h") for path in (ROOT / "native").rglob(f"*.{kind}")
    )
    return tool(["clang-format", "--dry-run", "-Werror", *files])


def clang_tidy() -> str:
    configured = tool(
        [
            *("cmake", "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", "-DCMAKE_CXX_COMPILER=clang++"),
            *(f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"),
        ]
    )
    if configured:
        return configured
    version = subprocess.run(["clang-tidy", "--version"], capture_output=True, text=True, check=True).stdout
    settings = [ROOT / ".clang-tidy", *sorted((ROOT / "native").rglob(".clang-tidy"))]
    salt = "\0".join([version, *(path.read_text() for path in settings)]).encode()
    entries = json.loads((BUILD / "compile_commands.json").read_text())
    folders = {ROOT / "native" / name for name in TIDY_FOLDERS}
    ours = [entry for entry in entries if Path(entry["file"]).parent in folders]
    memory = cache_root() / "tidy"
    memory.mkdir(parents=True, exist_ok=True)
    forget_old(memory)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        outputs = list(pool.map(lambda entry: tidy_one(entry, salt, memory), ours))
    return "\n".join(output for output in outputs if output)


def tidy_one(entry: dict[str, str], salt: bytes, memory: Path) -> str:
    source = entry["file"]
    key = content_key(entry, salt)
    if key and (memory / key).exists():
        (memory / key).touch()
        return ""
    try:
        done = subprocess.run(
            ["clang-tidy", "--quiet", "-p", str(BUILD), source],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIDY_DEADLINE_S,
        )
    except subprocess.TimeoutExpired:
        return f"{source}: clang-tidy took over {TIDY_DEADLINE_S} s"
    if done.returncode == 0:
        if key:
            (memory / key).touch()
        return ""
    return done.stdout + ("" if done.stdout.strip() else done.stderr)


def content_key(entry: dict[str, str], salt: bytes) -> str | None:
    """Digest of all that the verdict depends on, without where the clone lies. None: the file does not preprocess."""
    words = shlex.split(entry["command"])
    output = words.index("-o")
    flags = [word for word in words[:output] + words[output + 2 :] if word not in ("-c", entry["file"])]
    listed = subprocess.run(
        [*flags, "-MM", entry["file"]], cwd=entry["directory"], capture_output=True, text=True, check=False
    )
    if listed.returncode:
        return None
    digest = hashlib.sha256(salt)
    digest.update(" ".join(flags[1:]).replace(str(ROOT), "").encode())
    for name in listed.stdout.replace("\\\n", " ").partition(":")[2].split():
        path = (Path(entry["directory"]) / name).resolve()
        if path.is_relative_to(ROOT / "native"):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dfkv"


def forget_old(memory: Path) -> None:
    oldest = time.time() - REMEMBERED_DAYS * 86400
    for path in memory.iterdir():
        if path.stat().st_mtime < oldest:
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
