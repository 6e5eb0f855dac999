"""Many drafts: of M sets of noise, each stretch of tokens takes the one that drafts can hardly miss (arXiv 2512.21323).

A u near an edge of the teacher's interval is where a student, whose edges lie a little elsewhere, guesses wrong; one in
the middle is safe. Where a stretch of `noise_stretch` tokens begins, each of `noise_sets` sets has a u for its
first token, and the set is taken whose u lies nearest the middle of the interval of the token that it picks. All tokens
of the stretch are picked by that set. An adapter drafts a chain for each set (`drafters/ptp_windows.py`).

Samples are still drawn from the model's own distribution. Let t be the token that a uniform u picks and z its place
within t's interval: z is uniform whatever t is. So a choice by the places of the sets, and by nothing else, leaves the
first token's distribution as it is; and the u's of the later tokens, which nobody looked at, stay uniform.

Stretches begin at fixed indices, 0, B, 2B .., not where a step of the engine happens to begin, though each step could
choose anew. So the set, and with it the output, is a function of model, prompt, sampling (with M and B), uid and sample
index as ever: batch, strategy, adapter and restarts decide nothing, and plain decoding gives the same tokens.

Shape legend: S sampled rows of a step, N rows where a stretch begins, M sets, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from workers.planned_block import PlannedBlock
from workers.randomness import key_of_set, uniforms
from workers.sampling import Picks, noise_of, pick


def sets_of_rows(sampled: Seq[PlannedBlock], logits_SV: Tensor, *, compiled: bool) -> list[int]:
    """Which set picks the token after each row, of blocks that are all sampled alike.

    Rows where a stretch begins choose; the others follow the row before them, or the committed tokens.
    """
    kind = sampled[0].sequence.context.sampling
    rows = [(item, index) for item in sampled for index in item.token_indices]
    beginning = [row for row, (_, index) in enumerate(rows) if index % kind.noise_stretch == 0]
    chosen = iter(_choices([rows[row] for row in beginning], logits_SV[beginning], compiled=compiled))
    sets: list[int] = []
    for item in sampled:
        assert item.proposal is not None
        first, parents = len(sets), (-1, *item.proposal.draft.parents)
        for row, index in enumerate(item.token_indices):
            if index % kind.noise_stretch == 0:
                sets.append(next(chosen))
            elif 0 < row < item.tree_rows:
                sets.append(sets[first + 1 + parents[row]])
            else:  # the pending token, or a row beyond the tree, which only guesses
                sets.append(item.sequence.context.noise_sets[-1])
    return sets


def _choices(rows: Seq[tuple[PlannedBlock, int]], logits_NV: Tensor, *, compiled: bool) -> list[int]:
    """The best set of each row, by places alone."""
    if not rows:
        return []
    kind = rows[0][0].sequence.context.sampling
    sets = range(kind.noise_sets)
    keys = [key_of_set(item.sequence.noise, index) for item, _ in rows for index in sets]
    indices = [index for _, index in rows for _ in sets]
    stream_NM = noise_of(keys, indices, logits_NV, compiled=compiled)
    picks = pick(logits_NV.repeat_interleave(len(sets), 0), kind, stream_NM, compiled=compiled)
    distance_NM, _ = distances_from_middle(picks, stream_NM)
    return [int(best) for best in distance_NM.view(-1, len(sets)).argmin(-1).tolist()]


def distances_from_middle(picks: Picks, stream_R: Tensor) -> tuple[Tensor, Tensor]:
    """How far each u lies from the middle of the interval that it picked, in widths of the interval; and the widths."""
    assert picks.low_R is not None
    assert picks.high_R is not None
    width_R = picks.high_R - picks.low_R
    return ((uniforms(stream_R) - picks.low_R) / width_R - 0.5).abs(), width_R
