"""One sample from submission to result: its tokens, its place in the cache, its text and its figures."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal

from transformers import PreTrainedTokenizerBase

from pipeline.config import SamplingConfig
from pipeline.records import AcceptanceStats, DraftSpan
from workers.drafters.base import Draft, DraftContext
from workers.kv_cache import Slot
from workers.randomness import NoiseKey, noise_key
from workers.sampling import RowHistory


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and what to do with it. `uid` keys the noise, so it must be the row's stable id."""

    uid: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingConfig


@dataclass(frozen=True, slots=True)
class SampleResult:
    """One finished sample. `token_ids` include the token that ended it.

    The optional lists have one entry per token id (see `SampleRecord`).
    """

    uid: str
    sample_index: int
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    stopped_by: str | None
    stats: AcceptanceStats
    latency_s: float
    tokenizer: PreTrainedTokenizerBase = field(repr=False, compare=False)
    token_logprobs: tuple[float, ...] | None = None
    topk_token_ids: tuple[tuple[int, ...], ...] | None = None
    topk_logprobs: tuple[tuple[float, ...], ...] | None = None
    cdf_low: tuple[float, ...] | None = None
    cdf_high: tuple[float, ...] | None = None
    draft_spans: tuple[DraftSpan, ...] | None = None

    @property
    def text(self) -> str:
        """What the tokens say, without special tokens and stop string. Decoded here, in the thread of who asks, so that
        the engine's thread need not.
        """
        text = str(self.tokenizer.decode(list(self.token_ids), skip_special_tokens=True))
        return text if self.stopped_by is None else text[: text.index(self.stopped_by)]


def _kind(sampling: SamplingConfig) -> SamplingConfig:
    """Parameters without the seed (it is in the noise): what rows with seeds of their own have in common."""
    return _same(sampling if sampling.seed == 0 else sampling.model_copy(update={"seed": 0}))


@functools.lru_cache(maxsize=256)
def _same(sampling: SamplingConfig) -> SamplingConfig:
    """Equal parameters as one object: rows of a step are grouped by them, and identity is quick to see."""
    return sampling


@dataclass(slots=True)
class StatsCounter:
    """The mutable form of `AcceptanceStats`, one `count` per step."""

    accepted: Counter[int] = field(default_factory=Counter)
    drafted: Counter[int] = field(default_factory=Counter)
    by_drafter: Counter[str] = field(default_factory=Counter)

    def count(self, draft: Draft, accepted_rows: Seq[int]) -> None:
        """One step that drafted `draft` and accepted these rows (row r is node r - 1)."""
        self.accepted[len(accepted_rows)] += 1
        self.drafted[len(draft)] += 1
        for row in accepted_rows:
            self.by_drafter[draft.drafters[row - 1]] += 1

    def spans_noted(self) -> tuple[DraftSpan, ...] | None:
        """None: where drafts were accepted is only noted in jobs that trace (see `tracing`)."""
        return None

    def freeze(self) -> AcceptanceStats:
        return AcceptanceStats(
            num_steps=self.accepted.total(),
            num_draft_tokens=sum(rows * steps for rows, steps in self.drafted.items()),
            num_accepted_draft_tokens=sum(rows * steps for rows, steps in self.accepted.items()),
            acceptance_histogram=_dense(self.accepted),
            window_histogram=_dense(self.drafted),
            accepted_by_drafter=dict(self.by_drafter),
        )


def _dense(counts: Counter[int]) -> tuple[int, ...]:
    return tuple(counts[i] for i in range(max(counts, default=-1) + 1))


