"""Prompts to token ids: templates, special tokens, and what happens to prompts that do not fit."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pipeline.data_config import InputConfig
from pipeline.errors import ConfigError, RowError
from pipeline.prompts import Prompt
from workers.rendering import Renderer


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_tokenizer_dir)


def prompt_of(value: str | list[dict[str, str]] | RowError) -> Prompt:
    return Prompt(
        row=0,
        uid="r0",
        prompt=value if isinstance(value, str) else None,
        messages=tuple(value) if isinstance(value, list) else None,
        passthrough={},
        error=value if isinstance(value, RowError) else None,
    )


def renderer(tokenizer: PreTrainedTokenizerBase, max_context: int = 512, **options: Any) -> Renderer:
    return Renderer(tokenizer, InputConfig(path=("x.parquet",), **options), max_context)


QUESTION = [{"role": "user", "content": "Why boots?"}]


def test_a_plain_string_is_tokenized_as_it_is(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = renderer(tokenizer).token_ids(prompt_of("One step"), 8)
    assert tokenizer.decode(ids) == "One step"


def test_messages_go_through_the_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = renderer(tokenizer).token_ids(prompt_of(QUESTION), 8)
    assert tokenizer.decode(ids) == "<|start|>user\nWhy boots?<|end|>\n<|start|>assistant\n"


def test_a_plain_string_becomes_a_user_message_on_request(tokenizer: PreTrainedTokenizerBase) -> None:
    by_string = renderer(tokenizer, chat_template=True).token_ids(prompt_of("Why boots?"), 8)
    assert by_string == renderer(tokenizer).token_ids(prompt_of(QUESTION), 8)


def test_a_chat_template_gets_no_second_begin_token(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer.save_pretrained(tmp_path)
    with_bos = AutoTokenizer.from_pretrained(tmp_path)
    start = with_bos.convert_tokens_to_ids("<|start|>")
    with_bos.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", start)]
    )
    rendering = renderer(with_bos)
    assert rendering.token_ids(prompt_of("hi"), 8)[0] == start
    assert rendering.token_ids(prompt_of(QUESTION), 8)[:2].count(start) == 1


def test_a_refused_messages_list_is_a_row_error(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(
        RowError, match="the model's chat template refuses these messages: unknown role robot"
    ) as caught:
        renderer(tokenizer).token_ids(prompt_of([{"role": "robot", "content": "beep"}]), 8)
    assert caught.value.error_type == "chat_template_error"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ messages.clear() }}",
        "{% include 'secrets' %}",
    ],
)
def test_a_chat_template_runs_in_a_sandbox(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    own = copy.deepcopy(tokenizer)
    own.chat_template = template
    with pytest.raises(RowError, match="the model's chat template refuses these messages") as raised:
        renderer(own).text(prompt_of(QUESTION))
    assert raised.value.error_type == "chat_template_error"


def test_tools_are_described_by_the_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    own = copy.deepcopy(tokenizer)
    own.chat_template = (
        "{{ tools | map(attribute='name') | join(', ') if tools else 'none' }}: {{ messages[0].content }}"
    )
    with_tools = replace(prompt_of(QUESTION), tools=({"name": "add"}, {"name": "sub"}))
    assert renderer(own).text(with_tools) == "add, sub: Why boots?"
    assert renderer(own).text(prompt_of(QUESTION)) == "none: Why boots?"
    plain = replace(prompt_of("Why boots?"), tools=({"name": "add"},))
    with pytest.raises(RowError, match=r"tools need messages, or input\.chat_template: true") as caught:
        renderer(own).text(plain)
    assert caught.value.error_type == "invalid_tools"
    assert renderer(own, chat_template=True).text(plain) == "add: Why boots?"


def test_a_row_with_its_own_max_tokens_is_cut_for_it(tokenizer: PreTrainedTokenizerBase) -> None:
    cutting = renderer(tokenizer, max_context=8, on_too_long="truncate_left")
    own = replace(prompt_of("0123456789"), sampling={"max_tokens": 1})
    assert [len(ids) for ids in cutting.batch_token_ids([own, prompt_of("0123456789")], 3)] == [7, 5]  # type: ignore[arg-type]


def test_the_error_of_a_prompt_is_raised(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(RowError) as caught:
        renderer(tokenizer).token_ids(prompt_of(RowError("null_prompt", "the prompt is null")), 8)
    assert caught.value.error_type == "null_prompt"


@pytest.mark.parametrize(("value", "options"), [(QUESTION, {}), ("Why boots?", {"chat_template": True})])
def test_a_model_without_a_template_is_a_mistake_of_the_job(
    tiny_tokenizer_dir: Path, value: Any, options: dict[str, Any]
) -> None:
    plain = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    plain.chat_template = None
    got = "messages" if isinstance(value, list) else "chat_template: true"
    with pytest.raises(ConfigError) as caught:
        renderer(plain, **options).token_ids(prompt_of(value), 8)
    assert str(caught.value) == (
        "input must hold plain strings (no messages, system_prompt or chat_template) for a model whose tokenizer has "
        f"no chat template, got {got}"
    )


def test_messages_without_a_template_are_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ConfigError) as caught:
        renderer(tokenizer, chat_template=False).token_ids(prompt_of(QUESTION), 8)
    assert str(caught.value) == "input.chat_template must not be false when prompts are messages, got false"


def test_a_prompt_may_leave_room_for_one_token_only(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = renderer(tokenizer).token_ids(prompt_of("One step of seven-league boots"), 8)
    assert (
        renderer(tokenizer, max_context=len(ids) + 1).token_ids(prompt_of("One step of seven-league boots"), 8) == ids
    )


def test_a_longer_prompt_is_a_row_error(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = renderer(tokenizer).token_ids(prompt_of("One step of seven-league boots"), 8)
    with pytest.raises(RowError) as caught:
        renderer(tokenizer, max_context=len(ids)).token_ids(prompt_of("One step of seven-league boots"), 8)
    assert caught.value.error_type == "prompt_too_long"
    assert str(caught.value) == (
        f"the prompt has {len(ids)} tokens, which leaves no room for a new one in the model's context of {len(ids)}"
    )


@pytest.mark.parametrize(("max_tokens", "kept"), [(1, 7), (3, 5), (100, 4)])
def test_truncation_drops_the_oldest_tokens(tokenizer: PreTrainedTokenizerBase, max_tokens: int, kept: int) -> None:
    ids = renderer(tokenizer).token_ids(prompt_of("0123456789"), 8)
    assert len(ids) == 10
    cutting = renderer(tokenizer, max_context=8, on_too_long="truncate_left")
    assert cutting.token_ids(prompt_of("0123456789"), max_tokens) == ids[-kept:]
    assert cutting.token_ids(prompt_of("0123456"), max_tokens) == ids[:7]


def test_threads_share_a_renderer(tokenizer: PreTrainedTokenizerBase) -> None:
    shared = renderer(tokenizer)
    texts = [f"One step of seven-league boots {i}" for i in range(200)]
    expected = [shared.token_ids(prompt_of(text), 8) for text in texts]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda text: shared.token_ids(prompt_of(text), 8), texts)) == expected


def test_a_batch_gives_what_each_prompt_gives_alone(tokenizer: PreTrainedTokenizerBase) -> None:
    from tokenizers.processors import TemplateProcessing

    backend = renderer(tokenizer, max_context=40)
    start = tokenizer.convert_tokens_to_ids("<|start|>")
    backend._tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", start)]
    )
    values = ["One step", QUESTION, "", RowError("null_prompt", "null"), "fox " * 80, "é€😀 it", QUESTION]
    prompts = [prompt_of(value) for value in values]  # type: ignore[arg-type]
    outcomes = backend.batch_token_ids(prompts, 8)
    kinds = [outcome.error_type if isinstance(outcome, RowError) else "ids" for outcome in outcomes]
    assert kinds == ["ids", "ids", "ids", "null_prompt", "prompt_too_long", "ids", "ids"]
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        if isinstance(outcome, RowError):
            with pytest.raises(RowError, match=str(outcome)):
                backend.token_ids(prompt, 8)
        else:
            assert backend.token_ids(prompt, 8) == outcome


def test_a_mistake_of_the_job_is_raised_by_a_batch_too(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ConfigError, match=r"input\.chat_template must not be false"):
        renderer(tokenizer, chat_template=False).batch_token_ids([prompt_of("a"), prompt_of(QUESTION)], 8)
