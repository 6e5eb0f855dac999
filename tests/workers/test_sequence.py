"""One sample's life: end tokens, lengths, stop strings across tokens and inside accepted drafts, figures."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pipeline.config import SamplingConfig
from pipeline.records import AcceptanceStats
from workers.drafters.base import EMPTY_DRAFT, Draft
from workers.sequence import Request, Sequence, StatsCounter

END = 0


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer_dir: Path) -> PreTrainedTokenizerBase:
    loaded = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    assert loaded.eos_token_id == END
    return loaded


def sample(max_context: int = 500, **sampling: object) -> Sequence:
    params = SamplingConfig.model_validate({"max_tokens": 100, **sampling})
    return Sequence.create(Request("row", (5, 6), params), 0, 1, frozenset({END}), max_context)


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text)["input_ids"])


def test_rows_with_seeds_of_their_own_are_of_one_kind() -> None:
    """So a step picks for all of them at once; the seed is in the noise."""
    one, other, hotter = sample(seed=1), sample(seed=2), sample(seed=1, temperature=2.0)
    assert one.context.sampling is other.context.sampling
    assert one.noise != other.noise
    assert one.context.sampling != hotter.context.sampling


def test_end_token_cuts_the_surplus(tokenizer: PreTrainedTokenizerBase) -> None:
    s = sample()
    assert s.emit([40, 41, END, 42], tokenizer) == 3
    assert (s.output_ids, s.finish_reason) == ([40, 41, END], "stop")
    assert s.result(tokenizer, frozenset()).token_ids == (40, 41, END)


def test_ignore_eos_and_stop_token_ids(tokenizer: PreTrainedTokenizerBase) -> None:
    s = sample(ignore_eos=True, stop_token_ids=[50])
    assert s.emit([END, 41], tokenizer) == 2
    assert s.emit([50, 51], tokenizer) == 1
    assert s.finish_reason == "stop"


@pytest.mark.parametrize(("limits", "count"), [({"max_tokens": 3}, 3), ({"max_context": 4}, 2)])
def test_length(tokenizer: PreTrainedTokenizerBase, limits: dict[str, int], count: int) -> None:
    s = sample(**limits)
    assert s.emit([40, 41, 42, 43], tokenizer) == count
    assert s.finish_reason == "length"
    assert s.num_remaining == 0


def test_end_token_at_the_last_place_is_a_stop(tokenizer: PreTrainedTokenizerBase) -> None:
    s = sample(max_tokens=2)
    s.emit([40, END], tokenizer)
    assert s.finish_reason == "stop"


def test_stop_string_over_several_tokens_inside_a_draft(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = text_ids(tokenizer, "The fox jumps@@over the dog")
    at = len(text_ids(tokenizer, "The fox jumps@@"))
    s = sample(stop=["s@@"])
    assert s.emit(ids, tokenizer) == at
    assert len(text_ids(tokenizer, "s@@")) > 1
    result = s.result(tokenizer, frozenset())
    assert (result.text, result.finish_reason) == ("The fox jump", "stop")
    assert list(result.token_ids) == ids[:at]


def test_stop_string_whose_tokens_come_one_by_one(tokenizer: PreTrainedTokenizerBase) -> None:
    s = sample(stop=["zz", "@x"])
    for token in text_ids(tokenizer, "abc@x"):
        s.emit([token], tokenizer)
    assert s.result(tokenizer, frozenset()).text == "abc"


def test_the_earliest_stop_string_cuts_and_the_longest_of_equals(tokenizer: PreTrainedTokenizerBase) -> None:
    s = sample(stop=["##", "a##", "q"])
    s.emit(text_ids(tokenizer, "xa##"), tokenizer)
    assert s.result(tokenizer, frozenset()).text == "x"


def test_stop_string_far_into_a_long_output(tokenizer: PreTrainedTokenizerBase) -> None:
    """Longer than the tail that is searched, and of characters that take several tokens each."""
    text = "é€😀" * 20 + "<stop>"
    s = sample(stop=["😀<stop>"], max_tokens=400)
    s.emit(text_ids(tokenizer, text), tokenizer)
    assert s.result(tokenizer, frozenset()).text == text.removesuffix("😀<stop>")


def test_text_is_decoded_when_asked_for_and_in_any_thread(tokenizer: PreTrainedTokenizerBase) -> None:
    texts = [f"The fox jumps {i} times@@" for i in range(200)]
    results = []
    for text in texts:
        s = sample(stop=["@@"])
        s.emit(text_ids(tokenizer, text), tokenizer)
        results.append(s.result(tokenizer, frozenset()))
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda result: result.text, results)) == [text.removesuffix("@@") for text in texts]


def test_the_engine_does_not_decode_a_result(tokenizer: PreTrainedTokenizerBase) -> None:
    s = sample(max_tokens=2)
    s.emit([40, 41], tokenizer)
    result = s.result(None, frozenset())  # type: ignore[arg-type]
    assert result.token_ids == (40, 41)
    with pytest.raises(AttributeError):
        _ = result.text


def test_no_stop_string_no_stop(tokenizer: PreTrainedTokenizerBase) -> None:
    s = sample(stop=["@@"])
    s.emit(text_ids(tokenizer, "a@ @b"), tokenizer)
    assert s.finish_reason is None


def test_stats_of_the_worked_example() -> None:
    draft = Draft((1, 2, 3, 4), (-1, 0, 1, 2), (0.5,) * 4, ("a", "b", "b", "b"))
    counter = StatsCounter()
    counter.count(draft, (1, 2))
    counter.count(draft, ())
    counter.count(EMPTY_DRAFT, ())
    assert counter.freeze() == AcceptanceStats(3, 8, 2, (2, 0, 1), (1, 0, 0, 0, 2), {"a": 1, "b": 1})
