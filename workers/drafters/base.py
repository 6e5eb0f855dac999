"""What a drafter is: guesses in, outcomes back.

A drafter never sees logits before they are verified and never decides what is emitted, so it cannot change the output.
It sees the committed tokens of a sequence (`DraftContext`), proposes a tree of continuations of the *pending* token
(the last committed one), and is told afterwards what every sampled row of the step predicted (`StepOutcome`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import lt
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pipeline.config import SamplingConfig
from workers.kv_cache import Slot
from workers.randomness import NoiseKey, key_of_set

GREEDY = SamplingConfig(temperature=0.0)


@dataclass(slots=True)
class DraftContext:
    """The drafter's view of one running sample. Read only for drafters.

    `key` is unique among all samples that an engine ever runs; `group` is shared by the samples of one prompt. `tokens`
    is prompt + output, so `tokens[-1]` is the pending token. `sampling` and `noise` say how its tokens are picked;
    `noise_sets` names the set of noise of each output token, where there are several (see `workers/noise_sets.py`).
    `slot` is where the target keeps keys and values of all tokens but the pending one (None while the sample waits).
    """

    key: int
    group: str
    tokens: list[int]
    prompt_length: int
    sampling: SamplingConfig = GREEDY
    noise: NoiseKey = (0, 0)
    slot: Slot | None = None
    noise_sets: list[int] = field(default_factory=list)

    def noise_at(self, index: int, guess: int = 0) -> NoiseKey:
        """Key of the noise that picks output token `index`. Which set a stretch takes is open until its first token:
        then it is `guess`.
        """
        if not self.sampling.chooses_noise:
            return self.noise
        began = index - index % self.sampling.noise_stretch
        return key_of_set(self.noise, self.noise_sets[began] if began < len(self.noise_sets) else guess)

    @property
    def until_choice(self) -> int:
        """How many of the next tokens still come before the next stretch, where there are several sets of noise."""
        return (self.prompt_length - len(self.tokens)) % self.sampling.noise_stretch


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree of guessed tokens below the pending token, parents before children.

    `parents[i]` is the index of node i's parent in this draft, -1 for the pending token. `scores[i]` estimates the
    probability that node i is accepted; it never exceeds its parent's. `drafters[i]` names who guessed it. Two nodes
    with the same parent have different tokens.

    Worked example, continuations `b c` (likely) and `b d` (less so) of the pending token:
    tokens = (b, c, d), parents = (-1, 0, 0), scores = (.8, .5, .2), depths = (1, 2, 2).
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    drafters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        size = len(self.tokens)
        assert len(self.parents) == len(self.scores) == len(self.drafters) == size, self
        assert all(map(lt, self.parents, range(size))), self
        assert not size or min(self.parents) == -1, self

    @classmethod
    def chain(cls, tokens: tuple[int, ...], drafter: str, scores: tuple[float, ...] | None = None) -> Draft:
        """A draft without branches; scores are 0 unless given."""
        size = len(tokens)
        return cls(tokens, tuple(range(-1, size - 1)), scores or (0.0,) * size, (drafter,) * size)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the pending token (1 for its children)."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    def keep(self, nodes: Iterable[int]) -> Draft:
        """The tree of these nodes alone, in their order here; with a node its ancestors must be kept."""
        kept = sorted(nodes)
        size = len(kept)
        if size == len(self.tokens):
            return self
        if not size or kept[-1] == size - 1:  # the first ones, as what is bought of a draft that was grown best-first
            return Draft(self.tokens[:size], self.parents[:size], self.scores[:size], self.drafters[:size])
        new_index = {-1: -1} | {old: new for new, old in enumerate(kept)}
        return Draft(
            tuple(self.tokens[i] for i in kept),
            tuple(new_index[self.parents[i]] for i in kept),
            tuple(self.scores[i] for i in kept),
            tuple(self.drafters[i] for i in kept),
        )

    def up_to_depth(self, depth: int) -> Draft:
        """The nodes at most so deep."""
        if depth >= len(self):
            return self
        return self.keep(i for i, d in enumerate(self.depths) if d <= depth)


EMPTY_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class ExtraRows:
    """Rows of a step that are not candidates: the two-dimensional window of lookahead decoding.

    Row i holds `tokens[i]` at position (position of the pending token) + `offsets[i]`, sees all committed tokens, the
    pending token, and the extra rows that `mask_EE[i]` names (itself included), but no draft row. `sampled` lists the
    extra rows whose predicted token the drafter wants back. Extra rows never enter the KV cache.
    """

    tokens: tuple[int, ...]
    offsets: tuple[int, ...]
    mask_EE: npt.NDArray[np.bool_]
    sampled: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(slots=True)
class StepOutcome:
    """What one step showed about one sequence. Read only (a frozen one takes three times as long to make).

    Row 0 is the pending token (as it was before the step), rows 1.. are the nodes of `draft` in order. `picks[r]` is
    the token that plain decoding would emit after row r's own prefix; `emitted` is what was emitted (accepted drafts
    and the final token, cut where the sample ended); `path` lists the rows that emitted them: path[0] = 0, path[i] =
    the row of `emitted[i-1]`, so `emitted[i] = picks[path[i]]`.

    `topk_tokens_RK` / `topk_probs_RK` are the model's best candidates after each row at temperature 1, best first
    (None unless a drafter asks by `top_k` > 0). `extra_picks` are the tokens of `ExtraRows.sampled`.

    Worked example: pending `a`, draft (b, c, d) as in `Draft`; the model continues a -> b, b -> d, d -> e. Then
    picks[0] = b, picks[1] = d, picks[3] = e, path = (0, 1, 3), emitted = (b, d, e).
    """

    draft: Draft
    picks: tuple[int, ...]
    path: tuple[int, ...]
    emitted: tuple[int, ...]
    topk_tokens_RK: npt.NDArray[np.int64] | None = None
    topk_probs_RK: npt.NDArray[np.float32] | None = None
    extra_picks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Branch:
    """Auxiliary rows that draft for the next step while this step's draft is verified (parallel token prediction).

    They are laid out as if exactly the first `depth` nodes of the draft, a chain, will be accepted. Row i has the input
    `inputs_RE[i]` and position (position of the pending token) + depth + i; it sees the committed tokens, the pending
    token and the chain up to its last `hidden` tokens, and the rows before it. Logits of rows 1.. are wanted back: what
    row 0 predicts is emitted by this very step. `gain` is how many further accepted tokens the rows are expected to
    bring; by it they are bought or not.
    """

    depth: int
    inputs_RE: Tensor
    hidden: int
    gain: float = 0.0

    def __len__(self) -> int:
        return len(self.inputs_RE)


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a drafter wants in the next step of one sequence.

    `extra_yield` is the measured number of further accepted tokens per step that running the `extra` rows brings; by it
    they are bought or not.
    """

    draft: Draft = EMPTY_DRAFT
    extra: ExtraRows | None = None
    extra_yield: float = 0.0
    branches: tuple[Branch, ...] = ()

    @property
    def extra_rows(self) -> int:
        """Rows beside the draft."""
        if self.extra is None and not self.branches:
            return 0
        return (0 if self.extra is None else len(self.extra)) + sum(map(len, self.branches))

    def bought(self, draft: Draft) -> Proposal:
        """The same with that part of the draft. A branch needs its chain."""
        chain = _common_chain(self.draft, draft) if self.branches else 0
        branches = tuple([branch for branch in self.branches if branch.depth <= chain])
        return Proposal(draft, self.extra, self.extra_yield, branches)


