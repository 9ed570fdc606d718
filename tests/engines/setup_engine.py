"""Puts a real engine into a virtual environment of its own, outside the clone, once.

usage: setup_engine.py [NAME...]     (default vllm_cpu; prints each environment's path on stdout)

NAME is a directory beside this file with an ``install.sh VENV PYTHON``. The environment lies in
``${XDG_CACHE_HOME:-~/.cache}/dfkv/engines/NAME-DIGEST``; the digest covers every file of that directory and the version of
Python, so a changed requirement makes a new environment and an old clone keeps its own. Standard library only: it runs
before anything is installed.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
STAMP = "dfkv-engine.json"
NEEDED_BYTES = 6 << 30  # the environment, pip's temporary files and its cache
LOCK_DEADLINE_S = 1800.0
INSTALL_DEADLINE_S = 1500.0
ATTEMPTS = 3

_NETWORK_FAULT = re.compile(
    r"timed? ?out|timeout|connection (reset|aborted|refused|broken)|temporary failure|name resolution|"
    r"incompleteread|protocolerror|max retries|remote end closed|\b50[234]\b|hashes do not match|SSLError",
    re.IGNORECASE,
)

Report = Callable[[str], None]


class EngineSetupError(RuntimeError):
    """An engine's environment could not be made; the message says what was tried and what to do."""


@dataclass(frozen=True)
class EngineEnv:
    """An installed engine. ``installed_s``: seconds this call spent on installing; 0 when it was there already."""

    name: str
    path: Path
    digest: str
    installed_s: float

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    def script(self, name: str) -> Path:
        """A console script of the environment."""
        return self.path / "bin" / name


def cache_root() -> Path:
    """Where everything lives that is costly to make and does not belong in the clone."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dfkv"


def base_python() -> str:
    """The interpreter behind the running one: an environment must not be stacked on another environment."""
    base = getattr(sys, "_base_executable", None)
    return str(base) if base else sys.executable


def recipe_digest(recipe: Path) -> str:
    """12 hex digits over the recipe's files (names and contents) and the version of Python."""
    digest = hashlib.sha256(f"python {sys.version_info[0]}.{sys.version_info[1]}\n".encode())
    for path in sorted(p for p in recipe.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(recipe).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


def ensure_engine(name: str = "vllm_cpu", report: Report | None = None) -> EngineEnv:
    """Returns the environment of engine `name`, installing it first where it is missing.

    Safe for several processes at once: one installs, the others wait for it (at most LOCK_DEADLINE_S). An installation that
    was interrupted has no stamp and is made anew. Raises EngineSetupError.
    """
    say = report or _to_stderr
    recipe = HERE / name
    if not (recipe / "install.sh").is_file():
        known = sorted(p.parent.name for p in HERE.glob("*/install.sh"))
        raise EngineSetupError(f"no engine named {name!r}; known: {', '.join(known)}")
    digest = recipe_digest(recipe)
    venv = cache_root() / "engines" / f"{name}-{digest}"
    if _is_complete(venv):
        return EngineEnv(name, venv, digest, 0.0)
    venv.parent.mkdir(parents=True, exist_ok=True)
    with _lock(venv.with_name(venv.name + ".lock"), say):
        if _is_complete(venv):
            return EngineEnv(name, venv, digest, 0.0)
        return EngineEnv(name, venv, digest, _install(name, recipe, venv, say))


def _is_complete(venv: Path) -> bool:
    return (venv / STAMP).is_file() and (venv / "bin" / "python").exists()


def _install(name: str, recipe: Path, venv: Path, say: Report) -> float:
    free = shutil.disk_usage(venv.parent).free
    if free < NEEDED_BYTES:
        raise EngineSetupError(
            f"{venv.parent} has {free >> 20} MiB free, installing {name} needs {NEEDED_BYTES >> 20} MiB: free some space "
            "or set XDG_CACHE_HOME to a larger file system"
        )
    start = time.monotonic()
    log = venv.with_name(venv.name + ".log")
    for attempt in range(1, ATTEMPTS + 1):
        shutil.rmtree(venv, ignore_errors=True)
        say(f"installing {name} into {venv} (up to 3 GB and 5 minutes; log: {log})")
        code = _run_logged(
            ["bash", str(recipe / "install.sh"), str(venv), base_python()], log, f"installing {name}", say
        )
        if code == 0:
            break
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        if attempt == ATTEMPTS or not _NETWORK_FAULT.search(tail):
            raise EngineSetupError(f"{recipe / 'install.sh'} ended with {code}; the end of {log}:\n{tail}")
        say(f"the network failed ({tail.splitlines()[-1][:160]}); trying again, {attempt + 1} of {ATTEMPTS}")
        time.sleep(5.0 * attempt)
    elapsed = time.monotonic() - start
    stamp = {"name": name, "python": sys.version.split()[0], "seconds": round(elapsed, 1)}
    temporary = venv / (STAMP + ".new")
    temporary.write_text(json.dumps(stamp) + "\n")
    temporary.replace(venv / STAMP)
    say(f"installed {name} in {elapsed:.0f} s")
    return elapsed


def _run_logged(command: list[str], log: Path, what: str, say: Report) -> int:
    """Runs a command with its output in `log`, reporting every 15 s. Returns its exit status; 124 past the deadline."""
    env = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_DEFAULT_TIMEOUT="60", PIP_RETRIES="8")
    env.pop("PYTHONPATH", None)
    start = time.monotonic()
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env, start_new_session=True
        ) as process,
    ):
        try:
            while True:
                try:
                    return process.wait(timeout=15.0)
                except subprocess.TimeoutExpired:
                    elapsed = time.monotonic() - start
                    if elapsed > INSTALL_DEADLINE_S:
                        output.write(f"\nstopped after {elapsed:.0f} s: timed out\n".encode())
                        return 124
                    say(f"{what}: {elapsed:.0f} s")
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                process.wait()


@contextlib.contextmanager
def _lock(path: Path, say: Report) -> Iterator[None]:
    """An exclusive lock between processes; it ends with the process that holds it."""
    deadline = time.monotonic() + LOCK_DEADLINE_S
    told = False
    with path.open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise EngineSetupError(
                        f"another process has held {path} for {LOCK_DEADLINE_S:.0f} s; end it and start again"
                    ) from None
                if not told:
                    say(f"another process is installing this engine; waiting for {path}")
                    told = True
                time.sleep(0.5)
        yield


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    for name in arguments or ["vllm_cpu"]:
        try:
            print(ensure_engine(name).path, flush=True)
        except EngineSetupError as error:
            _to_stderr(f"error: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
