"""Inverse autoregressive training: noise in which the student itself codes the data, so that no teacher is needed.

For head "c" (arXiv 2512.21323, section 3): slot l gives P(t_l | context, u_0..u_(l-1)), and u_l is then drawn from the
interval that this very distribution gives the data's token. With all u's known, one step of cross entropy trains all
slots at once. The u's carry no gradient.

Shape legend: B sequences, W windows, L slots, N windows that count at a slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.adapter_config import AdaptConfig
from workers.ptp.adapter import Adapter
from workers.ptp.edges import noise_between, token_edges
from workers.ptp.student import Captured, slot_logits
from workers.ptp.windows import Windows


@torch.no_grad()
def own_noise(adapter: Adapter, captured: Captured, windows: Windows, token_BWL: Tensor, z_BWL: Tensor) -> Tensor:
    """u_BWL, float32, at the places z_BWL of the student's own intervals; slot after slot, so L passes.

    The student's distribution is the one that cross entropy trains: at the data's temperature, with nothing cut off.
    """
    assert adapter.config.head == "c"
    params = AdaptConfig(temperature=adapter.config.adapt.temperature).sampling()
    context_BW = windows.before(captured.tokens.ids_BS)
    u_BWL = torch.zeros(token_BWL.shape, device=token_BWL.device)
    for slot in range(windows.slots):
        counts_BW = windows.counts_BWL[..., slot]
        slot_N = counts_BW.flatten().nonzero()[:, 0] * (slot + 1) + slot
        inputs_BWlE = adapter.slot_inputs(u_BWL[..., : slot + 1], context_BW)
        logits_NV = slot_logits(adapter, inputs_BWlE, windows.first_slots(slot + 1), captured, slot_N)
        low_N, high_N = token_edges(logits_NV, token_BWL[..., slot][counts_BW], params)
        u_BWL[..., slot][counts_BW] = noise_between(low_N, high_N, z_BWL[..., slot][counts_BW])
    return u_BWL
