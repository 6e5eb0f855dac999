"""Which samples of an output stay: the filters, applied to batches that hold all samples of each of their prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.config import JobConfig
from pipeline.errors import ConfigError
from pipeline.exporting.dedup import SeenDigests, digest
from pipeline.exporting.options import Filters
from pipeline.quality import ends_in_loop

Mask = NDArray[np.bool_]


class Selection:
    """The filters of one export. `dropped` counts samples by the first rule that they break (see `described`)."""

    def __init__(self, filters: Filters, sequence_length: int | None, ends: bool = False) -> None:
        """`ends`: the format takes only answers that came to an end."""
        self._filters = filters
        self._ends = ends
        self._sequence_length = sequence_length
        self._seen = SeenDigests()
        self.dropped: Counter[str] = Counter()

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the output that the rules look at."""
        looked_at = ["id", "sample_index", "finish_reason", "prompt_tokens", "completion_tokens"]
        looked_at += ["mean_acceptance_length"] * (self._filters.acceptance is not None)
        looked_at += ["generation"] * (self._filters.no_loops or self._filters.dedup)
        looked_at += ["prompt", "messages"] * self._filters.dedup
        looked_at += ["token_logprobs"] * (self._filters.best is not None)
        return tuple(looked_at)

    def check(self, config: JobConfig) -> None:
        """Raises ConfigError where the output lacks a column that a rule needs."""
        if self._filters.best is not None and "logprobs" not in config.output.extras:
            raise ConfigError(
                "--best needs the column token_logprobs, which output.extras 'logprobs' makes, got a job with "
                f"output.extras [{', '.join(config.output.extras)}]"
            )

    def kept(self, table: pa.Table) -> pa.Table:
        """The samples that stay, in order."""
        for name, rule in self._rules():
            stays = rule(table)
            if not stays.all():
                self.dropped[name] += int((~stays).sum())
                table = table.filter(pa.array(stays))
        return table

    def _rules(self) -> Iterator[tuple[str, Any]]:
        f = self._filters
        yield "failed", lambda table: _texts(table, "finish_reason") != "error"
        if self._ends:
            yield "cut_off", lambda table: _texts(table, "finish_reason") != "length"
        if f.finish_reasons:
            yield "finish_reason", lambda table: np.isin(_texts(table, "finish_reason"), f.finish_reasons)
        if f.min_tokens is not None:
            yield "min_tokens", lambda table: _numbers(table, "completion_tokens") >= f.min_tokens
        if f.max_tokens is not None:
            yield "max_tokens", lambda table: _numbers(table, "completion_tokens") <= f.max_tokens
        if f.acceptance is not None:
            low, high = f.acceptance
            yield "acceptance", lambda table: _within(_numbers(table, "mean_acceptance_length"), low, high)
        if f.no_loops:
            yield "loops", lambda table: np.array([not ends_in_loop(text) for text in _generations(table)], bool)
        if self._sequence_length is not None:
            yield "sequence_length", self._fits
        if f.dedup:
            yield "dedup", self._is_new
        if f.best is not None:
            yield "best", lambda table: best_of_each(table, f.best or 0)

    def _fits(self, table: pa.Table) -> Mask:
        lengths = _numbers(table, "prompt_tokens") + _numbers(table, "completion_tokens")
        fits: Mask = lengths <= self._sequence_length
        return fits

    def _is_new(self, table: pa.Table) -> Mask:
        prompts = zip(table["prompt"].to_pylist(), table["messages"].to_pylist(), strict=True)
        flat = [
            (prompt_texts(prompt, messages), text)
            for (prompt, messages), text in zip(prompts, _generations(table), strict=True)
        ]
        return np.array(self._seen.add([digest(text, *prompt) for prompt, text in flat]), bool)


def prompt_texts(prompt: str | None, messages: list[dict[str, str]] | None) -> list[str]:
    """All that makes a prompt, as texts."""
    if messages is None:
        return [prompt or ""]
    return [text for message in messages for text in (message["role"], message["content"])]


def best_of_each(table: pa.Table, count: int) -> Mask:
    """Of the samples of each prompt (neighbours with the same id) the best by mean log-probability of their tokens.

    Worked example: means of -1, -3, -2 and a count of 2 give True, False, True. The earlier of equals is better.
    """
    lengths = table["token_logprobs"].combine_chunks().value_lengths().to_numpy(zero_copy_only=False)
    values = table["token_logprobs"].combine_chunks().flatten().to_numpy(zero_copy_only=False).astype(np.float64)
    sums = np.concatenate([[0.0], np.cumsum(values)])[np.concatenate([[0], np.cumsum(lengths)])]
    means = np.diff(sums) / np.maximum(lengths, 1)
    stays = np.zeros(table.num_rows, bool)
    for start, stop in groups(table["id"].to_pylist()):
        order = np.argsort(-means[start:stop], kind="stable")
        stays[start + order[:count]] = True
    return stays


def groups(ids: list[str]) -> Iterator[tuple[int, int]]:
    """[start, stop) of each run of equal ids."""
    start = 0
    for place in range(1, len(ids) + 1):
        if place == len(ids) or ids[place] != ids[start]:
            yield start, place
            start = place


def _within(values: NDArray[Any], low: float, high: float) -> Mask:
    inside: Mask = (values >= low) & (values <= high)
    return inside


def _numbers(table: pa.Table, column: str) -> NDArray[Any]:
    numbers: NDArray[Any] = table[column].to_numpy()
    return numbers


def _texts(table: pa.Table, column: str) -> NDArray[Any]:
    return np.array(table[column].to_pylist(), object)


def _generations(table: pa.Table) -> list[str]:
    return [text or "" for text in table["generation"].to_pylist()]
