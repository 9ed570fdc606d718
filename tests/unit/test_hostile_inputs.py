"""Nothing from outside is executed, and no parser takes more memory or time than its input is worth."""

from __future__ import annotations

import ast
import gzip
import json
import random
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dfkv_core import _native, bounded
from dfkv_core.config import ClientConfig, ConfigError, NodeConfig, load_config, read_secret
from dfkv_core.membership import View
from dfkv_core.namespace import DescriptorError, NamespaceDescriptor
from dfkv_core.plan.model import ModelConfigError, read_kv_bytes_per_token
from dfkv_core.plan.trace import TraceError, read_trace
from dfkv_core.weights import WeightsError, weights_digest

ROOT = Path(__file__).resolve().parents[2]
MIB = bounded.MIB
# What turns bytes into code, or starts a shell: module, or module and name.
FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml", "xml", "code"}
FORBIDDEN_CALLS = {
    *("eval", "exec", "compile", "__import__", "input"),
    *("os.system", "os.popen", "torch.load", "np.load", "numpy.load", "pd.read_pickle", "importlib.import_module"),
    *("runpy.run_path", "runpy.run_module", "builtins.eval", "builtins.exec", "ctypes.pythonapi", "types.CodeType"),
}
# Reads of whole files go through dfkv_core.bounded. What the kernel writes is as large as it says.
READS = {"read_text", "read_bytes", "readlines"}
JSON_READS = {"json.load", "json.loads", "tomllib.load", "tomllib.loads"}
ALLOWED = {
    ("dfkv_core/bounded.py", "json.loads"),
    ("dfkv_core/config_load.py", "tomllib.loads"),
    ("dfkv_core/host.py", "read_text"),
    ("dfkv_core/cli/serve.py", "read_text"),
}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else node.attr
    return node.id if isinstance(node, ast.Name) else ""


def dangers(path: str, tree: ast.AST) -> Iterator[str]:
    """What in a module must not be there."""
    for node in ast.walk(tree):
        where = f"{path}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            for imported in node.names:
                if imported.name.partition(".")[0] in FORBIDDEN_MODULES:
                    yield f"{where}: import {imported.name}"
        elif isinstance(node, ast.ImportFrom):
            if node.module and node.module.partition(".")[0] in FORBIDDEN_MODULES:
                yield f"{where}: from {node.module}"
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            last = name.rpartition(".")[2]
            if name in FORBIDDEN_CALLS:
                yield f"{where}: {name}()"
            if any(word.arg == "shell" for word in node.keywords):
                yield f"{where}: {name}(shell=)"
            method = last if last in READS and isinstance(node.func, ast.Attribute) else ""
            for found in (method, name if name in JSON_READS else ""):
                if found and (path, found) not in ALLOWED:
                    yield f"{where}: {name}() reads without a limit"


def test_nothing_from_outside_is_executed() -> None:
    found = []
    files = 0
    for package in ("dfkv_core", "dfkv_connectors"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            found += list(dangers(name, ast.parse(path.read_text(), name)))
            files += 1
    assert files > 40
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from yaml import load",
        "eval(text)",
        "import torch\ntorch.load(path)",
        "subprocess.run(command, shell=True)",
        "json.loads(path.read_text())",
        "file.read_bytes()",
        "import os\nos.system(command)",
        "importlib.import_module(name)",
    ],
)
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert list(dangers("some.py", ast.parse(source)))


def bounded_memory(limit_bytes: int, call: Callable[[], object]) -> None:
    tracemalloc.start()
    try:
        call()
        assert tracemalloc.get_traced_memory()[1] < limit_bytes
    finally:
        tracemalloc.stop()


