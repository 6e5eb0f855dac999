"""Many drafts: of M sets of noise use the one whose tokens the student can hardly miss (arXiv 2512.21323, table 7).

A u near an edge of the teacher's interval is where student and teacher part; one in the middle is safe. The place of u
in the interval of the token that it picks, z = (u - low) / (high - low), is uniform whatever the token is. So a choice
among sets by their places alone leaves the tokens' distribution as it is. It must not look at anything else: not at the
tokens, not at how many drafts were right, and it must look at a number of slots that was fixed before. When serving,
the places of slots behind a wrong draft are unknown, so only one slot is used (`workers/noise_sets.py`); an evaluation
knows them all.

The paper prints argmax of |z - 1/2| and means argmin. How places of a window are summed up is left open there; here:

    sum over l of (K - l) (z_l - 1/2)^2         K places, slot l = 0 .. K-1

squares because harm rises towards the edges, falling weights because a miss at slot l loses all slots behind it. In a
simulation (8 slots; edges of the student off by a normal number of sigma interval widths) this led to as many correct
tokens as any other or more, M = 16: sigma .15: 6.81, against 6.38 (sum of |z - 1/2|), 6.52 (their maximum), 6.56
(squares without weights); sigma .4: 2.80 against 2.64, 2.57, 2.68. (At sigma .05 the maximum is best: 7.96 to 7.81.)

Shape legend: N windows, M sets, K places of a set, L slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from workers.ptp.edges import noise_between
from workers.ptp.evaluation import DraftScores, score


def choose(place_NMK: Tensor) -> Tensor:
    """The best set of each window, `[N]`. Places are in [0, 1]."""
    K = place_NMK.shape[-1]
    weight_K = torch.arange(K, 0, -1, dtype=place_NMK.dtype, device=place_NMK.device)
    return ((place_NMK - 0.5).square() @ weight_K).argmin(-1)


def scores_over_sets(
    draft: Callable[[Tensor], Tensor],
    low_NL: Tensor,
    high_NL: Tensor,
    token_NL: Tensor,
    counts_NL: Tensor,
    sets: Sequence[int],
    generator: torch.Generator,
) -> dict[int, DraftScores]:
    """How good drafts are for each number of sets M, on given tokens.

    `draft` gives the student's drafts `[N, L]` for noise `[N, L]`. The teacher's tokens stay the same for every M: as
    place and token are independent, drawing M places for a token is drawing M sets that happen to pick it. All M use
    the first of the same places, so they differ by choice and not by luck.
    """
    place_NML = torch.rand(len(low_NL), max(sets), low_NL.shape[1], generator=generator, dtype=torch.float64)
    place_NML = place_NML.to(low_NL.device)
    result = {}
    for count in sets:
        index_N = choose(place_NML[:, :count])
        place_NL = place_NML[torch.arange(len(index_N), device=index_N.device), index_N]
        result[count] = score(draft(noise_between(low_NL, high_NL, place_NL)), token_NL, counts_NL)
    return result
