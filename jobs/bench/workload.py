"""The work that all contestants do: the same prompts as token ids, the same number of new tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jobs.preview import first_prompts
from pipeline.config import JobConfig, SamplingConfig
from pipeline.errors import ConfigError, RowError
from pipeline.prompts import Prompt
from workers.model_loading import LoadedModel
from workers.rendering import make_renderer


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts as token ids, what to do with them, and other prompts to warm up with."""

    uids: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    spare_prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingConfig

    @property
    def sequences(self) -> list[list[int]]:
        """The prompt of every sample, samples of a prompt side by side: with n=2 prompts a, b are [a, a, b, b]."""
        return [list(ids) for ids in self.prompts for _ in range(self.sampling.n)]

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence, prompt and output."""
        return max(map(len, self.prompts)) + self.sampling.max_tokens

    def warm_up(self, batch: int) -> list[tuple[int, ...]]:
        """`batch` prompts that are none of the workload's, so that nothing learned from them helps later."""
        return [self.spare_prompts[i % len(self.spare_prompts)] for i in range(batch)]

    def check(self, token_ids: list[list[int]]) -> None:
        """Raises ValueError unless outputs are as many and, when end tokens are ignored, as long as agreed."""
        expected = len(self.prompts) * self.sampling.n
        if len(token_ids) != expected:
            raise ValueError(f"gave {len(token_ids)} outputs, not {expected}")
        for i, ids in enumerate(token_ids):
            fits = len(ids) == self.sampling.max_tokens if self.sampling.ignore_eos else ids
            if not fits:
                raise ValueError(f"gave {len(ids)} tokens in output {i}, not {self.sampling.max_tokens}")


def load_workload(
    job: JobConfig, loaded: LoadedModel, *, limit: int, spread: bool, max_prompt_chars: int | None
) -> Workload:
    """The first `limit` prompts that fit, or as many taken evenly over all that fit.

    A prompt fits if its user text has at most `max_prompt_chars` characters and the context has room for all new
    tokens. Worked example of `spread`: 2 of 8 prompts are numbers 2 and 6, the middles of the two halves.
    Prompts that are left over serve as warm-up; when there are none, the workload's own in reverse order of tokens do.
    Raises ConfigError when no prompt fits.
    """
    rendered = list(_rendered(job, loaded, max_prompt_chars))
    if not rendered:
        raise ConfigError(f"--prompts must hold at least one prompt that fits, got none in {', '.join(job.input.path)}")
    count = min(limit, len(rendered))
    if spread:
        chosen = [(2 * i + 1) * len(rendered) // (2 * count) for i in range(count)]
    else:
        chosen = list(range(count))
    uids, prompts = zip(*(rendered[i] for i in chosen), strict=True)
    taken = set(prompts)
    spare = tuple(ids for _, ids in rendered if ids not in taken)
    return Workload(uids, prompts, spare or tuple(ids[::-1] for ids in prompts), job.sampling)


def _rendered(
    job: JobConfig, loaded: LoadedModel, max_prompt_chars: int | None
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(uid, token ids) of the prompts that fit; rows that cannot be rendered are passed over."""
    renderer = make_renderer(loaded, job)
    max_context = min(loaded.max_context, job.engine.max_context or loaded.max_context)
    for prompt in first_prompts(job):
        if max_prompt_chars is not None and user_chars(prompt) > max_prompt_chars:
            continue
        try:
            ids = renderer.token_ids(prompt, job.sampling.max_tokens)
        except RowError:
            continue
        if len(ids) + job.sampling.max_tokens <= max_context:
            yield prompt.uid, ids


def user_chars(prompt: Prompt) -> int:
    """Characters of a plain prompt, or of all user messages together."""
    if prompt.messages is None:
        return len(prompt.prompt or "")
    return sum(len(message["content"]) for message in prompt.messages if message["role"] == "user")
