"""The fuzzers of frames, meta and views, for a minute in all; `make torture` gives each of them longer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import fuzz

# Side by side: together they are a minute of two processors.
SECONDS = 30

pytestmark = [pytest.mark.native, pytest.mark.timeout(fuzz.BUILD_DEADLINE_S + SECONDS + 2 * fuzz.RUN_SLACK_S)]


def test_decoders_stand_up_to_a_minute_of_fuzzing(tmp_path: Path) -> None:
    assert fuzz.build() == ""
    assert {"frame_fuzz", "meta_fuzz", "view_fuzz"} <= set(fuzz.names())
    seeds = {name: len(list((fuzz.SOURCES / "corpus" / name).iterdir())) for name in fuzz.names()}
    assert all(count >= 5 for count in seeds.values()), f"a corpus is missing: {seeds}"
    running = {name: fuzz.start(name, SECONDS, tmp_path / name) for name in fuzz.names()}
    outcomes = {name: fuzz.finish(process, SECONDS) for name, process in running.items()}
    for name, (code, output) in outcomes.items():
        assert code == 0, f"{name} ended with {code}:\n{output[-8000:]}"
        tried = re.search(r"stat::number_of_executed_units: (\d+)", output)
        assert tried is not None, output[-2000:]
        print(f"{name}: {int(tried.group(1)):,} inputs from {seeds[name]} seeds")
        assert int(tried.group(1)) > 1000
