"""What people install: the wheel, the source archive, and the command that they bring."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from dfkv_core import __version__

ROOT = Path(__file__).resolve().parents[2]
# Found at run time where they are there, never linked: the wheel must install and run without them.
FORBIDDEN = re.compile(r"ibverbs|rdmacm|mlx|cuda|cudart|nvidia|uring|xxhash", re.IGNORECASE)
ALLOWED = re.compile(r"^(libstdc\+\+|libgcc_s|libc|libm|libpthread|libdl|librt|ld-linux[a-z0-9-]*)\.so")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def pip(*arguments: str, python: str = sys.executable, cwd: Path = ROOT) -> None:
    done = subprocess.run(
        [python, "-m", "pip", "--disable-pip-version-check", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, f"pip {' '.join(arguments)}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this tree, built in the folder that `make build` uses, so that only what changed is compiled."""
    out = tmp_path_factory.mktemp("wheel")
    pip(
        "wheel",
        "-q",
        "--no-build-isolation",
        "--no-deps",
        "--config-settings=build-dir=build/wheel",
        "-w",
        str(out),
        ".",
    )
    (built,) = out.glob("*.whl")
    return built


def test_wheel_links_only_the_language_runtime(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        modules = [name for name in archive.namelist() if name.endswith(".so")]
        assert [re.sub(r"\..*", "", name) for name in modules] == ["dfkv_core/_native"]
        archive.extract(modules[0], tmp_path)
    shown = subprocess.run(["readelf", "-d", tmp_path / modules[0]], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\)\s+Shared library: \[([^\]]+)\]", shown)
    assert needed, shown
    assert [name for name in needed if FORBIDDEN.search(name)] == []
    assert [name for name in needed if not ALLOWED.match(name)] == []
    assert "RUNPATH" not in shown
    assert "RPATH" not in shown


def test_wheel_content(wheel: Path) -> None:
    assert wheel.name.startswith(f"dfkv-{__version__}-cp3")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"dfkv-{__version__}.dist-info/METADATA").decode()
        entry_points = archive.read(f"dfkv-{__version__}.dist-info/entry_points.txt").decode()
    for name in (
        "dfkv_core/_native.pyi",
        "dfkv_core/py.typed",
        "dfkv_core/cli/serve.py",
        "dfkv_connectors/__init__.py",
    ):
        assert name in names
    assert not [
        name for name in names if name.startswith(("tests/", "native/", "tools/", "demo/")) or "__pycache__" in name
    ]
    assert "License-Expression: Apache-2.0" in metadata
    assert re.search(r"^Requires-Python: .*3\.10", metadata, re.MULTILINE)
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert len(required) <= 6, required
    assert not [line for line in required if re.search(r"torch|vllm|sglang|==", line)]
    assert "dfkv = dfkv_core.cli:main" in entry_points


def test_source_archive_has_what_a_build_needs(tmp_path: Path) -> None:
    code = "import sys; from scikit_build_core.build import build_sdist; print(build_sdist(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, timeout=120, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    for name in (
        "CMakeLists.txt",
        "cmake/xxhash.cmake",
        "native/wire/frame.h",
        "pyproject.toml",
        "LICENSE",
        "README.md",
    ):
        assert name in names
    assert not [name for name in names if name.endswith(".so")]
    assert archive.stat().st_size < 5 << 20


def test_installed_command_works(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    pip("install", "-q", str(wheel), python=str(python), cwd=tmp_path)
    command = shutil.which("dfkv", path=str(tmp_path / "env" / "bin"))
    assert command
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("DFKV_", "PYTHON"))}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [command, *arguments], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False
        )

    assert json.loads(run("version", "--json").stdout) == {"version": __version__}
    report = json.loads(run("doctor", "--json").stdout)
    assert report["ok"], report
    checks = {check["check"]: check for check in report["checks"]}
    assert checks["native module"]["found"].startswith(str(tmp_path))
    # A connector module is there and says what to install where its engine is absent.
    done = subprocess.run(
        [python, "-c", "import dfkv_connectors.vllm"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