def _common_chain(one: Draft, other: Draft) -> int:
    """How many of the first nodes of both drafts are the same chain."""
    pairs = zip(one.tokens, one.parents, other.tokens, other.parents, strict=False)
    same = (a == b and pa == pb == i - 1 for i, (a, pa, b, pb) in enumerate(pairs))
    return sum(1 for _ in takewhile(bool, same))


EMPTY_PROPOSAL = Proposal()


class Drafter(Protocol):
    """One way of guessing. One instance serves all sequences of an engine.

    The engine calls `start` once when a sample begins to decode, and `finish` once when it ends. In between, `propose`
    comes at most once a step, for all samples that decode, and `observe` once for each sample's part of the step (when
    it runs, `context.tokens` already ends with the emitted tokens). Neither need come: while guesses do not pay the
    engine leaves both out, so a drafter that keeps something per sample must look in `context.tokens` for what went by
    unobserved. `observe` may come without a `propose` of that step.
    """

    name: str
    top_k: int
    """Candidates per row that `observe` needs (0: none)."""

    def start(self, context: DraftContext) -> None: ...

    def propose(self, contexts: Sequence[DraftContext], max_rows: Sequence[int], min_score: float) -> list[Proposal]:
        """One proposal for each context, of at most `max_rows[i]` draft nodes (0: no draft is wanted).

        Nodes that score below `min_score` >= 0 are not worth a row in this step. Drafters whose scores mean something
        leave them out, which also saves the time to find them; others may ignore it.
        """
        ...

    def observe(self, context: DraftContext, outcome: StepOutcome) -> None: ...

    def finish(self, context: DraftContext) -> None: ...


class BranchingDrafter(Drafter, Protocol):
    """A drafter that proposes branches."""

    def read_branches(self, contexts: Sequence[DraftContext], logits: Sequence[Tensor]) -> None:
        """Logits `[R - 1, V]` of that branch of each context that turned out to fit: exactly its `depth` nodes were
        accepted. Comes after `observe`."""
        ...


@dataclass(slots=True)
class TreeBuilder:
    """Grows a `Draft`, merging continuations that share a prefix (a trie below the pending token).

    Worked example: `insert((b, c), ..)` then `insert((b, d), ..)` gives the three nodes of the `Draft` example.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    drafters: list[str] = field(default_factory=list)
    _children: dict[tuple[int, int], int] = field(default_factory=dict)

    def child(self, parent: int, token: int) -> int | None:
        return self._children.get((parent, token))

    def add(self, parent: int, token: int, score: float, drafter: str) -> int:
        """The node of `token` below `parent`, made if absent; an existing node keeps its first owner and best score."""
        node = self._children.get((parent, token))
        if node is not None:
            self.scores[node] = max(self.scores[node], score)
            return node
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score)
        self.drafters.append(drafter)
        self._children[(parent, token)] = node
        return node

    def insert(self, path: tuple[int, ...], scores: tuple[float, ...], drafter: str, max_rows: int) -> None:
        """Add a chain below the pending token as far as the tree stays within `max_rows` nodes."""
        parent = -1
        for token, score in zip(path, scores, strict=True):
            if self.child(parent, token) is None and len(self.tokens) >= max_rows:
                return
            parent = self.add(parent, token, score, drafter)

    def build(self) -> Draft:
        return Draft(tuple(self.tokens), tuple(self.parents), tuple(self.scores), tuple(self.drafters))
