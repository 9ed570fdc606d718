"""The arithmetic of the benchmark beside LMCache's adapters."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from demo.bench_lmcache import Measured, earlier, medians, page


def runs(dfkv: float, resp: float, sizes_kib: tuple[int, ...] = (1024, 4096)) -> list[Measured]:
    speeds = {"dfkv": dfkv, "resp": resp, "fs_native": 1.0}
    return [Measured(name, size, speed, 2 * speed) for size in sizes_kib for name, speed in speeds.items()]


def test_a_measurement_in_parts_is_the_measurement_of_all_of_them(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    assert earlier(file) == []
    parts = runs(100, 50) + runs(300, 60) + runs(200, 70)
    file.write_text(json.dumps({"runs": [asdict(each) for each in parts]}))
    rows = medians(earlier(file))
    assert [(row["object_kib"], row["operation"]) for row in rows] == [
        (1024, "store"),
        (1024, "load"),
        (4096, "store"),
        (4096, "load"),
    ]
    assert (rows[0]["dfkv"], rows[0]["resp"], rows[1]["dfkv"]) == (200, 60, 400)
    assert rows[0]["ratio"] == 200 / 60


def test_one_size_alone_has_its_rows_alone() -> None:
    rows = medians(runs(120, 100, (4096,)))
    assert [row["object_kib"] for row in rows] == [4096, 4096]
    assert "| 4 MiB | store | 120 | 100 | 1 | 1.20 |" in page(rows, 1)
    assert "| 1 MiB" not in page(rows, 1)
