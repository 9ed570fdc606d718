"""Whether a hit is taken: only when loading is predicted to be faster than computing."""

from __future__ import annotations

from dfkv_core.worth import WorthEstimator


def test_unknown_rates_take_the_hit() -> None:
    worth = WorthEstimator()
    assert worth.judge(100, 1 << 30).take
    worth.observe_prefill(1000, 1.0)
    assert worth.judge(100, 1 << 30).take


def test_the_faster_way_is_taken() -> None:
    worth = WorthEstimator()
    worth.observe_prefill(1000, 1.0)  # 1,000 tokens/s
    worth.observe_load(1_000_000, 1.0)  # 1 MB/s
    assert worth.judge(tokens=1000, payload_bytes=500_000).take
    refused = worth.judge(tokens=100, payload_bytes=500_000)
    assert not refused.take
    assert refused.load_s == 0.5
    assert refused.compute_s == 0.1


def test_decode_steps_say_nothing_about_prefill() -> None:
    worth = WorthEstimator()
    worth.observe_prefill(1, 0.1)
    assert worth.prefill_tokens_per_s is None


def test_a_rate_from_a_bad_moment_does_not_stick() -> None:
    worth = WorthEstimator(explore_every=4)
    worth.observe_prefill(1000, 1.0)
    worth.observe_load(1000, 1.0)
    takes = [worth.judge(100, 1_000_000).take for _ in range(8)]
    assert takes == [False, False, False, True] * 2
    for _ in range(60):
        worth.observe_load(1_000_000_000, 1.0)
    assert worth.judge(100, 1_000_000).take
