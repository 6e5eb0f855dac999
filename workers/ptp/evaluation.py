"""How good drafts are: pure functions of slot logits, the teacher's tokens and the noise that picked them.

Slots are padded to windows of L, with `counts_NL` (a prefix of each window) saying which exist.

Shape legend: N windows, L slots, R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.adapter_config import AdaptConfig, Head
from workers.sampling import adapt, cumulative, widened


def draft_tokens(logits_RV: Tensor, u_R: Tensor, head: Head, parameters: AdaptConfig) -> Tensor:
    """Drafts `[R]`: the argmax for head "o"; for head "c" what u picks from the adapted distribution."""
    if head == "o" or parameters.temperature == 0.0:
        return logits_RV.max(-1).indices  # argmax takes five times as long on a CPU in bfloat16
    token_R = torch.empty(len(logits_RV), dtype=torch.int64, device=logits_RV.device)
    for rows_R, adapted in adapt(widened(logits_RV), parameters.sampling()):
        u_R1 = u_R[rows_R, None].double()
        column_R = torch.searchsorted(cumulative(adapted), u_R1, right=True)[:, 0]
        token_R[rows_R] = adapted.token_ids(column_R)
    return token_R


def leading_correct(draft_NL: Tensor, token_NL: Tensor, counts_NL: Tensor) -> Tensor:
    """How many leading slots of each window draft the teacher's token, `[N]`."""
    return ((draft_NL == token_NL) & counts_NL).long().cumprod(-1).sum(-1)


@dataclass(frozen=True, slots=True)
class DraftScores:
    """`correct`: mean leading correct slots; `accepted`: mean of min(correct + 1, slots that count): the token after
    the drafts is free; `slot`: P(slot l correct | slots before it correct), NaN where no window came that far."""

    correct: float
    accepted: float
    slot: tuple[float, ...]


def score(draft_NL: Tensor, token_NL: Tensor, counts_NL: Tensor) -> DraftScores:
    """Scores of drafts over all windows of which at least slot 0 counts.

    Worked example, L = 3, all count: correct 0, 3, 1 of three windows is correct 4/3, accepted (1 + 3 + 2) / 3, and
    slots 2/3, 1/2, 1/1.
    """
    exists_N = counts_NL[:, 0]
    draft_NL, token_NL, counts_NL = draft_NL[exists_N], token_NL[exists_N], counts_NL[exists_N]
    correct_N = leading_correct(draft_NL, token_NL, counts_NL)
    index_L = torch.arange(draft_NL.shape[1], device=draft_NL.device)
    reached_L = ((correct_N[:, None] >= index_L) & counts_NL).sum(0)
    passed_L = (correct_N[:, None] > index_L).sum(0)
    accepted_N = torch.minimum(correct_N + 1, counts_NL.sum(-1))
    slot = (passed_L / reached_L).tolist()
    return DraftScores(correct_N.double().mean().item(), accepted_N.double().mean().item(), tuple(slot))


def shuffled(u_NL: Tensor, generator: torch.Generator) -> Tensor:
    """Each window gets the noise of another one (N >= 2): the arm that shows whether noise is used at all."""
    order_N = torch.randperm(len(u_NL), generator=generator).to(u_NL.device)
    result_NL = torch.empty_like(u_NL)
    result_NL[order_N] = u_NL[order_N.roll(1)]
    return result_NL
