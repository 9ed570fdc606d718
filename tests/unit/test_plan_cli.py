"""`dfkv plan` as a person or a script meets it: rows, files it can read, pictures, and faults in plain words."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dfkv_core import _native
from dfkv_core.cli.app import app
from dfkv_core.cli.output import CommandError
from dfkv_core.plan import plot
from dfkv_core.plan.synthetic import write
from dfkv_core.plan.trace import TraceError, read_trace
from tests.reference import replay as slow


def plan(*arguments: str) -> str:
    """Output of `dfkv plan`; a fault is raised as the command raised it."""
    result = CliRunner().invoke(app, ["plan", *arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def plan_json(*arguments: str) -> dict[str, Any]:
    found = json.loads(plan(*arguments, "--json"))
    assert isinstance(found, dict)
    return found


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    write(path, 300, seed=1)
    return path


def test_rows_are_what_a_slow_replay_gives(trace: Path) -> None:
    blocks = [json.loads(line)["hash_ids"] for line in trace.read_text().splitlines()]
    asked, unique = sum(map(len, blocks)), len({block for request in blocks for block in request})
    found = plan_json(str(trace), "--capacity", "1%,12.5%", "--policy", "lru-ref,lru")
    assert [(row["policy"], row["capacity_pct"]) for row in found["rows"]] == [
        ("lru-ref", 1.0),
        ("lru-ref", 12.5),
        ("lru", 1.0),
        ("lru", 12.5),
        ("unbounded", 100.0),
    ]
    for row in found["rows"]:
        capacity = row["capacity_blocks"]
        if row["policy"] == "unbounded":
            hits = slow.unbounded(blocks)
        elif row["policy"] == "lru-ref":
            assert capacity == int(row["capacity_pct"] * unique / 100)
            hits = slow.lru_ref(blocks, capacity)
        else:
            hits = slow.node(blocks, capacity, slow.Lru)
        assert row["hit_ratio"] == pytest.approx(sum(hits) / asked)
    assert found["trace"]["requests"] == 300
    assert found["trace"]["unique_blocks"] == unique


def test_all_policies_and_a_gzipped_trace(trace: Path, tmp_path: Path) -> None:
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(trace.read_bytes()))
    plain = plan_json(str(trace), "--capacity", "10%", "--policy", "all")
    assert [row["policy"] for row in plain["rows"]] == _native.replay_policies()
    assert plan_json(str(packed), "--capacity", "10%", "--policy", "all")["rows"] == plain["rows"]


def test_capacities_in_bytes_and_blocks(trace: Path) -> None:
    size = ["--kv-bytes-per-token", "1024", "--block-tokens", "512"]
    found = plan_json(str(trace), "--capacity", "64MiB,100", *size)
    assert [row["capacity_blocks"] for row in found["rows"][:2]] == [128, 100]
    assert found["rows"][0]["capacity_bytes"] == 64 * 1024 * 1024


def test_tables_and_sentences_for_people(trace: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "torch_dtype": "float16"})
    )
    text = plan(
        *(str(trace), "--capacity", "5%,50%", "--prefill-tokens-per-s", "10000", "--bandwidth", "1GiB"),
        *("--model", str(tmp_path), "--nodes", "3"),
    )
    for words in ("300 requests", "adaptive-lru", "unbounded", "GPU-h a day", "3 nodes", "Worth it", "Break-even"):
        assert words in text
    assert "Traceback" not in text


def test_nodes_report(trace: Path) -> None:
    found = plan_json(str(trace), "--capacity", "50%", "--nodes", "4", "--unlimited")["cluster"]
    assert found["nodes"] == 4
    assert found["capacity_blocks"] is None
    assert 1 <= found["nodes_per_request"] <= 4
    assert found["hit_ratio_after_loss"] < found["hit_ratio_without_loss"]
    assert plan_json(str(trace), "--nodes", "1")["cluster"]["lost_hit_blocks"] == 0


@pytest.mark.parametrize("suffix", plot.SUFFIXES)
def test_plot(trace: Path, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / f"hits{suffix}"
    plan(str(trace), "--policy", "lru,belady", "--plot", str(picture))
    head = picture.read_bytes()[:300]
    assert head.startswith(b"\x89PNG") or b"<svg" in head or b"<?xml" in head


def test_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(CommandError, match=r"pip install 'dfkv\[plot\]'"):
        plan("nowhere.jsonl", "--plot", str(tmp_path / "x.png"))


def test_example_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "made-up.jsonl"
    assert plan_json(str(path), "--example", "50")["trace"]["requests"] == 50
    with pytest.raises(CommandError, match="exists"):
        plan(str(path), "--example", "50")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "mru"], "no policy 'mru'"),
        (["--capacity", "0.0001%"], "less than one block"),
        (["--capacity", "ten"], "found 'ten'"),
        (["--capacity", "nan%"], "found 'nan%'"),
        (["--capacity", "5GiB"], "without the size of one"),
        (["--bandwidth", "fast"], "--bandwidth"),
        (["--model", "/nonexistent"], "cannot read /nonexistent"),
        (["--plot", "hits.gif"], "hits.gif"),
        (["--nodes", "1000", "--capacity", "10"], "less than a block for each node"),
    ],
)
def test_faults_are_named(trace: Path, arguments: list[str], words: str) -> None:
    with pytest.raises(CommandError) as raised:
        plan(str(trace), *arguments)
    assert words in raised.value.message


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", "no request with blocks"),
        ('{"hash_ids": []}', "no request with blocks"),
        ('{"hash_ids": [1]}\n[2]', ":2: expected a JSON object, found '[2]'"),
        ('{"hash_ids": [1]}\n\nnot json', ":3: expected a JSON object"),
        ('{"blocks": [1]}', "hash_ids, found None"),
        ('{"hash_ids": [1, -2]}', "found -2"),
        ('{"hash_ids": [1, "x"]}', "found 'x'"),
        ('{"hash_ids": [1], "timestamp": "now"}', "timestamp, found 'now'"),
        ('{"hash_ids": [1], "timestamp": 1}\n{"hash_ids": [1]}', ":2: timestamp and input_length"),
        ('{"hash_ids": [1], "input_length": -1}', "input_length, found -1"),
    ],
)
def test_files_that_are_no_traces(tmp_path: Path, lines: str, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(lines)
    with pytest.raises(TraceError) as raised:
        read_trace(path)
    assert words in str(raised.value)


def test_a_damaged_archive_is_named(trace: Path, tmp_path: Path) -> None:
    packed = tmp_path / "cut.jsonl.gz"
    packed.write_bytes(gzip.compress(trace.read_bytes())[:-200])
    with pytest.raises(TraceError, match="damaged"):
        read_trace(packed)


def test_ids_without_time_or_length_are_enough(tmp_path: Path) -> None:
    path = tmp_path / "bare.jsonl"
    path.write_text('{"hash_ids": [1, 2]}\n{"hash_ids": [1, 2, 3]}\n')
    found = plan_json(str(path), "--capacity", "100%", "--kv-bytes-per-token", "10", "--prefill-tokens-per-s", "100")
    row = found["rows"][0]
    assert row["hit_ratio"] == pytest.approx(2 / 5)
    assert row["prefill_s_saved"] == pytest.approx(2 * 512 / 100)
    assert row["gpu_hours_saved_per_day"] is None


def test_reading_reports_progress(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text('{"hash_ids": [1]}\n' * 10_000)
    seen: list[tuple[int, int]] = []
    read_trace(path, lambda done, total: seen.append((done, total)))
    assert len(seen) >= 3
    assert seen[-1] == (path.stat().st_size, path.stat().st_size)
