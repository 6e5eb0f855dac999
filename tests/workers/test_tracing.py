"""Where accepted drafts stand in an output: in its tokens and in its text; and how full the batch was meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pipeline.records import DraftSpan, OccupancyClass
from workers.drafters.base import EMPTY_DRAFT, Draft
from workers.occupancy import OccupancyCounts
from workers.sequence import StatsCounter
from workers.tracing import TracingCounter, placed_in_text

TEXT = "Siebenmeilenstiefel für 👢👢, naïve  steps\n\nand 漢字."


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_tokenizer_dir)


class PythonTokenizer:
    """A tokenizer without a compiled one below it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.decode = tokenizer.decode


def test_spans_of_the_worked_example() -> None:
    draft = Draft((1, 2, 3, 4), (-1, 0, 1, 2), (0.5,) * 4, ("a", "a", "b", "c"))
    tracing, plain = TracingCounter(), StatsCounter()
    for counter in (tracing, plain):
        for rows in ((), (), (), (), ()):
            counter.count(EMPTY_DRAFT, rows)
        counter.count(draft, (1, 2, 3))
        counter.count(draft, (1,))
    assert tracing.spans_noted() == (DraftSpan(5, 2, "a"), DraftSpan(7, 1, "b"), DraftSpan(9, 1, "a"))
    assert plain.spans_noted() is None
    assert tracing.freeze() == plain.freeze()


@pytest.mark.parametrize("kind", ["compiled", "python"])
def test_every_token_has_its_place_in_the_text(tokenizer: PreTrainedTokenizerBase, kind: str) -> None:
    ids = list(tokenizer(TEXT, add_special_tokens=False)["input_ids"])
    assert tokenizer.decode(ids) == TEXT
    spans = [DraftSpan(i, 1, "a") for i in range(len(ids))]
    decoder = tokenizer if kind == "compiled" else PythonTokenizer(tokenizer)
    placed = placed_in_text(spans, ids, TEXT, decoder)  # type: ignore[arg-type]
    pieces = [TEXT[span.text_start : span.text_start + span.text_length] for span in placed]
    assert "".join(pieces) == TEXT
    whole = [(piece, tokenizer.decode([token])) for piece, token in zip(pieces, ids, strict=True)]
    assert all(piece == alone for piece, alone in whole if "\ufffd" not in alone)
    assert "👢" in pieces


def test_a_span_ends_where_a_stop_string_cut_the_text(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = list(tokenizer("one two STOP", add_special_tokens=False)["input_ids"])
    (span,) = placed_in_text([DraftSpan(1, len(ids) - 1, "a")], ids, "one two ", tokenizer)
    assert span.text_start + span.text_length == len("one two ")


def test_occupancy_is_pooled_by_powers_of_two() -> None:
    counts = OccupancyCounts()
    counts.count(1, 5, 4)
    counts.count(2, 6, 3)
    counts.count(3, 0, 3)
    counts.count(3, 9, 7)
    counts.count(4, 0, 4)
    assert counts.take() == (
        OccupancyClass(1, 1, 1, 5, 3),
        OccupancyClass(2, 3, 8, 15, 5),
        OccupancyClass(4, 1, 4, 0, 0),
    )
    assert counts.take() == ()
