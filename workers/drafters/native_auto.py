"""The drafter of `auto`, compiled: the same proposals as `AutoDrafter`, in a fraction of its time."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Sequence

from workers.drafters.auto import AutoDrafter
from workers.drafters.base import EMPTY_PROPOSAL, Draft, DraftContext, Proposal, StepOutcome
from workers.drafters.recycling import CAPACITY, RecyclingPredictor
from workers.drafters.suffix import FINISHED_TOKENS, SuffixPredictor
from workers.native import drafting

_SOURCES = (SuffixPredictor.name, RecyclingPredictor.name)  # as drafting_growth.h numbers them
_MOST_PENDING = 64
"""Observations that are kept until they are handed over together: a call costs about as much as the work for one."""


class _Nodes:
    """Arrays that proposals are read from: where each sample's nodes end, and the nodes of all."""

    def __init__(self, samples: int, nodes: int) -> None:
        self.samples, self.nodes = samples, nodes
        self.ends = (ctypes.c_int64 * samples)()
        self.tokens, self.parents, self.sources = ((ctypes.c_int64 * nodes)() for _ in range(3))
        self.scores = (ctypes.c_double * nodes)()
        self.addresses = [
            ctypes.addressof(part) for part in (self.ends, self.tokens, self.parents, self.sources, self.scores)
        ]


class NativeAutoDrafter:
    """`AutoDrafter` without a lookahead window. Raises NativeUnavailable where it cannot be compiled."""

    name = AutoDrafter.name
    top_k = AutoDrafter.top_k

    def __init__(self, capacity: int = CAPACITY, finished_tokens: int = FINISHED_TOKENS) -> None:
        self._library = drafting.library()
        self._state = self._library.drafter_new(capacity, finished_tokens)
        weakref.finalize(self, self._library.drafter_free, self._state)
        self._handed_over: dict[int, int] = {}  # by sample: how many of its tokens
        self._observations = array("q")  # that are to be handed over, and the candidates that they brought
        self._ids: list[memoryview] = []
        self._probabilities: list[memoryview] = []
        self._nodes = _Nodes(1, 1)

    def start(self, context: DraftContext) -> None:
        self._hand_over()
        tokens, group = array("q", context.tokens), context.group.encode(errors="surrogatepass")
        self._library.drafter_start(
            self._state, context.key, group, len(group), _address(tokens), len(tokens), context.prompt_length
        )
        self._handed_over[context.key] = len(tokens)

    def propose(self, contexts: Sequence[DraftContext], max_rows: Sequence[int], min_score: float) -> list[Proposal]:
        self._hand_over()
        proposals = [EMPTY_PROPOSAL] * len(contexts)
        asked = [i for i, rows in enumerate(max_rows) if rows]
        numbers: list[int] = []
        for i in asked:
            context = contexts[i]
            new = self._new_tokens(context)
            numbers += (context.key, max_rows[i], len(new), *new)
        total = self._propose(numbers, len(asked), sum(max_rows), min_score)
        if total:
            nodes = self._nodes
            tokens, parents = tuple(nodes.tokens[:total]), tuple(nodes.parents[:total])
            scores = tuple(nodes.scores[:total])
            drafters = tuple([_SOURCES[source] for source in nodes.sources[:total]])
            first = 0
            for i, end in zip(asked, nodes.ends, strict=False):
                if end > first:
                    part = slice(first, end)
                    proposals[i] = Proposal(Draft(tokens[part], parents[part], scores[part], drafters[part]))
                    first = end
        return proposals

    def observe(self, context: DraftContext, outcome: StepOutcome) -> None:
        assert outcome.topk_tokens_RK is not None
        assert outcome.topk_probs_RK is not None
        draft, path, new = outcome.draft, outcome.path, self._new_tokens(context)
        sizes = (context.key, len(new), len(path), len(draft.tokens))
        self._observations.extend((*sizes, *new, *path, *outcome.emitted, *draft.tokens, *draft.parents))
        self._ids.append(outcome.topk_tokens_RK.data)
        self._probabilities.append(outcome.topk_probs_RK.data)
        if len(self._ids) >= _MOST_PENDING:
            self._hand_over()

    def finish(self, context: DraftContext) -> None:
        self._hand_over()
        new = array("q", self._new_tokens(context))
        self._library.drafter_finish(self._state, context.key, _address(new), len(new))
        del self._handed_over[context.key]

    def _new_tokens(self, context: DraftContext) -> list[int]:
        """Tokens of a sample that were not handed over before."""
        tokens, key = context.tokens, context.key
        first = self._handed_over[key]
        self._handed_over[key] = len(tokens)
        return tokens[first:]

    def _propose(self, numbers: list[int], samples: int, rows: int, min_score: float) -> int:
        """Fill `_nodes`; returns how many there are."""
        if samples > self._nodes.samples or rows > self._nodes.nodes:
            self._nodes = _Nodes(2 * samples, 2 * rows)
        flat = array("q", numbers)
        total: int = self._library.drafter_propose(
            self._state, _address(flat), samples, min_score, *self._nodes.addresses
        )
        return total

    def _hand_over(self) -> None:
        """What was observed since the last time."""
        if not self._ids:
            return
        # Joined as bytes: operations on small arrays take several times as long.
        ids, probabilities = b"".join(self._ids), b"".join(self._probabilities)
        shape = self._ids[0].shape
        assert shape is not None
        self._library.drafter_observe(
            self._state, _address(self._observations), len(self._ids), ids, probabilities, shape[1]
        )
        self._observations = array("q")
        self._ids.clear()
        self._probabilities.clear()


def _address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]
