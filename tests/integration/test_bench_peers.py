"""dfkv beside other stores: each that is installed here gives back what it was given, and the page is written from it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bench_peers import measure as measuring
from bench_peers.dfkv_store import DfkvStore
from bench_peers.measure import measure
from bench_peers.objects import Objects
from bench_peers.pipelined import MemcachedStore, RedisStore
from bench_peers.report import bars, write_json, write_page
from bench_peers.store import StoreFailedError

pytestmark = pytest.mark.slow


class AbsentStore(RedisStore):
    name = "absent"
    program = "no-such-server"


def test_what_is_installed_is_measured_and_what_is_not_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "KINDS", (DfkvStore, MemcachedStore, RedisStore, AbsentStore))
    monkeypatch.setattr(measuring, "RUN_S", 0.01)
    monkeypatch.setattr(measuring, "LEAST_CAPACITY_BYTES", 64 << 20)
    report = measure([64 << 10, 1 << 20], 8, 2, lambda line: None)
    there = {"dfkv"} | {cls.name for cls in (MemcachedStore, RedisStore) if shutil.which(cls.program)}
    assert set(report.versions) == there
    assert "no-such-server is not installed" in report.missing
    assert {(row.store, row.op, row.size_bytes) for row in report.rows} == {
        (store, op, size) for store in there for op in ("put", "get") for size in (64 << 10, 1 << 20)
    }
    assert all(row.low_gb_per_s <= row.gb_per_s <= row.high_gb_per_s for row in report.rows)
    assert all(row.ratio == 1 for row in report.rows if row.store == "dfkv")
    assert {bar.what for bar in bars(report)} == (
        {f"{op} of 1 MiB, dfkv over memcached" for op in ("put", "get")} if "memcached" in there else set()
    )
    write_json(tmp_path / "result.json", report)
    assert len(json.loads((tmp_path / "result.json").read_text())["rows"]) == len(report.rows)
    write_page(tmp_path, report)
    page = (tmp_path / "benchmarks.md").read_text()
    assert all(f"| {name} | {version} |" in page for name, version in report.versions.items())
    assert (tmp_path / "img" / "peers.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", [MemcachedStore, RedisStore])
def test_an_object_that_is_not_there_is_noticed(
    kind: type[MemcachedStore | RedisStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that answers less than was asked for would look fast."""
    if shutil.which(kind.program) is None:
        pytest.skip(f"{kind.program} is not installed")
    monkeypatch.setattr("bench_peers.pipelined.DEADLINE_S", 1.0)
    objects = Objects(4, 100)
    store = kind(64 << 20)
    try:
        store.put(objects)
        objects.ids[3] = bytes(16)
        with pytest.raises((StoreFailedError, BlockingIOError)):
            store.get(objects)
    finally:
        store.close()
        objects.close()
