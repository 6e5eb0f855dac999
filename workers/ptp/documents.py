"""Token ids to train on, one document at a time: from outputs of the pipeline, or from any data set of text or ids.

A source is cut into units (a committed part, a shard of an input file, a batch of samples), which are read whole, but
one at a time. A hash of the row's id decides which rows are held out for evaluation, so all samples of a prompt are on
the same side, whatever order, seed or number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline import storage
from pipeline.commits import JobStore
from pipeline.config import JobConfig, ModelConfig
from pipeline.data_config import InputConfig, OutputConfig
from pipeline.errors import ConfigError, RowError
from pipeline.parts import read_part_rows
from pipeline.prompts import Prompt, read_prompts, stored_columns, stored_prompt
from pipeline.shards import plan
from workers.rendering import Renderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROWS_PER_UNIT = 256
_COLUMNS = ("finish_reason", "completion_token_ids", "cdf_low", "cdf_high")

Wanted = Callable[[str], bool]
"""Whether the row of this id is to be read."""


@dataclass(frozen=True, slots=True)
class Document:
    """N tokens that were written one after another.

    `is_target[i]`: token i is one that the model wrote, or is to learn. `low` and `high` are the edges of the noise
    that picked it, NaN where it is no target; None: not known, the teacher computes them.
    """

    ids: NDArray[np.int64]
    is_target: NDArray[np.bool_]
    low: NDArray[np.float64] | None = None
    high: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.is_target), self
        assert self.low is None or self.high is None or len(self.low) == len(self.high) == len(self.ids), self

    def __len__(self) -> int:
        return len(self.ids)

    def slice(self, start: int, stop: int) -> Document:
        low, high = (None if x is None else x[start:stop] for x in (self.low, self.high))
        return Document(self.ids[start:stop], self.is_target[start:stop], low, high)


class Source(Protocol):
    """Documents by unit. The same unit gives the same documents each time."""

    units: int
    has_edges: bool
    splits_long: bool
    """Whether the rest of a document that is too long may be a document of its own. Not where edges are stored: they
    hold after the whole text before them."""

    def read(self, unit: int, wanted: Wanted) -> Iterator[Document]: ...


def is_held_out(row_id: str, share: float) -> bool:
    """Whether a row belongs to the held-out share, by a hash of its id."""
    number = int.from_bytes(blake2b(row_id.encode(), digest_size=8, person=b"held out").digest(), "big")
    return number < share * 2.0**64


class OutputSource:
    """Completions of finished or unfinished jobs, with the prompts that the worker read and the stored edges."""

    has_edges = True
    splits_long = False

    def __init__(self, jobs: Sequence[OutputJob], tokenizer: PreTrainedTokenizerBase, max_context: int) -> None:
        """`jobs` as `check_outputs` gives them. Raises ConfigError where nothing is committed."""
        self._parts: list[tuple[str, Renderer, JobConfig]] = []
        for job in jobs:
            longest = min(max_context, job.config.engine.max_context or max_context)
            renderer = Renderer(tokenizer, job.config.input, longest)
            for path in job.parts:
                self._parts.append((path, renderer, job.config))
        self.units = len(self._parts)

    def read(self, unit: int, wanted: Wanted) -> Iterator[Document]:
        path, renderer, config = self._parts[unit]
        part = read_part_rows(path, (*stored_columns(config.input), *_COLUMNS))
        rows = [row for row in part if _is_usable(row) and wanted(row["id"])]
        prompts = [stored_prompt(row) for row in rows]
        for row, prompt_ids in zip(rows, renderer.batch_token_ids(prompts, config.sampling.max_tokens), strict=True):
            assert not isinstance(prompt_ids, RowError), (row["id"], prompt_ids)  # it was generated for
            yield _completion(prompt_ids, row)


@dataclass(frozen=True, slots=True)
class OutputJob:
    """One output of the pipeline: the configuration that made it, and its committed parts."""

    config: JobConfig
    revision: str
    parts: tuple[str, ...]


def check_outputs(paths: Sequence[str]) -> list[OutputJob]:
    """The jobs behind outputs, which must be usable for training and sampled the same way. Raises ConfigError."""
    jobs = []
    for path in paths:
        store = JobStore(storage.absolute(path))
        config = store.load_config()
        _check_job(path, config)
        parts = [storage.join(store.output, receipt.path) for _, receipt in sorted(store.committed().items())]
        first = next((row for part in parts for row in read_part_rows(part, ("model_revision",))), None)
        if first is None:
            raise ConfigError(f"data.outputs must hold at least one finished row, got none in {path!r}")
        jobs.append(OutputJob(config, first["model_revision"], tuple(parts)))
    for path, job in zip(paths, jobs, strict=True):
        if _distribution(job) != _distribution(jobs[0]):
            raise ConfigError(
                "data.outputs must all be of one model and of the same temperature, top_p, top_k and min_p, "
                f"got {paths[0]!r} and {path!r}"
            )
    return jobs


def _check_job(path: str, config: JobConfig) -> None:
    missing = sorted({"token_ids", "cdf"} - set(config.output.extras))
    if missing:
        raise ConfigError(
            f"data.outputs must be made with output.extras token_ids and cdf, got {path!r} without {missing[0]}"
        )
    if config.sampling.temperature == 0.0:
        raise ConfigError(f"data.outputs must be sampled at a temperature above 0, got {path!r} at 0")
    if config.input.sampling_column is not None:
        raise ConfigError(f"data.outputs must be sampled in one way, got {path!r} with input.sampling_column")
    if config.sampling.has_penalties:
        raise ConfigError(f"data.outputs must be sampled without penalties, got {path!r} with some")


def _distribution(job: OutputJob) -> tuple[Any, ...]:
    sampling = job.config.sampling
    return job.revision, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p


def _is_usable(row: dict[str, Any]) -> bool:
    return row["finish_reason"] != "error" and bool(row["completion_token_ids"])


def _completion(prompt_ids: Sequence[int], row: dict[str, Any]) -> Document:
    """Worked example: prompt [7, 8], completion [5, 6] is ids [7, 8, 5, 6], targets [no, no, yes, yes]."""
    unknown = np.full(len(prompt_ids), np.nan)
    completion = row["completion_token_ids"]
    return Document(
        ids=np.concatenate((np.asarray(prompt_ids, np.int64), np.asarray(completion, np.int64))),
        is_target=np.arange(len(prompt_ids) + len(completion)) >= len(prompt_ids),
        low=np.concatenate((unknown, row["cdf_low"])),
        high=np.concatenate((unknown, row["cdf_high"])),
    )


class InputSource:
    """Rows of any data set: a column of token ids, of text, or of messages, of which the assistant's are targets."""

    has_edges = False
    splits_long = True

    def __init__(
        self,
        config: InputConfig,
        ids_column: str | None,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_id: int | None,
        vocabulary: int,
    ) -> None:
        """`eos_token_id` ends texts and assistant messages. Raises ConfigError where the files cannot be read."""
        self._config, self._ids_column = config, ids_column
        self._tokenizer, self._eos, self._vocabulary = tokenizer, eos_token_id, vocabulary
        if ids_column is not None:
            # A prompt column must hold text or messages; a template may use any column, and its text is not looked at.
            self._config = config.model_copy(
                update={"prompt_column": None, "prompt_template": f"{{{{ {ids_column} }}}}"}
            )
        job = JobConfig(
            model=ModelConfig(id="unused"),
            input=self._config,
            output=OutputConfig(path="unused", rows_per_shard=_ROWS_PER_UNIT),
        )
        self._shards = plan(job).shards
        self.units = len(self._shards)

    def read(self, unit: int, wanted: Wanted) -> Iterator[Document]:
        columns = () if self._ids_column is None else (self._ids_column,)
        for prompt in read_prompts(self._shards[unit], self._config, columns):
            if not wanted(prompt.uid):
                continue
            if self._ids_column is not None:
                document = self._ids_of(prompt.passthrough[self._ids_column])
            elif prompt.error is not None:
                continue
            else:
                document = self._text(prompt)
            if len(document) > 1:
                yield document

    def _ids_of(self, values: Any) -> Document:
        ids = np.asarray(values if values is not None else [], np.int64)
        if ids.ndim != 1 or (len(ids) and (ids.min() < 0 or ids.max() >= self._vocabulary)):
            raise ConfigError(
                f"data.ids_column must hold lists of token ids below {self._vocabulary}, got {str(values)[:80]}"
            )
        return Document(ids, np.arange(len(ids)) > 0)

    def _text(self, prompt: Prompt) -> Document:
        if prompt.messages is None:
            assert prompt.prompt is not None
            ids = self._encoded(prompt.prompt, special=True)
            ids += [] if self._eos is None else [self._eos]
            return Document(np.asarray(ids, np.int64), np.arange(len(ids)) > 0)
        return self._conversation([dict(message) for message in prompt.messages])

    def _conversation(self, messages: list[dict[str, str]]) -> Document:
        """The parts are tokenized each by itself, since at serving the prompt is, before the model's tokens follow."""
        if not self._tokenizer.chat_template:
            raise ConfigError(
                "data.input must hold plain strings for a model whose tokenizer has no chat template, got messages"
            )
        ids: list[int] = []
        is_target: list[bool] = []
        done = ""
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._rendered(messages[:i], add_generation_prompt=True)
            if not before.startswith(done):
                return Document(np.empty(0, np.int64), np.empty(0, np.bool_))  # the template rewrites what came before
            for text, target in ((before[len(done) :], False), (message["content"], True)):
                new = self._encoded(text, special=False)
                new += [self._eos] if target and self._eos is not None else []
                ids += new
                is_target += [target] * len(new)
            done = before + message["content"]
            after = self._rendered(messages[: i + 1], add_generation_prompt=False)
            done = self._after_end_token(done, after)
        return Document(np.asarray(ids, np.int64), np.asarray(is_target, np.bool_))

    def _after_end_token(self, done: str, rendered: str) -> str:
        """`done` and the end token's text, where the template writes it there: its id has been added already."""
        end = "" if self._eos is None else str(self._tokenizer.convert_ids_to_tokens(self._eos))
        return done + end if end and rendered.startswith(done + end) else done

    def _rendered(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        assert isinstance(text, str)
        return text

    def _encoded(self, text: str, *, special: bool) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=special)["input_ids"])