@dataclass(slots=True)
class TokenExtras:
    """Per-token values that only some jobs ask for, in the order of the output tokens."""

    logprobs: list[float] = field(default_factory=list)
    topk_ids: list[tuple[int, ...]] = field(default_factory=list)
    topk_logprobs: list[tuple[float, ...]] = field(default_factory=list)
    cdf_low: list[float] = field(default_factory=list)
    cdf_high: list[float] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one sample. Committed tokens are `context.tokens`; all but the last may be in the cache.

    A sequence waits (no slot), is prefilled (more than one token uncached), then decodes (only the pending token
    uncached).
    """

    request: Request
    sample_index: int
    context: DraftContext
    end_ids: frozenset[int]
    max_length: int
    noise: NoiseKey
    submitted_at: float
    started: bool = False
    stats: StatsCounter = field(default_factory=StatsCounter)
    extras: TokenExtras = field(default_factory=TokenExtras)
    finish_reason: Literal["stop", "length"] | None = None
    stopped_by: str | None = None

    @classmethod
    def create(
        cls, request: Request, sample_index: int, key: int, end_ids: frozenset[int], max_context: int
    ) -> Sequence:
        sampling = request.sampling
        noise = noise_key(sampling.seed, request.uid, sample_index)
        return cls(
            request,
            sample_index,
            DraftContext(key, request.uid, list(request.prompt_ids), len(request.prompt_ids), _kind(sampling), noise),
            frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else end_ids),
            min(max_context, len(request.prompt_ids) + sampling.max_tokens),
            noise,
            time.monotonic(),
        )

    @property
    def tokens(self) -> list[int]:
        return self.context.tokens

    @property
    def slot(self) -> Slot | None:
        """Where keys and values are kept; None while the sample waits."""
        return self.context.slot

    @slot.setter
    def slot(self, slot: Slot | None) -> None:
        self.context.slot = slot

    @property
    def num_cached(self) -> int:
        return 0 if self.slot is None else self.slot.used

    @property
    def num_uncached(self) -> int:
        return len(self.tokens) - self.num_cached

    @property
    def is_decoding(self) -> bool:
        slot, tokens = self.context.slot, self.context.tokens
        return self.started and slot is not None and len(tokens) - slot.used == 1

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_length - len(self.tokens)

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.context.prompt_length :]

    def history(self, path_tokens: Seq[int]) -> RowHistory:
        """Prefix counts of a row that lies `path_tokens` beyond the committed tokens, for penalties."""
        prompt = frozenset(self.request.prompt_ids)
        return RowHistory(prompt, Counter(self.output_ids) + Counter(path_tokens))

    def emit(self, tokens: Seq[int], tokenizer: PreTrainedTokenizerBase) -> int:
        """Commit tokens until one of them ends the sample; returns how many were committed."""
        assert self.finish_reason is None
        committed, stops = self.context.tokens, self.request.sampling.stop
        for count, token in enumerate(tokens, start=1):
            committed.append(token)
            if token in self.end_ids or (stops and self._meets_stop_string(stops, tokenizer)):
                self.finish_reason = "stop"
                return count
            if len(committed) == self.max_length:
                self.finish_reason = "length"
                return count
        return len(tokens)

    def _meets_stop_string(self, stops: tuple[str, ...], tokenizer: PreTrainedTokenizerBase) -> bool:
        """Whether the text so far holds a stop string that the newest token completed.

        Only a tail is decoded: a character takes at most four byte-level tokens, and a few tokens more keep the
        tail's own start (a cut character, a stripped space) away from the place that is searched.
        """
        tail = max(self.context.prompt_length, len(self.tokens) - 4 * max(map(len, stops)) - 16)
        text = tokenizer.decode(self.tokens[tail:], skip_special_tokens=True)
        if not any(stop in text for stop in stops):
            return False
        if tail > self.context.prompt_length:
            text = tokenizer.decode(self.output_ids, skip_special_tokens=True)
        found = [(text.index(stop), -len(stop), stop) for stop in stops if stop in text]
        if not found:
            return False
        self.stopped_by = min(found)[2]
        return True

    def result(self, tokenizer: PreTrainedTokenizerBase, wanted: frozenset[str]) -> SampleResult:
        """The finished sample, with the optional lists that are wanted (names of `output.extras`)."""
        assert self.finish_reason is not None
        extras = self.extras
        return SampleResult(
            uid=self.request.uid,
            sample_index=self.sample_index,
            token_ids=tuple(self.output_ids),
            finish_reason=self.finish_reason,
            stopped_by=self.stopped_by,
            stats=self.stats.freeze(),
            latency_s=time.monotonic() - self.submitted_at,
            tokenizer=tokenizer,
            token_logprobs=tuple(extras.logprobs) if "logprobs" in wanted else None,
            topk_token_ids=tuple(extras.topk_ids) if "topk" in wanted else None,
            topk_logprobs=tuple(extras.topk_logprobs) if "topk" in wanted else None,
            cdf_low=tuple(extras.cdf_low) if "cdf" in wanted else None,
            cdf_high=tuple(extras.cdf_high) if "cdf" in wanted else None,
            draft_spans=self.stats.spans_noted(),
        )
