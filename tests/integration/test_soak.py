"""Half a minute of everything at once: nodes killed, stopped and spoiled, operations of every kind, every byte known."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.soak.soak import Soak

pytestmark = pytest.mark.slow

SECONDS = 30.0


def test_a_soak_of_half_a_minute(tmp_path: Path) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    outcome = Soak(seed, SECONDS, tmp_path).run()
    print(outcome.summary())
    assert outcome.faults_made["killed"] > 0
    assert outcome.faults_made["stopped"] > 0
    assert outcome.checksum_failures > 0
    assert all(outcome.statuses[name] > 0 for name in ("ok", "evicted", "cancelled", "deadline", "node_down"))
