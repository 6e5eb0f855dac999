"""From a prompt to token ids: chat template, tokenizer, and the model's context length."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.config import JobConfig
from pipeline.data_config import InputConfig
from pipeline.errors import ConfigError, RowError
from pipeline.prompts import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from workers.model_loading import LoadedModel

TOKENIZED_TOGETHER = 64
"""Prompts that are rendered and tokenized before they are handed to the engine: few, so that it can start."""


class Renderer:
    """Renders and tokenizes prompts. May be called from several threads at once.

    `max_context` is the model's context length in tokens, prompt and output together.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, input: InputConfig, max_context: int) -> None:
        # An own copy under a lock: a fast tokenizer refuses to encode in two threads, or while another one decodes.
        self._tokenizer = copy.deepcopy(tokenizer)
        self._lock = threading.Lock()
        self._input = input
        self._max_context = max_context

    def text(self, prompt: Prompt) -> str:
        """The text that the model reads, special tokens of the chat template included.

        Raises `RowError` when the prompt has an error or the chat template refuses it, `ConfigError` when the job needs
        a template that is not there.
        """
        if prompt.error is not None:
            raise prompt.error
        if not self._uses_chat_template(prompt):
            if prompt.tools is not None:
                raise RowError("invalid_tools", "tools need messages, or input.chat_template: true for a plain string")
            assert prompt.prompt is not None, prompt
            return prompt.prompt
        if self._input.chat_template is False:
            raise ConfigError("input.chat_template must not be false when prompts are messages, got false")
        if not self._tokenizer.chat_template:
            raise ConfigError(
                "input must hold plain strings (no messages, system_prompt or chat_template) for a model whose "
                f"tokenizer has no chat template, got {'messages' if prompt.messages else 'chat_template: true'}"
            )
        messages = prompt.messages or ({"role": "user", "content": prompt.prompt or ""},)
        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if prompt.tools is None else list(prompt.tools),
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:  # a template is a program that came with the model: it may raise anything
            raise RowError(
                "chat_template_error", f"the model's chat template refuses these messages: {error}"
            ) from error
        assert isinstance(rendered, str), type(rendered)
        return rendered

    def token_ids(self, prompt: Prompt, max_tokens: int) -> tuple[int, ...]:
        """The prompt's token ids, at most `max_context - 1` so that one new token fits.

        A longer prompt raises `RowError`, or loses its oldest tokens until `max_tokens` new ones fit (but never more
        than half of the context) when `input.on_too_long` is truncate_left. A row's own max_tokens goes before.

        Worked example, max_context 8, max_tokens 3: 7 tokens pass as they are; 9 tokens keep the last 5.
        """
        (outcome,) = self.batch_token_ids([prompt], max_tokens)
        if isinstance(outcome, RowError):
            raise outcome
        return outcome

    def batch_token_ids(self, prompts: Sequence[Prompt], max_tokens: int) -> list[tuple[int, ...] | RowError]:
        """`token_ids` of many prompts, or the error of each. They are tokenized in one call, during which the engine's
        thread can run on.
        """
        outcomes: list[tuple[int, ...] | RowError] = []
        texts: dict[bool, dict[int, str]] = {False: {}, True: {}}
        for i, prompt in enumerate(prompts):
            outcomes.append(())
            try:
                texts[self._uses_chat_template(prompt)][i] = self.text(prompt)
            except RowError as error:
                outcomes[i] = error
        for uses_chat_template, rendered in texts.items():
            if not rendered:
                continue
            with self._lock:
                # A chat template writes the special tokens itself.
                encoded = self._tokenizer(list(rendered.values()), add_special_tokens=not uses_chat_template)
            for i, ids in zip(rendered, encoded["input_ids"], strict=True):
                try:
                    outcomes[i] = self._fitted(tuple(ids), prompts[i].sampling.get("max_tokens", max_tokens))
                except RowError as error:
                    outcomes[i] = error
        return outcomes

    def _fitted(self, ids: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
        """Token ids as they may be served (see `token_ids`)."""
        if not ids:
            raise RowError("empty_prompt", "the prompt has no tokens")
        if len(ids) < self._max_context:
            return ids
        if self._input.on_too_long == "error":
            raise RowError(
                "prompt_too_long",
                f"the prompt has {len(ids)} tokens, which leaves no room for a new one in the model's context of "
                f"{self._max_context}",
            )
        return ids[-(self._max_context - min(max_tokens, self._max_context // 2)) :]

    def _uses_chat_template(self, prompt: Prompt) -> bool:
        return prompt.messages is not None or bool(self._input.chat_template)


def make_renderer(loaded: LoadedModel, config: JobConfig) -> Renderer:
    """The renderer of a job, with the model's context length as `engine.max_context` cuts it."""
    max_context = min(loaded.max_context, config.engine.max_context or loaded.max_context)
    return Renderer(loaded.tokenizer, config.input, max_context)
