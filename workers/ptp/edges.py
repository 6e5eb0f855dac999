"""The interval of the noise that picks a given token, and noise drawn from it (algorithms.md section 8, training u).

Under inverse-CDF coupling token j is picked by u in [low_j, high_j). Turned round, a token of the data and the
teacher's distribution give the u that would have picked it: u = low + z (high - low). Edges come from the very `adapt`
and sums that pick tokens (workers/sampling.py); a second copy would differ in the last bits, where picks are decided.

Worked example: probabilities (.2, .5, .3), token 1, z = .5: edges [.2, .7), u = .45.

Shape legend: R rows, V vocabulary, K candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.config import SamplingConfig
from workers.sampling import Adapted, adapt, cumulative, widened

GRID = 2.0**24
"""The engine's noise is a multiple of 1 / GRID (workers/randomness.py)."""


def token_edges(logits_RV: Tensor, token_R: Tensor, params: SamplingConfig) -> tuple[Tensor, Tensor]:
    """float64 `low_R`, `high_R` of the noise that picks each token.

    A token that `params` cuts from the distribution has no such noise: its edges are equal (`low = high`), and a row
    with equal edges teaches nothing and must be left out of the loss.
    """
    low_R = torch.zeros(len(token_R), dtype=torch.float64, device=token_R.device)
    high_R = torch.zeros_like(low_R)
    for rows, adapted in adapt(widened(logits_RV), params):
        low_R[rows], high_R[rows] = _group_edges(adapted, token_R[rows])
    return low_R, high_R


def _group_edges(adapted: Adapted, token_R: Tensor) -> tuple[Tensor, Tensor]:
    cdf_RK = cumulative(adapted)
    if adapted.ids_RK is None:
        column_R1 = token_R[:, None]
        is_kept_R = torch.ones_like(token_R, dtype=torch.bool)
    else:
        column_R1 = torch.searchsorted(adapted.ids_RK, token_R[:, None]).clamp(max=cdf_RK.shape[1] - 1)
        is_kept_R = adapted.ids_RK.gather(1, column_R1)[:, 0] == token_R
    high_R = cdf_RK.gather(1, column_R1)[:, 0]
    low_R = torch.where(column_R1 > 0, cdf_RK.gather(1, (column_R1 - 1).clamp(min=0)), 0.0)[:, 0]
    is_kept_R &= adapted.logp_RK.gather(1, column_R1)[:, 0] > -torch.inf
    return low_R.where(is_kept_R, 0.0), high_R.where(is_kept_R, 0.0)


def noise_between(low: Tensor, high: Tensor, z: Tensor) -> Tensor:
    """float32 u = low + z (high - low), any shape, rounded to the 24 bits of the engine's noise.

    The multiple of 2^-24 is kept within [low, high), so the u picks the token, and float32 holds it exactly. An
    interval without such a multiple (the engine can pick its token never) gives the one below its upper edge.
    """
    first = (low * GRID).ceil()
    last = (high * GRID).ceil() - 1.0
    step = ((low + z.double() * (high - low)) * GRID).floor().maximum(first).minimum(last)
    return (step.clamp(min=0.0) / GRID).float()


def places(shape: tuple[int, ...], b: float, generator: torch.Generator) -> Tensor:
    """float64 z ~ Beta(b, b) in (0, 1): where in its interval a training u lies; b = 1 is uniform.

    Beta(b, b) is X / (X + Y) of two Gamma(b) numbers; torch's own Beta takes no generator.
    """
    if b == 1.0:
        return torch.rand(shape, dtype=torch.float64, generator=generator)
    shape_parameter = torch.full((2, *shape), b, dtype=torch.float64)
    gammas: Tensor = torch._standard_gamma(shape_parameter, generator=generator).clamp(min=1e-300)
    return gammas[0] / gammas.sum(0)