class TestFiles:
    """Files that are too large, too deep or without an end."""

    def test_configuration(self, tmp_path: Path) -> None:
        file = tmp_path / "dfkv.toml"
        for content in (b"# " + b"x" * 3 * MIB, b"a = " + b"[" * 100_000, b"\xff\xfe"):
            file.write_bytes(content)

            def load() -> None:
                with pytest.raises(ConfigError, match="TOML"):
                    load_config(ClientConfig, file=file, environ={})

            bounded_memory(4 * MIB, load)

    def test_values_of_the_environment(self) -> None:
        for value in ("9" * 100_000, "1." + "9" * 400, "9" * 400 + ".5", "[" * 100_000, "\x00"):
            with pytest.raises(ConfigError):
                load_config(NodeConfig, environ={"DFKV_NODE__RAM_BYTES": value})

    def test_secret(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="too large"):
            read_secret(Path("/dev/zero"))

    @pytest.mark.parametrize(
        "header",
        [
            struct.pack("<Q", 2**64 - 1),
            struct.pack("<Q", 2**40),
            struct.pack("<Q", 200_000) + b"[" * 200_000,
            struct.pack("<Q", 200_000) + b'{"a":' * 40_000,
            struct.pack("<Q", 2) + b"[]",
            struct.pack("<Q", 5) + b'"abc"',
            struct.pack("<Q", 0),
            b"\x00" * 5,
        ],
    )
    def test_header_of_weights(self, tmp_path: Path, header: bytes) -> None:
        (tmp_path / "model.safetensors").write_bytes(header)

        def digest() -> None:
            with pytest.raises(WeightsError):
                weights_digest(tmp_path)

        bounded_memory(16 * MIB, digest)

    def test_header_of_weights_that_is_there_and_too_large(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        path.write_bytes(struct.pack("<Q", 150_000_000))
        with path.open("r+b") as file:
            file.truncate(200_000_000)  # sparse

        def digest() -> None:
            with pytest.raises(WeightsError, match="150000000"):
                weights_digest(tmp_path)

        bounded_memory(MIB, digest)

    def test_mutated_header_of_weights(self, tmp_path: Path) -> None:
        rng = random.Random(1)
        entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
        good = json.dumps({"a": entry, "b": entry}).encode()
        for _ in range(500):
            data = bytearray(good)
            for _ in range(rng.randrange(1, 4)):
                data[rng.randrange(len(data))] = rng.choice(b'{}[]",:0129e-.\x00\xff')
            (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(data)) + data + bytes(16))
            try:
                weights_digest(tmp_path)
            except WeightsError:
                continue

    def test_index_of_weights_names_nothing_outside(self, tmp_path: Path) -> None:
        outside = tmp_path / "outside.safetensors"
        outside.write_bytes(struct.pack("<Q", 2) + b"{}")
        inside = tmp_path / "model"
        inside.mkdir()
        index = inside / "model.safetensors.index.json"
        for name in ("../outside.safetensors", str(outside), "..", ""):
            index.write_text(json.dumps({"weight_map": {"a": name}}))
            with pytest.raises(WeightsError):
                weights_digest(inside)
        index.write_text("[" * 100_000)
        with pytest.raises(WeightsError, match="too deep"):
            weights_digest(inside)

    def test_model_config(self, tmp_path: Path) -> None:
        file = tmp_path / "config.json"
        for content in (b"[" * 100_000, b" " * (17 * MIB), b'{"num_hidden_layers": ' + b"9" * 10_000 + b"}", b"\xff"):
            file.write_bytes(content)
            with pytest.raises(ModelConfigError):
                read_kv_bytes_per_token(file)


class TestTraces:
    def read(self, path: Path) -> None:
        with pytest.raises(TraceError):
            read_trace(path)

    def test_a_line_without_an_end(self, tmp_path: Path) -> None:
        """2 GiB of zeros in 2 MiB: not unpacked further than one line may be long."""
        path = tmp_path / "bomb.jsonl.gz"
        piece = gzip.compress(bytes(16 * MIB), 9)
        path.write_bytes(piece * 128)
        start = time.monotonic()
        bounded_memory(6 * bounded.MAX_TRACE_LINE_BYTES, lambda: self.read(path))
        assert time.monotonic() - start < 10

    def test_lines_without_an_end(self, tmp_path: Path) -> None:
        path = tmp_path / "bomb.jsonl.gz"
        path.write_bytes(gzip.compress((b'{"hash_ids": []}' + b" " * 65000 + b"\n") * 256, 9) * 64)
        with pytest.raises(TraceError, match="times its size"):
            read_trace(path)

    @pytest.mark.parametrize(
        "line",
        [
            b"[" * 100_000,
            b'{"hash_ids": ' + b"[" * 100_000,
            b'{"hash_ids": [' + b"9" * 10_000 + b"]}",
            b'{"hash_ids": [-1]}',
            b'{"hash_ids": [1.5]}',
            b'{"hash_ids": [1], "timestamp": 1e999}',
            b'{"hash_ids": [1], "input_length": NaN}',
            b'{"hash_ids": {"1": 1}}',
            b"\xff\xfe",
        ],
    )
    def test_lines_that_are_wrong(self, tmp_path: Path, line: bytes) -> None:
        path = tmp_path / "trace.jsonl"
        path.write_bytes(line + b"\n")
        self.read(path)


class TestWire:
    """The decoders that Python calls, on seeded bytes; the native ones have fuzzers of their own."""

    @pytest.mark.parametrize("size", [0, 1, 6, 100, 65536, 65537, 5 * MIB])
    def test_descriptors_and_views(self, size: int) -> None:
        rng = random.Random(size)
        for data in (bytes(size), b"\xff" * size, rng.randbytes(size), b"\x93" * size):
            if data:
                with pytest.raises(DescriptorError):
                    NamespaceDescriptor.decode(data)
            with pytest.raises(ValueError):  # noqa: PT011 - each fault has a text of its own
                View.decode(data)

    def test_what_a_decoder_may_allocate(self) -> None:
        claims = b"\xdd\xff\xff\xff\xff" + bytes(100)
        for data in (claims, b"\xdf\xff\xff\xff\xff" + bytes(100), b"\x85\x01\xc6\xff\xff\xff\xff"):

            def decode(data: bytes = data) -> None:
                with pytest.raises(ValueError):  # noqa: PT011
                    _native.decode_view(data)

            bounded_memory(MIB, decode)
