"""The arithmetic behind `dfkv plan`, with answers worked out by hand, and what is said about them."""

from __future__ import annotations

import pytest

from dfkv_core.plan import economics
from dfkv_core.plan.economics import Costs, Worth, worth
from dfkv_core.plan.model import ModelConfigError, kv_bytes_per_token
from dfkv_core.plan.study import ClusterReport, Row
from dfkv_core.plan.verdict import verdict

LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


def test_worth_of_a_small_trace() -> None:
    # Two requests, half an hour apart: 10 and 6 blocks of 100 tokens are hits, of 1 MB each.
    costs = Costs(100, 10_000, 2000.0, gpus_per_engine=4, bandwidth_bytes_per_s=8_000_000)
    found = worth([10, 6], 30, 20, costs, timestamps_ms=[0, 1_800_000], input_tokens=[5000, 550])
    assert found.saved_tokens == 1000 + 550  # the last block of the second is not full
    assert found.capacity_bytes == 20_000_000
    assert found.prefill_s_saved == pytest.approx(0.775)
    assert found.load_s == pytest.approx(2.0)
    assert found.gpu_hours_saved_per_day == pytest.approx((0.775 - 2.0) * 4 / 3600 * 48)
    assert found.read_bytes_per_s == pytest.approx(16_000_000 / 1800)
    assert found.peak_read_bytes_per_s == pytest.approx(1_000_000)  # 10 blocks in 10 s
    assert found.written_bytes_per_day == pytest.approx(30_000_000 * 48)
    assert found.drive_writes_per_day == pytest.approx(72)


def test_what_was_not_given_is_not_said() -> None:
    found = worth([1], 1, 1, Costs(512))
    assert found == Worth(512, None, None, None, None, None, None, None, None)


def test_break_even_is_prefill_speed_in_bytes() -> None:
    assert economics.break_even_bytes_per_s(8000, 131072) == 8000 * 131072


def test_requests_until_whole() -> None:
    asked = [10] * 1000
    without = [5] * 1000
    lossy = [5] * 800 + [2] * 55 + [5] * 145
    assert economics.requests_until_whole(lossy, without, asked, 800) == 60  # in steps of 10
    assert economics.requests_until_whole(without, without, asked, 800) == 0
    assert economics.requests_until_whole([5] * 800 + [2] * 200, without, asked, 800) is None


def test_ratio_of_nothing_is_nothing() -> None:
    assert economics.ratio([], []) == 0
    assert economics.ratio([1, 2, 3], [4, 4, 4], 1, 3) == pytest.approx(5 / 8)


def test_kv_size_from_model_configs() -> None:
    assert kv_bytes_per_token(LLAMA_8B) == 2 * 32 * 8 * 128 * 2
    assert kv_bytes_per_token(LLAMA_8B, "fp8") == 2 * 32 * 8 * 128
    assert kv_bytes_per_token({"text_config": LLAMA_8B}) == 131072
    latent = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"}
    assert kv_bytes_per_token(latent) == 61 * 576 * 2
    with pytest.raises(ModelConfigError, match="num_hidden_layers"):
        kv_bytes_per_token({})
    with pytest.raises(ModelConfigError, match="int3"):
        kv_bytes_per_token(LLAMA_8B, "int3")


def rows(*ratios: float, unbounded: float, costs: Costs, wear: float | None = None) -> list[Row]:
    """One row for each ratio, at 10 %, 20 % and so on."""

    def made(policy: str, blocks: int, pct: float, ratio: float) -> Row:
        size = None if costs.block_bytes is None else blocks * costs.block_bytes
        found = Worth(0, size, None, None, None, None, None, None if wear is None else 1e12, wear)
        return Row(policy, blocks, pct, ratio, found)

    bounded = [made("lru", 10 * i, 10.0 * i, ratio) for i, ratio in enumerate(ratios, 1)]
    return [*bounded, made("unbounded", 100, 100, unbounded)]


@pytest.mark.parametrize(
    ("ratios", "unbounded", "costs", "words"),
    [
        ([0.02, 0.03], 0.04, Costs(512), "Not worth it: 4.0 %"),
        ([0.01, 0.02], 0.50, Costs(512), "Not worth it at these capacities"),
        ([0.10, 0.12], 0.15, Costs(512), "Worth a try"),
        ([0.30, 0.40], 0.42, Costs(512), "Worth it: up to 40.0 %"),
        ([0.30, 0.40], 0.42, Costs(512, 100_000, 10_000.0, bandwidth_bytes_per_s=0.9e9), "Not worth it over this link"),
        ([0.30, 0.40], 0.42, Costs(512, 100_000, 10_000.0, bandwidth_bytes_per_s=1.1e9), "Worth it"),
    ],
)
def test_the_decision_comes_first(ratios: list[float], unbounded: float, costs: Costs, words: str) -> None:
    assert verdict(rows(*ratios, unbounded=unbounded, costs=costs), costs)[0].startswith(words)


def test_the_smallest_capacity_that_is_enough_is_named() -> None:
    costs = Costs(512)
    said = verdict(rows(0.2, 0.39, 0.4, unbounded=0.41, costs=costs), costs)
    assert any("20 blocks (20 %) bring 39.0 %" in line for line in said)
    said = verdict(rows(0.1, 0.15, unbounded=0.41, costs=costs), costs)
    assert any("far too small" in line for line in said)


def test_wear_and_loss_are_said() -> None:
    costs = Costs(512, 1000, 1000.0)
    cluster = ClusterReport(8, "lru", None, 0.4, 1.0, 1.1, 5.0, 0, 800, 0.2, 0.4, 1000.0, 120)
    said = " ".join(verdict(rows(0.4, unbounded=0.4, costs=costs, wear=3.0), costs, cluster))
    assert "wear out early" in said
    assert "one of 8 nodes: hits fall from 40.0 % to 20.0 %" in said
    assert "back after 120 requests" in said
    assert "512 s of prefill" in said
    calm = " ".join(verdict(rows(0.4, unbounded=0.4, costs=costs, wear=0.5), costs))
    assert "wear out" not in calm
