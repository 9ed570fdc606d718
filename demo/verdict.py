"""What the samples show: one row a run, the proof that the answers are right, and the bars for the speed."""

import statistics
from dataclasses import dataclass, field
from typing import Any

from tests.engines.answers import Comparison, agrees_with_cold, identical

from .measure import COLD, LOCAL, RESTARTED, RESTORED, RUNS, SAVING, Results, Sample

MAX_OVERHEAD_S = 0.15  # beyond a local hit, plus the payload at MIN_BYTES_PER_S
MIN_BYTES_PER_S = 1e9
MAX_SHARE_OF_COLD = 0.08


@dataclass(frozen=True)
class Row:
    """Medians of one run. ``restored_tokens``: what dfkv put back, at least, in any repetition."""

    run: str
    ttft_s: float
    ttft_min_s: float
    ttft_max_s: float
    repeats: int
    prompt_tokens: int
    restored_tokens: int
    bytes: int
    gb_per_s: float | None

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "ttft_s": round(self.ttft_s, 4),
            "prompt_tokens": self.prompt_tokens,
            "restored_tokens": self.restored_tokens,
            "bytes": self.bytes,
            "gb_per_s": None if self.gb_per_s is None else round(self.gb_per_s, 3),
            "ttft_min_s": round(self.ttft_min_s, 4),
            "ttft_max_s": round(self.ttft_max_s, 4),
            "repeats": self.repeats,
        }


@dataclass(frozen=True)
class Bar:
    """A limit and what was measured against it."""

    what: str
    measured: float
    limit: float
    unit: str

    @property
    def met(self) -> bool:
        return self.measured <= self.limit


@dataclass
class Verdict:
    """``faults``: answers that differ, restores that did not happen; empty when all is right."""

    rows: list[Row]
    bars: list[Bar]
    faults: list[str] = field(default_factory=list)
    identical_positions: int = 0
    clear_positions: int = 0
    outputs_identical: bool = True


def judge(results: Results, repeats: int) -> Verdict:
    rows = [_row(run, results.of(run)) for run in RUNS if results.of(run)]
    verdict = Verdict(rows, _bars(results))
    for repeat in range(repeats):
        _judge_repetition(verdict, results, repeat)
    if not verdict.identical_positions:
        verdict.outputs_identical = False
    return verdict


def _row(run: str, samples: list[Sample]) -> Row:
    times = [sample.answer.ttft_s for sample in samples]
    rates = [sample.gb_per_s for sample in samples if sample.gb_per_s is not None]
    return Row(
        run,
        statistics.median(times),
        min(times),
        max(times),
        len(samples),
        samples[0].answer.prompt_tokens,
        min(sample.traffic.restored_tokens for sample in samples),
        int(statistics.median(sample.moved_bytes for sample in samples)),
        statistics.median(rates) if rates else None,
    )


def _judge_repetition(verdict: Verdict, results: Results, repeat: int) -> None:
    local = results.at(LOCAL, repeat)
    if local is None:
        verdict.faults.append(f"repetition {repeat + 1} has no local prefix hit to compare with")
        return
    if local.answer.cached_tokens == 0 or local.traffic.restored_tokens:
        verdict.faults.append(
            f"repetition {repeat + 1}: the engine's own prefix cache did not answer the repeated prompt"
        )
    cold = results.cold(local.document)
    for run in (RESTORED, RESTARTED):
        sample = results.at(run, repeat)
        if sample is None:
            verdict.faults.append(f"repetition {repeat + 1} was not {run}")
            continue
        if sample.traffic.restored_tokens == 0:
            verdict.faults.append(f"repetition {repeat + 1}, {run}: nothing was restored")
        same = identical(local.answer, sample.answer)
        verdict.identical_positions += same.compared
        _note(verdict, same, f"repetition {repeat + 1}, {run} against a local hit")
        if cold is not None:
            agrees = agrees_with_cold(cold.answer, sample.answer)
            verdict.clear_positions += agrees.compared
            _note(verdict, agrees, f"repetition {repeat + 1}, {run} against a cold run")


def _note(verdict: Verdict, comparison: Comparison, what: str) -> None:
    if not comparison.same:
        verdict.outputs_identical = False
        verdict.faults.append(f"{what}: {comparison.detail}")


def _bars(results: Results) -> list[Bar]:
    medians = {
        run: statistics.median(sample.answer.ttft_s for sample in results.of(run)) for run in RUNS if results.of(run)
    }
    bars = []
    for run in (RESTORED, RESTARTED):
        if run not in medians:
            continue
        if LOCAL in medians:
            moved = statistics.median(sample.moved_bytes for sample in results.of(run))
            limit = MAX_OVERHEAD_S + moved / MIN_BYTES_PER_S
            bars.append(Bar(f"{run}: beyond a local hit", medians[run] - medians[LOCAL], limit, "s"))
        for cold in (COLD, SAVING):
            if cold in medians:
                share = 100 * medians[run] / medians[cold]
                bars.append(Bar(f"{run}: share of {cold!r}", share, 100 * MAX_SHARE_OF_COLD, "%"))
    return bars
