"""Windows that hold the student's own drafts, so that it learns where its drafts lead, not only where the data went.

Shape legend: B sequences, W windows, L slots, N = B * W * L.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from workers.ptp.adapter import Adapter
from workers.ptp.edges import noise_between
from workers.ptp.evaluation import draft_tokens
from workers.ptp.student import Captured, slot_logits
from workers.ptp.windows import Windows


@torch.no_grad()
def student_tokens(adapter: Adapter, windows: Windows, captured: Captured, z_BWL: Tensor) -> Tensor:
    """The student's drafts `[B, W, L]` for noise that is z in [0, 1) itself."""
    u_BWL = noise_between(torch.zeros_like(z_BWL), torch.ones_like(z_BWL), z_BWL)
    inputs_BWLE = adapter.slot_inputs(u_BWL, windows.before(captured.tokens.ids_BS))
    logits_NV = slot_logits(adapter, inputs_BWLE, windows, captured)
    return draft_tokens(logits_NV, u_BWL.flatten(), adapter.config.head, adapter.config.adapt).view(u_BWL.shape)


def ended(windows: Windows, token_BWL: Tensor, end_token_ids: Tensor) -> Windows:
    """The same windows, whose slots count up to the first end token that they hold now.

    Worked example, end token 9: tokens 4 9 5 of a window count yes, yes, no.
    """
    goes_on_BWL = torch.ones_like(windows.counts_BWL)
    goes_on_BWL[..., 1:] = ~torch.isin(token_BWL[..., :-1], end_token_ids)
    return replace(windows, counts_BWL=windows.counts_BWL & goes_on_BWL.long().cumprod(-1).bool())
