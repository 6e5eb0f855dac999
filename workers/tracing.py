"""Which tokens of an output were drafted, and by whom (`output.trace`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from pipeline.records import DraftSpan
from workers.drafters.base import Draft
from workers.sequence import StatsCounter


@dataclass(slots=True)
class TracingCounter(StatsCounter):
    """Also notes where each accepted draft stands in the output. Takes the counter's place in jobs that trace, so the
    others do without a question in each step."""

    spans: list[DraftSpan] = field(default_factory=list)
    position: int = 0

    def count(self, draft: Draft, accepted_rows: Sequence[int]) -> None:
        """Worked example: at position 5 a step accepts drafts of a, a, b and adds a token: spans (5, 2, a), (7, 1, b),
        next position 9."""
        StatsCounter.count(self, draft, accepted_rows)
        for drafter, rows in groupby(draft.drafters[row - 1] for row in accepted_rows):
            length = len(list(rows))
            self.spans.append(DraftSpan(self.position, length, drafter))
            self.position += length
        self.position += 1

    def spans_noted(self) -> tuple[DraftSpan, ...]:
        return tuple(self.spans)


def placed_in_text(
    spans: Sequence[DraftSpan], token_ids: Sequence[int], text: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[DraftSpan, ...]:
    """The spans with their places in the sample's text, which may end before the tokens do (a stop string)."""
    ends = [0, *(min(end, len(text)) for end in _text_ends(token_ids, tokenizer))]
    return tuple(
        replace(
            span,
            text_start=ends[span.start],
            text_length=ends[span.start + span.length] - ends[span.start],
        )
        for span in spans
    )


def _text_ends(token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> Iterator[int]:
    """After each token, how many characters of text are complete."""
    backend = getattr(tokenizer, "_tokenizer", None)
    if backend is None:  # a tokenizer in Python
        for count in range(1, len(token_ids) + 1):
            yield len(str(tokenizer.decode(list(token_ids[:count]), skip_special_tokens=True)).rstrip("\ufffd"))
        return
    stream, length = DecodeStream(skip_special_tokens=True), 0
    for token in token_ids:
        length += len(stream.step(backend, token) or "")
        yield length
