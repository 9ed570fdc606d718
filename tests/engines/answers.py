"""When two greedy answers to the same prompt are the same answer."""

from dataclasses import dataclass

from .http_client import Completion

GAP = 0.05
"""Log-probability. Where the best token leads by less, another order of additions may choose the other one."""


@dataclass(frozen=True)
class Comparison:
    """``compared``: positions at which another token would have been a fault. ``shift``: the most by which the
    log-probability of a candidate differs, over the positions that have the same tokens before them."""

    same: bool
    compared: int
    detail: str = ""
    shift: float = 0.0


def identical(reference: Completion, answer: Completion) -> Comparison:
    """Token by token: for runs that compute the same tokens over the same KV bytes."""
    for index, (wanted, found) in enumerate(zip(reference.token_ids, answer.token_ids, strict=False)):
        if wanted != found:
            return Comparison(False, index, f"token {index} is {found}, expected {wanted}")
    if len(reference.token_ids) != len(answer.token_ids):
        detail = f"{len(answer.token_ids)} tokens, expected {len(reference.token_ids)}"
        return Comparison(False, min(len(reference.token_ids), len(answer.token_ids)), detail)
    return Comparison(bool(reference.token_ids), len(reference.token_ids), "" if reference.token_ids else "no tokens")


def agrees_with_cold(cold: Completion, answer: Completion, gap: float = GAP) -> Comparison:
    """Against a run that computed the prompt in other portions, so with other rounding: wherever the cold run's best token
    leads by more than `gap`, up to a first difference elsewhere, after which the two continue differently."""
    if not cold.token_ids or len(cold.token_ids) != len(answer.token_ids):
        return Comparison(False, 0, f"{len(answer.token_ids)} tokens, expected {len(cold.token_ids)}")
    compared = 0
    shift = 0.0
    for index, (wanted, found) in enumerate(zip(cold.token_ids, answer.token_ids, strict=True)):
        shift = max(shift, _shift(cold, answer, index))
        clear = cold.gap(index) > gap
        if wanted != found:
            if clear:
                detail = f"token {index} is {found}, expected {wanted}, which leads by {cold.gap(index):.3f}"
                return Comparison(False, compared, detail, shift)
            break
        compared += clear
    return Comparison(True, compared, shift=shift)


def _shift(cold: Completion, answer: Completion, index: int) -> float:
    """How far apart the two runs are on the candidates that both name; infinite where they name none in common."""
    found = dict(answer.top[index])
    apart = [abs(value - found[token]) for token, value in cold.top[index] if token in found]
    return max(apart, default=float("inf"))
