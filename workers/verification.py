"""Which guesses were right: a pure function over a draft tree."""

from __future__ import annotations

from collections.abc import Sequence

from workers.drafters.base import Draft


def accepted_path(draft: Draft, picks: Sequence[int]) -> tuple[int, ...]:
    """Rows whose picks are emitted, in order, starting with row 0 (the pending token).

    `picks[r]` is the token that plain decoding emits after row r's own prefix. Starting at row 0, go to the child that
    holds the picked token, as long as there is one; the emitted tokens are `[picks[r] for r in path]`, of which the
    last is free (bonus or correction) and all others are accepted drafts. A guess is accepted iff it equals the pick;
    there is no ratio test, because guess and pick share their noise.

    Worked example: pending `a`, draft b, c, d with parents -1, 0, 0 (rows 1, 2, 3), picks a->b, b->d, c->x, d->e:
    path (0, 1, 3), emitted (b, d, e).
    """
    if not draft.tokens:  # a plain step
        return (0,)
    edges = zip(draft.parents, draft.tokens, strict=True)
    row_of = {(parent + 1, token): i + 1 for i, (parent, token) in enumerate(edges)}
    path = [0]
    while (row := row_of.get((path[-1], picks[path[-1]]))) is not None:
        path.append(row)
    return tuple(path)
